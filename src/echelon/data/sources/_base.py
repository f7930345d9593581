"""What sources share: defaults for what they have nothing to say about, and the path they read."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from echelon.config import Config
from echelon.errors import ConfigError
from echelon.types import Problem


def required_path(config: Config) -> Path:
    """`data.path`, which a source of files cannot do without."""
    path = config.data.path
    if path is None:
        raise ConfigError(
            f"data.source is {config.data.source!r} but data.path is not set. "
            "Add `-o data.path=FILE`."
        )
    return path


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
