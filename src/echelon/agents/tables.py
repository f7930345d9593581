"""Embedding tables: the whole market encoded once per version of an encoder, then looked up.

1. `refresh` encodes every row on which a book can stand, into memory or into a file that is renamed
   when it is whole: whoever still reads the version before keeps it. Rows that a fold of the
   encoder holds (`Encoder.folds`) are that fold's to encode: of the train window, learners see
   nothing but what was fitted without it.
2. `look` gives the embeddings of some rows; nothing is encoded.
3. Where gradients are wanted (an adapter's training), `encode_rows` encodes just those rows.

Axes: `T` rows, `N` assets, `D` embedding, `W` window, `B` rows asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from echelon.envs.world import World
from echelon.errors import DataError, StoreError
from echelon.files import atomic_file, read_array
from echelon.market import Rows
from echelon.models.encoders import Encoder
from echelon.types import Bools, Floats32

_CHUNK_BARS, _SPAN_BARS = 256, 512
"""Rows of a table and of a span encoded at a time; W - 1 rows more are read for each chunk."""


class EmbeddingTable:
    """Z[T,N,D] float32 of one encoder version; rows on which no book can stand are zero."""

    def __init__(
        self, world: World, d_model: int, path: Path | None = None, *, fitted: bool = True
    ) -> None:
        """path: file to map the table from; None: in memory

        fitted: of the world that the encoder was fitted on, by whose rows its folds go
        """
        self.version = 0
        """0 before the first refresh, then one more with each."""
        self._world, self._path, self.d_model = world, path, d_model
        self._shape = (len(world.times), world.n_assets, d_model)
        self._standing, self._fitted = standing_rows(world), fitted
        self._z: Floats32 | None = None

    def refresh(self, encoder: Encoder) -> None:
        """Encode all rows again, as the encoder is now: the next version."""
        assert encoder.d_model == self._shape[2], "the encoder has another width than the table"
        assert encoder.window == self._world.window, "the encoder has another window than the world"
        chunks = self._chunks(encoder)
        if self._path is None:
            z = np.zeros(self._shape, dtype=np.float32)
            for rows, part in chunks:
                z[rows.start : rows.stop] = part
            self._z = z
        else:
            self._z = _write(self._path, self._shape, chunks)
        self.version += 1

    def share(self, made: EmbeddingTable) -> None:
        """Read the version that another table of the same world holds, in its file or in memory."""
        assert made._shape == self._shape, "the tables are of different worlds"
        self._z, self.version = made._z, made.version

    def attach(self, version: int) -> None:
        """Map the file that another process wrote, as its version says."""
        assert self._path is not None, "only a table in a file can be shared by processes"
        z = read_array(self._path, "It can be computed again: remove it and resume.")
        if z.shape != self._shape or z.dtype != np.float32:
            raise StoreError(
                f"{self._path}: an embedding table {z.dtype}{list(z.shape)}, expected "
                f"float32{list(self._shape)}. It belongs to another run: remove it and resume."
            )
        self._z, self.version = np.asarray(z), version

    def without_file(self) -> EmbeddingTable:
        """The same table as it is now, for where the file cannot be seen."""
        table = copy.copy(self)
        table._path = None
        return table

    def covers(self, world: World) -> bool:
        """Whether the embeddings are of that world's features; its splits may be others."""
        return world.x is self._world.x

    def stands(self, rows: Rows) -> Bools:
        """[B] which of the rows have a whole window, and hence an embedding."""
        return np.asarray(self._standing[rows])

    def look(self, rows: Tensor | NDArray[np.integer]) -> Tensor:
        """Embeddings[B,N,D] of rows[B], a copy without gradients."""
        assert self._z is not None, "refresh the table first"
        which = rows.numpy() if isinstance(rows, Tensor) else rows
        assert self._standing[which].all(), "a row was asked for that has no whole window"
        return torch.from_numpy(self._z[which])

    def close(self) -> None:
        self._z = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _chunks(self, encoder: Encoder) -> Iterator[tuple[range, Floats32]]:
        """(rows, their embeddings), from the first row to the last."""
        was_training = encoder.training
        encoder.eval()
        try:
            with torch.no_grad():
                for run in runs_of(self._standing):
                    for part, own in _encoders_of(run, encoder, fitted=self._fitted):
                        for rows in _chunks(part, _CHUNK_BARS):
                            yield rows, own(_windows_of(self._world, rows)).numpy()
        finally:
            encoder.train(was_training)


def _encoders_of(run: range, encoder: Encoder, *, fitted: bool) -> Iterator[tuple[range, Encoder]]:
    """The rows of a run in their order, and who encodes them."""
    at = run.start
    for rows, own in sorted(encoder.folds, key=lambda fold: fold.rows.start) if fitted else ():
        low, high = max(rows.start, at), min(rows.stop, run.stop)
        if low < high:
            yield from ((range(at, low), encoder), (range(low, high), own))
            at = high
    yield range(at, run.stop), encoder


def encode_span(encode: Callable[[Tensor], Tensor], world: World, span: range) -> Tensor:
    """Encodings[T,N,…] of every row of a span, without gradients, some rows at a time."""
    chunks = _chunks(span, _SPAN_BARS)
    with torch.no_grad():
        return torch.cat([encode(_windows_of(world, rows)) for rows in chunks])


def _chunks(rows: range, bars: int) -> Iterator[range]:
    return (range(low, min(low + bars, rows.stop)) for low in range(rows.start, rows.stop, bars))


def encode_rows(encoder: Encoder, world: World, rows: NDArray[np.integer]) -> Tensor:
    """Embeddings[B,N,D] of rows[B] with gradients: only the windows asked for, each once."""
    asked, place = np.unique(rows, return_inverse=True)
    assert len(asked), "no rows were asked for"
    assert asked[0] >= world.window - 1, "a row was asked for that has no whole window"
    windows = asked[:, None] + np.arange(1 - world.window, 1)
    z: Tensor = encoder(torch.from_numpy(world.x[windows]))[:, 0]
    in_order = len(asked) == len(rows) and bool((np.diff(place) > 0).all())
    return z if in_order else z[torch.from_numpy(place)]


def standing_rows(world: World) -> Bools:
    """[T]: rows on which a book can stand, with a whole window behind them.

    Those of the splits, and of the gaps between them, which whoever looks back comes through.
    Raises where the window of a stretch would reach into the stretch before it.
    """
    standing = np.zeros(len(world.times), dtype=bool)
    whole = [rows for name, rows in world.splits.items() if not world.stretches.get(name)]
    if whole:
        first = max(min(rows.start for rows in whole), world.window - 1)
        standing[first : max(rows.stop for rows in whole)] = True
    for name in world.splits:
        end = 0
        for piece in sorted(world.stretches.get(name, ()), key=lambda piece: piece.start):
            if piece.start - world.window + 1 < end:
                raise DataError(
                    f"split.{name}: the stretch from row {piece.start} on needs "
                    f"window={world.window} rows of its own, and the one before it ends at row "
                    f"{end}. Start it {world.window - 1} rows after its first."
                )
            standing[piece.start : piece.stop] = True
            end = piece.stop
    return standing


def runs_of(mask: Bools) -> list[range]:
    """Ranges of neighbouring true rows, in their order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [range(a, b) for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]


def _windows_of(world: World, rows: range) -> Tensor:
    return torch.from_numpy(np.array(world.x[rows.start - world.window + 1 : rows.stop]))


def _write(
    path: Path, shape: tuple[int, int, int], chunks: Iterator[tuple[range, Floats32]]
) -> Floats32:
    """Write a table in the order of its rows, give it its name, and map it read-only.

    Written, not mapped for writing: a full disk is then an error and not a killed process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": shape}
    try:
        with atomic_file(path) as handle:

            def write_zeros(n_rows: int) -> None:
                for _ in range(n_rows):
                    handle.write(bytes(4 * shape[1] * shape[2]))

            npy.write_array_header_1_0(handle, header)
            done = 0
            for rows, part in chunks:
                write_zeros(rows.start - done)
                handle.write(np.ascontiguousarray(part).data)
                done = rows.stop
            write_zeros(shape[0] - done)
        return read_array(path, "Make room, or mend the disk.")
    except OSError as error:
        raise StoreError(
            f"{path}: the embedding table cannot be written ({error.strerror or error}). It needs "
            f"{int(np.prod(shape)) * 4 / 1e6:,.0f} MB, twice while it is renewed: make room, or "
            "train on fewer bars."
        ) from error
