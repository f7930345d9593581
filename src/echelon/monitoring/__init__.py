"""What watches a run: metrics, alerts, and the guards against what training never saw."""
