"""Pages, tables and pictures of results: of a run, a walk-forward, an execution, a certificate."""
