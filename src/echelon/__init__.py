"""Echelon: hierarchical reinforcement-learning trading on one market kernel."""

__version__ = "0.1.0"
