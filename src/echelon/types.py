"""Named types that several layers share.

Axes, one letter each, the same everywhere: `T` time, `N` assets, `F` features, `W` window,
`L` the bars of one symbol with its gaps removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.errors import shorten

Floats: TypeAlias = NDArray[np.float64]
"""float64 array; prices and money."""
Floats32: TypeAlias = NDArray[np.float32]
"""float32 array; features."""
Bools: TypeAlias = NDArray[np.bool_]
Ints: TypeAlias = NDArray[np.int64]
Times: TypeAlias = NDArray[np.datetime64]
"""datetime64[us], naive, in the exchange's local time."""

Metrics: TypeAlias = dict[str, float]
"""Numbers for the training log by name, such as `losses/critic` or `charts/reward`."""
Freq: TypeAlias = Literal["1d", "5min", "1min"]
PriceBasis: TypeAlias = Literal["raw", "split_adjusted", "adjusted"]
"""What a source's OHLC are: as traded, adjusted for splits, or for splits and dividends."""


_SAID = 600
"""Characters of a problem's message that are shown."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a user's data, and where.

    `row` counts as the user would: the line of a text file (the header is line 1), the 0-based
    row of a Parquet file, `None` where the whole file or column is meant.
    """

    file: str
    row: int | None
    field: str | None
    message: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        place = self.file
        if self.row is not None:
            place += f", row {self.row}"
        if self.field is not None:
            place += f", field {self.field!r}"
        # Cells of a stranger's file may be as long as the file.
        return f"{place}: {shorten(self.message, _SAID)}. {self.remedy}"
