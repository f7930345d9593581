"""Reading CSV and Parquet files piece by piece, each row with its number.

1. `inspect` reads a file once as a stream: its content hash, encoding, delimiter and columns. A
   file that cannot be read at all is refused here, with the remedy.
2. `pieces` yields it in blocks. Text cells stay text, so that what cannot be understood later
   can be shown as it stood; lines with too few or too many cells are set aside.

Row numbers count as a user would: the line of a text file (the header is line 1), the 0-based
row of a Parquet file.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from echelon.errors import InvalidDataError, SourceError
from echelon.types import Problem

ROW = "__row"
"""Name of the row-number column that `pieces` adds."""

TEXT_SUFFIXES = (".csv", ".csv.gz", ".txt", ".txt.gz", ".tsv", ".tsv.gz")
PARQUET_SUFFIXES = (".parquet", ".pq")

_BLOCK_BYTES = 4 << 20  # the reader holds several; larger blocks cost memory and gain no time
_BATCH_ROWS = 250_000
_DELIMITERS = (",", "\t", ";", "|")
_REJECTED = {"file": pl.String, "row": pl.Int64, "problem": pl.String, "cells": pl.String}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What `inspect` found: `digest` is the SHA-256 of the bytes; text formats have the rest."""

    path: Path
    columns: tuple[str, ...]
    digest: str
    encoding: str | None = None
    delimiter: str = ","

    @property
    def is_text(self) -> bool:
        """CSV and its relatives, as against Parquet."""
        return self.encoding is not None

    @property
    def first_row(self) -> int:
        """Number of the first row of data, as a user would count it."""
        return 2 if self.is_text else 0


class Piece(NamedTuple):
    """A block of rows (with `ROW`), and the lines of it that are no rows."""

    frame: pl.DataFrame
    problems: list[Problem]
    rejected: pl.DataFrame


def suffix_of(path: Path, suffixes: Iterable[str]) -> str | None:
    """The longest of `suffixes` that `path` ends with, whatever its case."""
    name = path.name.lower()
    found = [s for s in suffixes if name.endswith(s)]
    return max(found, key=len) if found else None


def stem_of(path: Path) -> str:
    """File name without its format: AAPL.csv.gz → AAPL, 000001.SZ.csv → 000001.SZ."""
    suffix = suffix_of(path, (*TEXT_SUFFIXES, *PARQUET_SUFFIXES)) or ""
    return path.name[: len(path.name) - len(suffix)]


def rejects(file: str, rows: Sequence[tuple[int, str, str]] = ()) -> pl.DataFrame:
    """Frame of lines set aside: file, row, problem, cells (as they stood)."""
    return pl.DataFrame([(file, *r) for r in rows], schema=_REJECTED, orient="row")


def inspect(path: Path) -> FileFacts:
    """Read `path` once as a stream; raises `SourceError` where it cannot be used at all."""
    if not path.is_file():
        what = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise SourceError(f"{path}: {what}. Check the path (relative to {Path.cwd()}).")
    if path.stat().st_size == 0:
        raise SourceError(f"{path}: the file is empty. Export it again.")
    if suffix_of(path, PARQUET_SUFFIXES):
        return _inspect_parquet(path)
    return _inspect_text(path)


def pieces(facts: FileFacts, columns: Sequence[str]) -> Iterator[Piece]:
    """Yield the named columns of a file in blocks, with row numbers in `ROW`."""
    return _text_pieces(facts, columns) if facts.is_text else _parquet_pieces(facts, columns)


def read_whole(facts: FileFacts, columns: Sequence[str]) -> pl.DataFrame:
    """A small file in one frame; lines that are no rows raise `InvalidDataError`."""
    parts = list(pieces(facts, columns))
    problems = [p for part in parts for p in part.problems]
    if problems:
        raise InvalidDataError(problems)
    return pl.concat([part.frame for part in parts], how="vertical_relaxed")


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _inspect_parquet(path: Path) -> FileFacts:
    with path.open("rb") as handle:
        head = handle.read(4)
        handle.seek(-min(4, path.stat().st_size), io.SEEK_END)
        tail = handle.read(4)
    if head != b"PAR1":
        raise SourceError(
            f"{path}: not a Parquet file (it does not begin with PAR1). If it is text, name it "
            ".csv and use data.source: csv."
        )
    if tail != b"PAR1":
        raise SourceError(
            f"{path}: the Parquet file is truncated (its footer is missing). Copy or download it "
            "again."
        )
    try:
        with pa_parquet.ParquetFile(path) as opened:
            names, n_rows = tuple(opened.schema_arrow.names), opened.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    if n_rows == 0:
        raise SourceError(f"{path}: the Parquet file has no rows. Export it again.")
    return FileFacts(path, names, _sha256(path))


def _damaged(path: Path, error: Exception) -> SourceError:
    return SourceError(
        f"{path}: the Parquet file is damaged or truncated ({str(error).splitlines()[0]}). Copy "
        "or download it again."
    )


def _parquet_pieces(facts: FileFacts, columns: Sequence[str]) -> Iterator[Piece]:
    row = 0
    nothing = rejects(str(facts.path))
    try:
        with pa_parquet.ParquetFile(facts.path) as opened:
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS, columns=list(columns)):
                frame = cast(pl.DataFrame, pl.from_arrow(batch))
                numbers = pl.int_range(row, row + frame.height, dtype=pl.Int64, eager=True)
                row += frame.height
                yield Piece(frame.with_columns(numbers.alias(ROW)), [], nothing)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(facts.path, error) from error


def _open_bytes(path: Path) -> IO[bytes]:
    if path.name.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def _inspect_text(path: Path) -> FileFacts:
    encoding = _encoding_of(path)
    with _open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline="") as text:
        line, more = text.readline(), text.read(1 << 16)
    delimiter = "\t" if suffix_of(path, (".tsv", ".tsv.gz")) else _delimiter_of(line)
    columns = tuple(c.strip() for c in next(csv.reader([line], delimiter=delimiter), []))
    if not any(columns):
        raise SourceError(f"{path}: the first line is blank; it must name the columns.")
    if not more.strip():
        raise SourceError(f"{path}: the file has a header but no rows. Export it again.")
    return FileFacts(path, columns, _sha256(path), encoding, delimiter)


def _encoding_of(path: Path) -> str:
    """Decide by decoding the whole file: Chinese text may come long after an ASCII header."""
    first = next(_decompressed(path), b"")
    if not first.strip():
        raise SourceError(f"{path}: the file is empty. Export it again.")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for encoding in ("utf-8-sig", "gb18030"):
        if _decodes(path, encoding):
            return encoding
    raise SourceError(f"{path}: the text is neither UTF-8 nor GBK (GB18030). Save it as UTF-8.")


def _decodes(path: Path, encoding: str) -> bool:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for chunk in _decompressed(path):
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _decompressed(path: Path) -> Iterator[bytes]:
    try:
        with _open_bytes(path) as handle:
            while chunk := handle.read(1 << 20):
                yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SourceError(
            f"{path}: the gzip file is damaged or truncated ({error}). Copy or download it again."
        ) from error


def _delimiter_of(header: str) -> str:
    return max(_DELIMITERS, key=header.count)  # the first of equals: a comma where there is none


def _batches(reader: Any, file: str) -> Iterator[Any]:  # noqa: ANN401 (pyarrow is untyped)
    try:
        yield from reader
    except pa.ArrowInvalid as error:
        raise SourceError(f"{file}: not a table of text ({error}). Export it again.") from error


def _text_pieces(facts: FileFacts, columns: Sequence[str]) -> Iterator[Piece]:
    file = str(facts.path)
    # Columns are read by position: names may repeat, and a header may end in a delimiter.
    names = [f"c{k}" for k in range(len(facts.columns))]
    wanted = {f"c{facts.columns.index(c)}": c for c in columns}
    skipped: list[Any] = []

    def set_aside(line: Any) -> str:  # noqa: ANN401 (pyarrow's InvalidRow is untyped)
        skipped.append(line)
        return "skip"

    done = reported = 0
    with _open_bytes(facts.path) as raw:
        reader = pa_csv.open_csv(
            pa.PythonFile(raw, mode="r"),
            read_options=pa_csv.ReadOptions(
                # Line numbers of skipped lines are known only without threads.
                use_threads=False,
                block_size=_BLOCK_BYTES,
                skip_rows=1,
                column_names=names,
                encoding="utf8" if facts.encoding == "utf-8-sig" else facts.encoding,
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=facts.delimiter,
                ignore_empty_lines=False,  # they count as lines
                newlines_in_values=True,
                invalid_row_handler=set_aside,
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types={n: pa.string() for n in names},
                include_columns=list(wanted),
                strings_can_be_null=False,
            ),
        )
        for batch in _batches(reader, file):
            numbers = _line_numbers(done, batch.num_rows, [s.number for s in skipped])
            done += batch.num_rows
            frame = cast(pl.DataFrame, pl.from_arrow(batch)).rename(wanted)
            frame = frame.with_columns(numbers.alias(ROW)).filter(
                pl.any_horizontal(pl.col(c).str.strip_chars() != "" for c in columns)
            )
            new, reported = skipped[reported:], len(skipped)
            yield Piece(frame, *_wrong_lines(file, new))
    if reported < len(skipped):
        empty = pl.DataFrame(schema={**dict.fromkeys(columns, pl.String), ROW: pl.Int64})
        yield Piece(empty, *_wrong_lines(file, skipped[reported:]))


def _line_numbers(done: int, count: int, skipped: Sequence[int]) -> pl.Series:
    """Line numbers of the rows `done` to `done + count`, given the lines that were skipped."""
    rows = pl.int_range(done, done + count, dtype=pl.Int64, eager=True)
    # The k-th skipped line, at line v, has v − 2 − k rows before it.
    before = pl.Series([v - 2 - k for k, v in enumerate(skipped)], dtype=pl.Int64)
    return rows + before.search_sorted(rows, side="right").cast(pl.Int64) + 2


def _wrong_lines(file: str, lines: Sequence[Any]) -> tuple[list[Problem], pl.DataFrame]:
    problems, rows = [], []
    for line in lines:
        message = f"the line has {line.actual_columns} cells, the header {line.expected_columns}"
        remedy = "Complete the line, or quote cells that contain the delimiter"
        problems.append(Problem(file, line.number, None, message, remedy))
        rows.append((line.number, message, line.text))
    return problems, rejects(file, rows)
