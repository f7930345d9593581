"""Reading CSV and Parquet files piece by piece, each row with its number.

1. `inspect` reads a file once as a stream: its content hash, encoding, delimiter and columns. A
   file that cannot be read at all is refused here, with the remedy.
2. `pieces` yields it in blocks. Text cells stay text, so that what cannot be understood later
   can be shown as it stood; lines with too few or too many cells are set aside.

Row numbers count as a user would: the line of a text file (the header is line 1), the 0-based
row of a Parquet file.

Files come from strangers: what leaves here is rows, or an error that names the file and the remedy.
Absurd shapes (a header of a million columns, a gzip bomb) are refused before they cost anything.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from echelon.errors import InvalidDataError, Problem, SourceError, shorten
from echelon.files import sha256_file

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ROW = "__row"  # name of the row-number column that `pieces` adds

TEXT_SUFFIXES = (".csv", ".csv.gz", ".txt", ".txt.gz", ".tsv", ".tsv.gz")
PARQUET_SUFFIXES = (".parquet", ".pq")

MAX_COLUMNS = 10_000
"""Columns of the widest table that is read; bars have a dozen, files of factors some hundred."""
MAX_FILES = 200_000  # entries of a directory that are looked at
_HEADER_BYTES = 1 << 20
_FOOTER_BYTES = 64 << 20
_WHOLE_ROWS = 5_000_000
_WRONG_LINES = 1_000_000
# Text shrinks to a tenth, ticks to a fiftieth; a bomb to a thousandth.
_UNZIPPED_RATIO = 200
_UNZIPPED_FREE = 256 << 20
_BLOCK_BYTES = 4 << 20  # several are held at once; larger ones cost memory and gain no time
_LINE_BYTES = 1 << 20
_WORKERS = 2
_BATCH_ROWS = 250_000
_DELIMITERS = (",", "\t", ";", "|")
MISSING = ("", "-", "--", "—", "——", "nan", "na", "n/a", "#n/a", "null", "none", "nat", "\x00")
"""What an empty cell says, in lower case."""
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
        return self.encoding is not None


class TableBlock(NamedTuple):
    """A block of rows (with `ROW`), and the lines of it that are no rows."""

    frame: pl.DataFrame
    problems: list[Problem]
    rejected_rows: pl.DataFrame


def suffix_of(path: Path, suffixes: Iterable[str]) -> str | None:
    """The longest of `suffixes` that `path` ends with, whatever its case."""
    name = path.name.lower()
    return max((s for s in suffixes if name.endswith(s)), key=len, default=None)


def stem_of(path: Path) -> str:
    """File name without its format: AAPL.csv.gz → AAPL, 000001.SZ.csv → 000001.SZ."""
    suffix = suffix_of(path, (*TEXT_SUFFIXES, *PARQUET_SUFFIXES)) or ""
    return path.name[: len(path.name) - len(suffix)]


def rejects(file: str, rows: Sequence[tuple[int, str, str]] = ()) -> pl.DataFrame:
    """Frame of lines set aside: file, row, problem, cells (as they stood)."""
    return pl.DataFrame([(file, *r) for r in rows], schema=_REJECTED, orient="row")


def files_below(path: Path) -> list[Path]:
    """The file itself, those in a directory and below, or of a pattern such as data/*.csv."""
    wild = [k for k, part in enumerate(path.parts) if any(c in part for c in "*?[")]
    if path.is_file():
        return [path]
    if path.is_dir():
        entries = path.rglob("*")
    elif wild:
        entries = Path(*path.parts[: wild[0]]).glob("/".join(path.parts[wild[0] :]))
    else:
        raise SourceError(f"{path}: does not exist. Check data.path (relative to {Path.cwd()}).")
    try:
        paths = list(islice(entries, MAX_FILES + 1))
    except (ValueError, NotImplementedError) as error:  # '**' within a name, say
        raise SourceError(f"{path}: no pattern of files ({error}). Correct data.path.") from error
    if len(paths) > MAX_FILES:
        raise SourceError(
            f"{path}: more than {MAX_FILES:,} files and directories. Name a directory with the "
            "data alone, join small files into larger ones, or import a part at a time."
        )
    return sorted(f for f in paths if f.is_file())


@contextmanager
def reading_file(path: Path, what: str = "the file") -> Iterator[None]:
    """Turn whatever a library says of the content of `path` into a `SourceError` that names it."""
    try:
        yield
    except (
        *(pa.ArrowException, pl.exceptions.PolarsError, csv.Error, zlib.error),
        pl.exceptions.PanicException,  # no Exception: nothing else would catch it
        *(OSError, EOFError, LookupError, MemoryError, OverflowError, RecursionError),
        ValueError,  # UnicodeError among them
    ) as error:
        said = shorten(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        raise SourceError(
            f"{path}: {what} is damaged, cut short or no table ({said}). Copy, download or export "
            "it again."
        ) from error


def inspect(path: Path) -> FileFacts:
    """Read `path` once as a stream; raises `SourceError` where it cannot be used at all."""
    if not path.is_file():
        what = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise SourceError(f"{path}: {what}. Check the path (relative to {Path.cwd()}).")
    if path.stat().st_size == 0:
        raise SourceError(f"{path}: the file is empty. Export it again.")
    with reading_file(path):
        is_parquet = suffix_of(path, PARQUET_SUFFIXES) is not None
        facts = _inspect_parquet(path) if is_parquet else _inspect_text(path)
    if len(facts.columns) > MAX_COLUMNS:
        raise _too_wide(path, f"{len(facts.columns):,} columns")
    return facts


def _too_wide(path: Path, what: str) -> SourceError:
    return SourceError(
        f"{path}: {what}, more than any table of bars (at most {MAX_COLUMNS:,} columns). Export "
        "one row per bar, and only the columns that are needed."
    )


def pieces(
    facts: FileFacts,
    columns: Sequence[str],
    block_bytes: int | None = None,
    types: Mapping[str, pa.DataType] = {},
) -> Iterator[TableBlock]:
    """Yield the named columns of a file in blocks, with row numbers in `ROW`.

    block_bytes: of text in a block; None: as many as are read fastest
    types: of columns of text that have one; a block with a cell that does not fit comes as text
    """
    if facts.is_text:
        blocks = _text_pieces(facts, columns, block_bytes or _BLOCK_BYTES, types)
    else:
        blocks = _parquet_pieces(facts, columns)
    with reading_file(facts.path, "the file" if facts.is_text else "the Parquet file"):
        yield from blocks


def lines_of(facts: FileFacts, rows: Collection[int]) -> dict[int, str]:
    """Row number → line, as it stands in a file of text; nothing of a Parquet file."""
    if not facts.is_text:
        return {}
    wanted = frozenset(rows)
    with (
        reading_file(facts.path),
        open_bytes(facts.path) as raw,
        io.TextIOWrapper(raw, encoding=facts.encoding, errors="replace") as text,
    ):
        return {k: line.rstrip("\n") for k, line in enumerate(text, start=1) if k in wanted}


def read_whole(facts: FileFacts, columns: Sequence[str]) -> pl.DataFrame:
    """A small file in one frame; lines that are no rows raise `InvalidDataError`."""
    parts, rows = [], 0
    for part in pieces(facts, columns):
        parts.append(part)
        rows += part.frame.height
        if rows > _WHOLE_ROWS:
            raise SourceError(
                f"{facts.path}: more than {_WHOLE_ROWS:,} rows, too many for a file next to the "
                "bars. Keep the rows that are needed."
            )
    problems = [p for part in parts for p in part.problems]
    if problems:
        raise InvalidDataError(problems)
    return pl.concat([part.frame for part in parts], how="vertical_relaxed")


def _inspect_parquet(path: Path) -> FileFacts:
    with path.open("rb") as handle:
        head = handle.read(4)
        handle.seek(-min(8, path.stat().st_size), io.SEEK_END)
        length, tail = int.from_bytes(handle.read(4), "little"), handle.read(4)
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
    if length > _FOOTER_BYTES:
        raise _too_wide(path, f"a description of {length >> 20} MiB")
    with reading_file(path, "the Parquet file"), pa_parquet.ParquetFile(path) as opened:
        names, n_rows = tuple(opened.schema_arrow.names), opened.metadata.num_rows
    if n_rows == 0:
        raise SourceError(f"{path}: the Parquet file has no rows. Export it again.")
    return FileFacts(path, names, sha256_file(path))


def _parquet_pieces(facts: FileFacts, columns: Sequence[str]) -> Iterator[TableBlock]:
    row = 0
    nothing = rejects(str(facts.path))
    with pa_parquet.ParquetFile(facts.path) as opened:
        _refuse_nested(facts.path, opened.schema_arrow, columns)
        batches = opened.iter_batches(batch_size=_BATCH_ROWS, columns=list(columns))
        for frame in _join_small(map(_plain_frame, batches)):
            numbers = pl.int_range(row, row + frame.height, dtype=pl.Int64)
            row += frame.height
            yield TableBlock(frame.with_columns(numbers.alias(ROW)), [], nothing)


def _plain_frame(batch: pa.RecordBatch) -> pl.DataFrame:
    """Without dictionaries, whose codes would pass for numbers, and half or 256-bit numbers."""
    plain = []
    for column in batch.columns:
        is_coded = pa.types.is_dictionary(column.type)
        values = column.dictionary_decode() if is_coded else column
        if pa.types.is_float16(values.type):
            values = values.cast(pa.float32())
        if pa.types.is_decimal256(values.type):
            values = values.cast(pa.float64())
        plain.append(values)
    return cast(pl.DataFrame, pl.from_arrow(pa.table(plain, names=batch.schema.names)))


def _join_small(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Frames of many rows: a file may have been written a row at a time, and be read so."""
    waiting: list[pl.DataFrame] = []
    height = 0
    for frame in frames:
        waiting.append(frame)
        height += frame.height
        if height >= _BATCH_ROWS:
            yield pl.concat(waiting)
            waiting, height = [], 0
    if waiting:
        yield pl.concat(waiting)


def _refuse_nested(path: Path, schema: pa.Schema, columns: Sequence[str]) -> None:
    """Refuse needed columns whose cells are no single number, text, date, time or yes-or-no."""
    known = pa.types
    plain = (
        *(known.is_integer, known.is_floating, known.is_decimal, known.is_boolean),
        *(known.is_string, known.is_large_string, known.is_string_view),
        *(known.is_date, known.is_time, known.is_timestamp, known.is_null),
    )
    problems = []
    remedy = "Write one plain value per row and column (text as text, not as bytes)"
    for column in columns:
        kind = schema.field(column).type
        value = kind.value_type if known.is_dictionary(kind) else kind
        if not any(fits(value) for fits in plain):
            what = f"the column holds {shorten(kind, 80)}; expected numbers, text, dates or times"
            problems.append(Problem(str(path), None, column, what, remedy))
    if problems:
        raise InvalidDataError(problems, f"{path}: the columns cannot be used")


class _Unzipped(io.RawIOBase):
    """The content of a gzip file. Damage is a `SourceError`, and so is a bomb."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._most = max(_UNZIPPED_FREE, _UNZIPPED_RATIO * path.stat().st_size)
        self._file = gzip.open(path, "rb")  # noqa: SIM115 (closed with this)
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        try:
            count = self._file.readinto(buffer)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise SourceError(
                f"{self._path}: the gzip file is damaged or truncated ({shorten(error)}). Copy or "
                "download it again."
            ) from error
        self._done += count
        if self._done > self._most:
            raise SourceError(
                f"{self._path}: the gzip file unpacks to over {_UNZIPPED_RATIO} times its size, "
                "which no table does. If it is one, unpack it first."
            )
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def open_bytes(path: Path) -> BinaryIO:
    """Open a file of text as bytes, unpacked where it is gzip, by its name or its content."""
    plain = path.open("rb")
    if not path.name.lower().endswith(".gz") and plain.peek(2)[:2] != b"\x1f\x8b":
        return plain
    plain.close()
    return cast(BinaryIO, io.BufferedReader(_Unzipped(path), 1 << 20))


def _inspect_text(path: Path) -> FileFacts:
    with open_bytes(path) as raw:
        first = raw.read(_HEADER_BYTES)
    if not first.strip():
        raise SourceError(f"{path}: the file is empty. Export it again.")
    if len(first) == _HEADER_BYTES and b"\n" not in first and b"\r" not in first:
        raise _too_wide(path, f"the first line is longer than {_HEADER_BYTES >> 20} MiB")
    encoding = _encoding_of(path, first)
    with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline="") as text:
        line, more = text.readline(), text.read(1 << 16)
    if "\x00" in line:
        raise SourceError(
            f"{path}: the first line holds NUL characters: a binary file, or UTF-16 without its "
            "mark. Save it as UTF-8 text."
        )
    delimiter = max(_DELIMITERS, key=line.count)  # the first of equals: a comma where there is none
    if suffix_of(path, (".tsv", ".tsv.gz")):
        delimiter = "\t"
    columns = tuple(c.strip() for c in next(csv.reader([line], delimiter=delimiter), []))
    if not any(columns):
        raise SourceError(f"{path}: the first line is blank; it must name the columns.")
    if not more.strip():
        raise SourceError(f"{path}: the file has a header but no rows. Export it again.")
    return FileFacts(path, columns, sha256_file(path), encoding, delimiter)


def _encoding_of(path: Path, first: bytes) -> str:
    """Decide by decoding the whole file: Chinese text may come long after an ASCII header."""
    if first.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        raise SourceError(f"{path}: the text is UTF-32. Save it as UTF-8.")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        if not _decodes(path, "utf-16"):
            raise SourceError(
                f"{path}: the text is marked as UTF-16 but is cut short or something else. Copy or "
                "export it again, best as UTF-8."
            )
        return "utf-16"
    for encoding in ("utf-8-sig", "gb18030"):
        if _decodes(path, encoding):
            return encoding
    raise SourceError(f"{path}: the text is neither UTF-8 nor GBK (GB18030). Save it as UTF-8.")


def _decodes(path: Path, encoding: str) -> bool:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        with open_bytes(path) as handle:
            while chunk := handle.read(1 << 20):
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


class _Parsed(NamedTuple):
    """A block of text; row numbers count from the block's first line."""

    frame: pl.DataFrame  # `ROW` counts from 0
    lines: int
    ragged: list[Any]  # too few or too many cells, as pyarrow has them; numbers count from 1


def _text_pieces(
    facts: FileFacts, columns: Sequence[str], block_bytes: int, types: Mapping[str, pa.DataType]
) -> Iterator[TableBlock]:
    line, n_wrong, file = 2, 0, str(facts.path)
    remedy = "Complete the line, or quote cells that contain the delimiter"
    for parsed in _parse_ahead(facts, columns, block_bytes, types):
        wrong = []
        for row in parsed.ragged:
            said = f"the line has {row.actual_columns} cells, the header {len(facts.columns)}"
            wrong.append((line + row.number - 1, said, row.text))
        problems = [Problem(file, number, None, said, remedy) for number, said, _ in wrong]
        frame = parsed.frame.with_columns(pl.col(ROW) + line)
        yield TableBlock(frame, problems, rejects(file, wrong))
        line, n_wrong = line + parsed.lines, n_wrong + len(parsed.ragged)
        if n_wrong > _WRONG_LINES:
            raise ValueError(f"more than {_WRONG_LINES:,} lines that are no rows")


def _parse_ahead(
    facts: FileFacts, columns: Sequence[str], block_bytes: int, types: Mapping[str, pa.DataType]
) -> Iterator[_Parsed]:
    """Parse blocks in threads while the caller works on those before; in file order."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        waiting: deque[Future[_Parsed]] = deque()
        for text in _whole_lines(facts, block_bytes):
            waiting.append(pool.submit(_parse_block, text, facts, columns, types))
            if len(waiting) > _WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _whole_lines(facts: FileFacts, block_bytes: int) -> Iterator[bytes]:
    """What follows the header, as UTF-8, in blocks that end with a line and outside of quotes."""
    assert facts.encoding is not None
    decoder = codecs.getincrementaldecoder(facts.encoding)()
    is_utf8, rest, header = facts.encoding == "utf-8-sig", b"", True
    with open_bytes(facts.path) as raw:
        while chunk := raw.read(block_bytes):
            rest += chunk if is_utf8 else decoder.decode(chunk).encode()
            if header:
                first = re.search(rb"\r\n|\n|\r(?!$)", rest)
                if first is None:
                    continue
                rest, header = rest[first.end() :], False
            cut = rest.rfind(b"\n") + 1 or rest.rfind(b"\r", 0, -1) + 1
            if len(rest) - cut > _LINE_BYTES:
                raise SourceError(
                    f"{facts.path}: a line of more than {_LINE_BYTES >> 20} MiB. The file is "
                    "damaged, or no table: export it again."
                )
            open_quote = rest.count(b'"', 0, cut) % 2 and len(rest) < block_bytes + _LINE_BYTES
            if cut and not open_quote:
                yield rest[:cut]
                rest = rest[cut:]
    if rest and not header:
        yield rest


def _parse_block(
    text: bytes, facts: FileFacts, columns: Sequence[str], types: Mapping[str, pa.DataType]
) -> _Parsed:
    """A block in the types that are wanted, or as text where a cell does not fit them."""
    ragged: list[Any] = []

    def skip(row: Any) -> str:  # noqa: ANN401 (pyarrow's InvalidRow is untyped)
        ragged.append(row)
        return "skip"

    # Columns are read by position: names may repeat, and a header may end in a delimiter.
    names = [f"c{k}" for k in range(len(facts.columns))]
    wanted = {f"c{facts.columns.index(c)}": c for c in columns}

    def parse(typed: bool) -> pa.Table:
        kinds = {n: types.get(c, pa.string()) if typed else pa.string() for n, c in wanted.items()}
        return pa_csv.read_csv(
            pa.BufferReader(text),
            # Line numbers of skipped lines are known only without threads.
            read_options=pa_csv.ReadOptions(
                use_threads=False, column_names=names, block_size=len(text) + 1
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=facts.delimiter,
                ignore_empty_lines=False,  # they count as lines
                newlines_in_values=True,
                invalid_row_handler=None if typed else skip,
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=kinds,
                include_columns=list(wanted),
                null_values=[*MISSING, "NULL", "NaN", "NA", "N/A", "None"],
                strings_can_be_null=False,
            ),
        )

    try:
        table = parse(typed=bool(types))
    except pa.ArrowInvalid:
        table = parse(typed=False)
    lines = np.arange(table.num_rows + len(ragged), dtype=np.int64)
    rows = np.delete(lines, [row.number - 1 for row in ragged])
    frame = (
        cast(pl.DataFrame, pl.from_arrow(table)).rename(wanted).with_columns(pl.Series(ROW, rows))
    )
    first = frame[columns[0]].unique().cast(pl.String).str.strip_chars()
    if first.null_count() or (first == "").any():  # else no line is blank
        cells = pl.col(columns).cast(pl.String).str.strip_chars().fill_null("")
        frame = frame.filter(pl.any_horizontal(cells != ""))
    return _Parsed(frame, lines.size, ragged)
