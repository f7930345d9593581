"""Run a policy over a split, measure it, and compare it with baselines."""
