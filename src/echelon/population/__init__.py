"""The hierarchy: a population of experts, the router over them, and how both are trained."""
