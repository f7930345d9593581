"""Pictures and reports."""

from echelon.report.prepared import draw_prepared
from echelon.report.write import write_report

__all__ = ["draw_prepared", "write_report"]
