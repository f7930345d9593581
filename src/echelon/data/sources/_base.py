"""Defaults for sources that have nothing to say about instruments, membership or benchmark."""

from __future__ import annotations

import polars as pl

from echelon.types import Problem


class SourceDefaults:
    """Mix-in: every optional part of the `Source` protocol answers 'none'."""

    def problems(self) -> list[Problem]:
        """No row was unreadable."""
        return []

    def rejected(self) -> pl.DataFrame | None:
        """No row was unreadable."""
        return None

    def instruments(self) -> pl.DataFrame | None:
        """Nothing known beyond the bars."""
        return None

    def membership(self) -> pl.DataFrame | None:
        """No index membership."""
        return None

    def benchmark(self) -> pl.DataFrame | None:
        """No benchmark."""
        return None
