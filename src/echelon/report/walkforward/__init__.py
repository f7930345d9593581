"""The page of a walk-forward."""
