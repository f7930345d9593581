"""Leak-free features: definitions, pipeline, scaler, cache, leakage check."""
