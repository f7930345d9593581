"""Pictures and reports."""

from echelon.report.prepared import draw_prepared

__all__ = ["draw_prepared"]
