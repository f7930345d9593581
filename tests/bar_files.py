"""Helpers of the tests of file sources: write files, read them back, catch refusals."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from echelon.data.sources.files import CsvSource, ParquetSource
from echelon.errors import Problem, SourceError
from echelon.types import Freq

ENGLISH = """date,symbol,open,high,low,close,volume
2020-01-02,AAA,10,10.5,9.9,10.2,1000
2020-01-02,BBB,20,20.5,19.9,20.2,2000
2020-01-03,AAA,10.2,10.6,10.1,10.4,1100
"""


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(source: CsvSource | ParquetSource) -> pl.DataFrame:
    return pl.concat([raw.frame for raw in source.frames()])


def problems_of(source: CsvSource | ParquetSource) -> list[Problem]:
    """What could not be read, which is known once the frames have been."""
    for _ in source.frames():
        pass
    return source.problems()


def csv_of(tmp_path: Path, text: str, freq: Freq = "1d", **options: Any) -> CsvSource:
    return CsvSource(write(tmp_path / "bars.csv", text), freq=freq, **options)


def times_of(tmp_path: Path, cells: Sequence[str], freq: Freq, **options: Any) -> list[datetime]:
    lines = "".join(f"{cell},{k + 1}\n" for k, cell in enumerate(cells))
    return read(csv_of(tmp_path, "time,close\n" + lines, freq, **options))["time"].to_list()


def refusal(source: CsvSource | ParquetSource) -> str:
    with pytest.raises(SourceError) as caught:
        list(source.frames())
    return str(caught.value)
