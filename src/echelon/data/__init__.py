"""Point-in-time market data: sources, validation, store, panel."""
