"""Sources of market data. `open_source` makes the one a configuration names."""
