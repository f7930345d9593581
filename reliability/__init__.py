"""Whether Echelon stands: `make fuzz` damages its inputs, `make kill` ends it at any moment."""
