"""Harnesses that try to break Echelon: `make fuzz` and `make kill`."""
