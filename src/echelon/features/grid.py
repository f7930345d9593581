"""A float32 array [T,N,F] on disk, written by assets and then rewritten by time.

Indicators are computed symbol by symbol, ranks and scaling bar by bar; at 5,000 symbols neither
order fits in memory whole. Plain positioned writes are used instead of a memory map because
mapped pages count as the process's memory while they are dirty.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from echelon.files import Closing
from echelon.types import Floats32

_ASSETS_BYTES = 64 * 1024 * 1024  # wide enough that a row's piece is several pages
_ROWS_BYTES = 4 * 1024 * 1024  # what is made of a block should still fit in the cache


class GridFile(Closing):
    """An .npy file under construction; use as a context manager."""

    def __init__(self, path: Path, shape: tuple[int, int, int], *, create: bool = True) -> None:
        self.shape = shape
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<f4", "fortran_order": False, "shape": shape}
        )
        self._start = header.tell()
        self._row_bytes = 4 * shape[1] * shape[2]
        if create:
            with path.open("wb") as handle:
                handle.write(header.getvalue())
                handle.truncate(self._start + shape[0] * self._row_bytes)
        self._fd = os.open(path, os.O_RDWR)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def symbol_blocks(self) -> Iterator[range]:
        """Ranges of assets whose columns fit in a block."""
        width = max(1, _ASSETS_BYTES // max(1, 4 * self.shape[0] * self.shape[2]))
        for first in range(0, self.shape[1], width):
            yield range(first, min(first + width, self.shape[1]))

    def time_blocks(self) -> Iterator[range]:
        """Ranges of bars whose rows fit in a block."""
        height = max(1, _ROWS_BYTES // max(1, self._row_bytes))
        for first in range(0, self.shape[0], height):
            yield range(first, min(first + height, self.shape[0]))

    def write_assets(self, assets: range, block: Floats32) -> None:
        """Write block [T,n,F] as the columns of `assets`."""
        assert block.shape == (self.shape[0], len(assets), self.shape[2]), "block is not [T,n,F]"
        if len(assets) == self.shape[1]:
            self._write(0, block)
            return
        offset = 4 * assets.start * self.shape[2]
        for t, row in enumerate(np.ascontiguousarray(block, dtype="<f4")):
            _write_all(self._fd, row, self._start + t * self._row_bytes + offset)

    def read_rows(self, rows: range) -> Floats32:
        """Read [len(rows),N,F]."""
        block = np.empty((len(rows), *self.shape[1:]), dtype="<f4")
        _read_all(self._fd, block, self._start + rows.start * self._row_bytes)
        return block.astype(np.float32, copy=False)

    def write_rows(self, rows: range, block: Floats32) -> None:
        """Write block [len(rows),N,F]."""
        assert block.shape == (len(rows), *self.shape[1:]), "block is not [rows,N,F]"
        self._write(rows.start, block)

    def _write(self, first: int, block: Floats32) -> None:
        data = np.ascontiguousarray(block, dtype="<f4")
        _write_all(self._fd, data, self._start + first * self._row_bytes)


def _bytes_of(data: Floats32) -> memoryview:
    return memoryview(data.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _write_all(fd: int, data: Floats32, offset: int) -> None:
    view = _bytes_of(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _read_all(fd: int, into: Floats32, offset: int) -> None:
    view = _bytes_of(into)
    while view:
        done = os.preadv(fd, [view], offset)
        assert done > 0, "the grid file is shorter than its header says"
        view, offset = view[done:], offset + done
