"""Evaluation of trained runs, comparison and ablation."""
