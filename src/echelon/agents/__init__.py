"""Agents: learners, the policies they become, and the loops that train them."""
