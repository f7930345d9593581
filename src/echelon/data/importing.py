"""Import: source → validated bars → a new version of a dataset, or nothing at all.

1. Each piece a source yields is validated; bad rows are listed, or set aside with --quarantine.
2. Good rows are spilled to disk by partition, so memory holds one partition at a time.
3. Partitions are merged in time order: duplicates across pieces found, update rows joined to
   what is stored, adjustment factors anchored at each symbol's first bar.
4. The finished version is published in one rename (`Store.publish`).

Anchoring at the first bar keeps later splits and dividends out of past price levels. Where a
source gives reference prices (`pre_close`) instead of a factor, ex-right days are found from them.
An update begins with a bar that is stored already, and that overlap says how its factor, and the
units of a vendor who has restated history, continue what is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

import polars as pl

from echelon.data.bars import OPTIONAL, SCHEMA, RawFrame, conform
from echelon.data.calendars import FROM_DATA
from echelon.data.sources import Source
from echelon.data.store import (
    CURRENT,
    Manifest,
    Partition,
    Store,
    digest_frame,
    import_fingerprint,
)
from echelon.data.validate import validate
from echelon.errors import DataError, InvalidDataError, Problem
from echelon.files import exclusive_lock, link_or_copy, staging_directory, sweep, write_csv
from echelon.sources import SourceInfo

QUARANTINE = "quarantine.csv"
_SPILL_ROWS = 250_000
# The span of a partition, and its name by when it begins.
_PARTITIONS = {"1d": ("1y", "%Y"), "5min": ("1mo", "%Y-%m"), "1min": ("1d", "%Y-%m-%d")}
STORED_COLUMNS = tuple(SCHEMA)

RowProgress = Callable[[int], None]
"""Called with the number of rows read so far."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    manifest: Manifest
    added: int  # rows that were not in the store before
    problems: tuple[Problem, ...]  # of quarantined rows, and warnings
    quarantine: Path | None  # the file with the rows set aside, None without any


@dataclass(frozen=True)
class Extras:
    membership: pl.DataFrame | None = None
    instruments: pl.DataFrame | None = None
    benchmark: pl.DataFrame | None = None
    fingerprint: str = ""


def import_source(
    source: Source,
    store: Store,
    name: str,
    *,
    quarantine: bool = False,
    update: bool = False,
    extras: Extras = Extras(),  # noqa: B008 (frozen)
    progress: RowProgress | None = None,
) -> ImportReport:
    """Read `source` into dataset `name`, replacing it, or adding to it with `update`."""
    home = store.directory(name)
    with _claim(home, name), staging_directory(home) as staging:
        base = store.manifest(name) if update and name in store else None
        info = source.info()
        if base is not None:
            _refuse_other_kind(info, base)
        run = _Import(info, staging, base, store, quarantine)
        run.read(source, progress)
        partitions = run.merge()
        tables = run.tables(source, extras)
        aside = home / QUARANTINE
        if run.bad:
            write_csv(aside, pl.concat(run.bad, how="diagonal_relaxed"))
        # Of what the source says of itself, fields without a single value are left out.
        fields = info.fields & (run.filled | {"close"}) | (base.info.fields if base else set())
        draft = Manifest(
            name=name,
            version="",
            info=replace(info, fields=fields),
            partitions=partitions,
            tables=tables,
            content_hash="",
            fingerprint=import_fingerprint(info.fingerprint, extras.fingerprint),
            quarantined=run.n_bad,
        )
        manifest = store.publish(staging, draft)
        if not run.bad:
            aside.unlink(missing_ok=True)  # of an earlier import
        added = manifest.rows - (base.rows if base is not None else 0)
        return ImportReport(manifest, added, tuple(run.problems), aside if run.bad else None)


@contextmanager
def _claim(home: Path, name: str) -> Iterator[None]:
    """Hold a dataset's directory for an import; one that stays without a dataset goes again."""
    with exclusive_lock(home / ".lock", f"dataset {name!r}"):
        for stale in home.glob(".staging-*"):  # of an import that was killed: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        sweep(home)
        try:
            yield
        finally:
            if not (home / CURRENT).exists() and not list(home.glob("v-*")):
                shutil.rmtree(home, ignore_errors=True)


@dataclass
class _Import:
    """The state of one import; its methods run in the order in which they stand."""

    info: SourceInfo
    staging: Path
    base: Manifest | None
    store: Store
    quarantine: bool
    problems: list[Problem] = field(default_factory=list)
    n_bad: int = 0
    bad: list[pl.DataFrame] = field(default_factory=list)
    filled: set[str] = field(default_factory=set)
    _spills: int = 0
    _stats: list[pl.DataFrame] = field(default_factory=list)

    def read(self, source: Source, progress: RowProgress | None) -> None:
        since = None
        if self.base is not None:
            table = self.store.symbols(self.base.name)
            since = dict(zip(table["symbol"], table["last"], strict=True))
        buffer: list[pl.DataFrame] = []
        rows = total = 0
        for raw in source.frames(since):
            checked = validate(raw, self.info)
            self.problems.extend(checked.problems)
            self._set_aside(checked.bad.with_columns(pl.lit(raw.origin).alias("file")))
            good = checked.good.with_columns(pl.lit(raw.origin).alias("origin"))
            if good.height:
                buffer.append(good)
            rows += good.height
            total += raw.frame.height
            if progress is not None:
                progress(total)
            if rows >= _SPILL_ROWS:
                self._spill(buffer)
                buffer, rows = [], 0
        self._spill(buffer)
        self.problems.extend(source.problems())
        errors = [p for p in self.problems if p.severity == "error"]
        if errors and not self.quarantine:
            raise InvalidDataError(
                errors,
                f"{len(errors)} problem(s); nothing was imported. Mend the data, or set bad rows "
                "aside with --quarantine:",
            )
        # Rows that never became bars count and are kept like any other bad row. There may be
        # millions of them, so this comes after a refusal without --quarantine.
        rejected = source.rejected_rows()
        if rejected is None:
            self.n_bad += sum(p.severity == "error" for p in source.problems())
        else:
            self._set_aside(rejected)
        if not self._spills:
            raise self._nothing_left()

    def _nothing_left(self) -> DataError:
        errors, name = [p for p in self.problems if p.severity == "error"], self.info.name
        if errors:
            return InvalidDataError(errors, f"{name}: not one row is good; nothing was imported:")
        return DataError(f"{name}: no bars to import. Check the file, the symbols and the dates.")

    def _set_aside(self, rows: pl.DataFrame) -> None:
        if rows.height:
            self.n_bad += rows.height
            self.bad.append(rows)

    def _spill(self, frames: list[pl.DataFrame]) -> None:
        if not frames:
            return
        span, name = _PARTITIONS[self.info.freq]
        whole = pl.concat(frames)
        begin = pl.col("time").dt.truncate(span).alias("_begin")
        parts = whole.with_columns(begin).partition_by("_begin", as_dict=True, include_key=False)
        for (start,), part in parts.items():
            directory = self.staging / "spill" / f"{start:{name}}"
            directory.mkdir(parents=True, exist_ok=True)
            part.write_parquet(directory / f"{self._spills}.parquet", compression="lz4")
        self._spills += 1
        self._stats.append(_first_bars(whole))

    def merge(self) -> tuple[Partition, ...]:
        bars_dir = self.staging / "bars"
        bars_dir.mkdir()
        anchors = _first_bars(pl.concat(self._stats))
        joiner = Joiner.from_overlap(self.info, self.base, self.store, anchors)
        new = {p.name for p in (self.staging / "spill").iterdir()}
        old = {p.key: p for p in self.base.partitions} if self.base else {}
        partitions = []
        for key in sorted(new | set(old)):
            if key not in new and self.base is not None:
                source = self.store.directory(self.base.name) / self.base.version / "bars"
                link_or_copy(source / f"{key}.parquet", bars_dir / f"{key}.parquet")
                partitions.append(old[key])
                continue
            stored = self.store.read_bars(self.base.name, key) if self.base and key in old else None
            frame = self._merge_partition(key, stored, joiner)
            if frame.is_empty():  # copies that differ, all set aside
                continue
            frame.write_parquet(bars_dir / f"{key}.parquet", compression="zstd", statistics=True)
            first, last = frame["time"].min(), frame["time"].max()
            assert isinstance(first, datetime)
            assert isinstance(last, datetime)
            partitions.append(Partition(key, frame.height, first, last, digest_frame(frame)))
            self.filled |= {c for c in OPTIONAL if frame[c].count()}
        if not partitions:
            raise self._nothing_left()
        self.problems.extend(joiner.warnings)
        shutil.rmtree(self.staging / "spill")
        return tuple(partitions)

    def _merge_partition(
        self, key: str, stored: pl.DataFrame | None, joiner: Joiner
    ) -> pl.DataFrame:
        pieces = sorted((self.staging / "spill" / key).iterdir(), key=lambda p: int(p.stem))
        frame = pl.concat([pl.read_parquet(p, glob=False) for p in pieces])
        frame = self._without_duplicates(frame.sort("symbol", "time", maintain_order=True))
        frame = joiner.join(frame)
        if stored is not None:
            fresh = frame.select(STORED_COLUMNS)
            frame = pl.concat([stored.join(fresh, on=["time", "symbol"], how="anti"), fresh])
            frame = frame.sort("symbol", maintain_order=True)
        # Sorted by symbol already: a stable sort by time alone is several times faster.
        return frame.select(STORED_COLUMNS).sort("time", maintain_order=True)

    def _without_duplicates(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Find bars that two pieces both have; of equal copies the first stays, of others none."""
        repeats = pl.all_horizontal(pl.col(c) == pl.col(c).shift(1) for c in ("time", "symbol"))
        if not frame.select(repeats.any()).item():
            return frame
        key = pl.struct("time", "symbol")
        twice = frame.filter(key.is_duplicated())
        problems = []
        for (time, symbol), rows in twice.group_by("time", "symbol", maintain_order=True):
            message = f"{symbol} at {time} is also in {rows['origin'][0]}, row {rows['row'][0]}"
            file, row, remedy = rows["origin"][-1], rows["row"][-1], "Keep one of the two rows"
            problems.append(Problem(file, row, "time, symbol", message, remedy))
        if not self.quarantine:
            raise InvalidDataError(
                problems, f"{len(problems)} duplicate bar(s); nothing was imported:"
            )
        values = [c for c in STORED_COLUMNS if c not in ("time", "symbol")]
        alike = pl.struct(values).n_unique().over("time", "symbol") == 1
        again = key.is_duplicated() & ~(alike & key.is_first_distinct())
        bad = frame.filter(again).rename({"origin": "file"})
        self._set_aside(bad.with_columns(problem=pl.lit("duplicate bar")))
        self.problems.extend(problems)
        return frame.filter(~again)

    def tables(self, source: Source, extras: Extras) -> dict[str, str]:
        """Write the tables next to the bars; returns their digests."""
        facts = extras.instruments if extras.instruments is not None else source.instruments()
        if self.base is not None:  # what an earlier import brought stands in
            known = self.store.symbols(self.base.name).select("symbol", *_FACTS)
            new = _all_facts(facts)
            both = known.join(new, on="symbol", how="full", coalesce=True, suffix="_new")
            facts = both.select("symbol", *(pl.coalesce(f"{c}_new", c).alias(c) for c in _FACTS))
        tables = {"symbols": symbols_table(self.staging / "bars", facts)}
        for name, given, own in (
            ("membership", extras.membership, source.membership),
            ("benchmark", extras.benchmark, source.benchmark),
        ):
            table = given if given is not None else own()
            if table is None and self.base is not None:
                table = self.store.table(self.base.name, name)
            if table is not None:
                tables[name] = table
        if "benchmark" in tables:
            tables["benchmark"] = _sound_benchmark(tables["benchmark"], self.info)
        for name, frame in tables.items():
            frame.write_parquet(self.staging / f"{name}.parquet", compression="zstd")
        return {name: digest_frame(frame) for name, frame in tables.items()}


def _sound_benchmark(benchmark: pl.DataFrame, info: SourceInfo) -> pl.DataFrame:
    """The benchmark, sorted; its levels are judged as closes are."""
    rows = (
        benchmark.select("time", "close").with_row_index("row").with_columns(symbol=pl.lit("index"))
    )
    facts = replace(info, calendar=FROM_DATA, fields=frozenset({"close"}))
    checked = validate(RawFrame(conform(rows), f"{info.name}: benchmark"), facts)
    errors = [p for p in checked.problems if p.severity == "error"]
    if errors:
        raise InvalidDataError(errors, f"{info.name}: {len(errors)} problem(s) in the benchmark")
    return benchmark.sort("time")


def _first_bars(frame: pl.DataFrame) -> pl.DataFrame:
    first = pl.col("time").arg_min()
    return (
        frame.group_by("symbol")
        .agg(pl.col("time", "close", "volume", "factor").get(first))
        .sort("symbol")
    )


_CARRIED = ("time", "close", "factor")
_FACTS: Mapping[str, pl.DataType] = {
    "listed": pl.Date(),
    "delisted": pl.Date(),
    "reason": pl.String(),
    "name": pl.String(),
}


def _all_facts(facts: pl.DataFrame | None) -> pl.DataFrame:
    """Symbol and every fact, null where the source has none."""
    none = pl.DataFrame(schema={"symbol": pl.String(), **_FACTS})
    if facts is None:
        return none
    known = facts.select(c for c in none.columns if c in facts.columns)
    return pl.concat([none, known], how="diagonal_relaxed")


def symbols_table(bars: Path, facts: pl.DataFrame | None) -> pl.DataFrame:
    pieces = [
        pl.read_parquet(path, columns=["time", "symbol", "close"], glob=False)
        .group_by("symbol")
        .agg(
            first=pl.col("time").min(),
            last=pl.col("time").max(),
            bars=pl.len().cast(pl.Int64),
            anchor=pl.col("close").sort_by("time").first(),
        )
        for path in sorted(bars.glob("*.parquet"))
    ]
    table = (
        pl.concat(pieces)
        .sort("first")
        .group_by("symbol")
        .agg(
            pl.col("first").min(),
            pl.col("last").max(),
            pl.col("bars").sum(),
            pl.col("anchor").first(),
        )
        .sort("symbol")
    )
    facts = _all_facts(facts)
    twice = facts.filter(pl.col("symbol").is_duplicated())["symbol"].unique().sort()
    if len(twice):
        raise DataError(
            f"instruments: {', '.join(twice.head(5))} more than once. Keep one row a symbol."
        )
    table = table.join(facts, on="symbol", how="left")
    return table.select("symbol", "first", "last", "bars", "anchor", *_FACTS)


@dataclass
class Joiner:
    """Rescales partitions in time order, carrying each symbol's last state along."""

    scale: pl.DataFrame  # symbol, price, volume, factor: what to multiply a symbol's rows with
    last: pl.DataFrame  # symbol, last_time, last_close, last_factor
    chain: bool  # the factor is to be made from pre_close
    warnings: list[Problem] = field(default_factory=list)  # ex-right steps across a long gap

    @staticmethod
    def from_overlap(
        info: SourceInfo, base: Manifest | None, store: Store, firsts: pl.DataFrame
    ) -> Joiner:
        """From each symbol's first row (`firsts`), and from its overlap with the stored bars."""
        chain = "factor" not in info.fields and "pre_close" in info.fields
        if base is None:
            one = {"price": pl.lit(1.0), "volume": pl.lit(1.0)}
            scale = firsts.select("symbol", **one, factor=1.0 / pl.col("factor"))
            last = firsts.select("symbol", *(pl.col(c).alias(f"last_{c}") for c in _CARRIED))
            return Joiner(scale, last.clear(), chain)
        stored = _stored_at(store, base, firsts)
        both = firsts.join(stored, on="symbol", how="left", suffix="_stored")
        _refuse_apart(both, store.symbols(base.name)["symbol"], base)
        # A vendor that restates history (a split, a dividend) changes units: stay in the old ones.
        price = (pl.col("close_stored") / pl.col("close")).fill_null(1.0)
        restated = (price - 1).abs() > 1e-9
        by_volume = pl.col("volume_stored") / pl.col("volume")
        known = by_volume.is_finite() & (by_volume > 0)
        volume = pl.when(restated & known).then(by_volume).when(restated).then(1 / price)
        scale = both.select(
            "symbol",
            price=price,
            volume=volume.otherwise(1.0),
            factor=pl.col("factor_stored").fill_null(1.0) / pl.col("factor"),
        )
        # The update's first row is the stored one again: no ex-right step leads up to it.
        unknown = {f"last_{c}": pl.lit(None, SCHEMA[c]) for c in ("time", "close")}
        return Joiner(scale, stored.select("symbol", **unknown, last_factor="factor"), chain)

    def join(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Rescale one partition, sorted by symbol and time."""
        frame = frame.join(self.scale, on="symbol", how="left", suffix="_scale").with_columns(
            *[pl.col(c) * pl.col("price") for c in ("open", "high", "low", "close", "pre_close")],
            volume=pl.col("volume") * pl.col("volume_scale"),
            factor=pl.col("factor") * pl.col("factor_scale"),
        )
        frame = frame.join(self.last, on="symbol", how="left")
        if self.chain:
            frame = self._chain_factors(frame)
        frame = frame.with_columns(
            factor=pl.col("factor").forward_fill().over("symbol").fill_null(pl.col("last_factor"))
        ).with_columns(factor=pl.col("factor").fill_null(1.0))
        latest = frame.group_by("symbol").agg(pl.col(c).last().alias(f"last_{c}") for c in _CARRIED)
        self.last = pl.concat([self.last.join(latest, on="symbol", how="anti"), latest])
        return frame

    def _chain_factors(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The factor from reference prices: it grows by close[t−1] / pre_close[t] (A-shares).

        pre_close belongs to the session, so only its first bar can show a step.
        """
        before = pl.col("close").shift(1).over("symbol").fill_null(pl.col("last_close"))
        since = pl.col("time").shift(1).over("symbol").fill_null(pl.col("last_time"))
        new_session = pl.col("time").dt.date() != since.dt.date()
        # Half a cent of rounding is not a corporate action.
        moved = (before - pl.col("pre_close")).abs() >= 0.005
        step = pl.when(new_session & moved).then(before / pl.col("pre_close")).otherwise(1.0)
        frame = frame.with_columns(_step=step.fill_null(1.0), _since=since)
        # Longer than any holiday: the step may have happened inside a hole.
        gap = pl.col("time") - pl.col("_since") > timedelta(days=15)
        columns = ("symbol", "time", "_since", "_step", "origin", "row")
        steps = frame.filter(pl.col("_step") != 1, gap).select(columns)
        for symbol, time, before_gap, size, origin, row in steps.iter_rows():
            message = (
                f"{symbol}: the reference price of {time:%Y-%m-%d} implies a corporate action of "
                f"{size:.4g} since its bar before, of {before_gap:%Y-%m-%d}"
            )
            remedy = "Right after a suspension; after a hole in the file, fill in the missing bars"
            self.warnings.append(Problem(origin, row, "pre_close", message, remedy, "warning"))
        chained = pl.col("_step").cum_prod().over("symbol") * pl.col("last_factor").fill_null(1.0)
        return frame.with_columns(factor=chained).drop("_step", "_since")


def _stored_at(store: Store, base: Manifest, firsts: pl.DataFrame) -> pl.DataFrame:
    """The stored close, volume and factor at the times where an update begins."""
    wanted = firsts.select("symbol", "time")
    columns = ["symbol", "time", "close", "volume", "factor"]
    first = firsts["time"].min()
    assert isinstance(first, datetime)
    bars = [
        store.read_bars(base.name, key, columns=columns).join(wanted, on=["symbol", "time"])
        for key in store.partitions(base.name, first)
    ]
    empty = pl.DataFrame(schema={c: SCHEMA[c] for c in columns})
    return pl.concat([empty, *bars]).drop("time")


def _refuse_other_kind(info: SourceInfo, base: Manifest) -> None:
    for name in ("freq", "calendar", "timezone", "price_basis", "fields"):
        new, old = getattr(info, name), getattr(base.info, name)
        if name == "fields":
            new, old = (sorted(f & {"open", "high", "low", "volume"}) for f in (new, old))
        if new != old:
            raise DataError(
                f"dataset {base.name!r} has {name} {old!r}, the update has {new!r}. "
                "Make them agree, or import it again, without --update."
            )


def _refuse_apart(both: pl.DataFrame, known: pl.Series, base: Manifest) -> None:
    """Refuse an update without a stored bar to join its factors at, or with other raw prices."""
    apart = both.filter(pl.col("close_stored").is_null(), pl.col("symbol").is_in(known.implode()))
    if apart.height:
        names = ", ".join(apart["symbol"].head(5)) + (" …" if apart.height > 5 else "")
        raise DataError(
            f"dataset {base.name!r}: the update of {names} does not begin with a bar that is "
            "stored, so its adjustment cannot be joined. Include the last stored bar of every "
            "symbol, or import it again, without --update."
        )
    changed = both.filter((pl.col("close") / pl.col("close_stored") - 1).abs() > 1e-6)
    if base.info.price_basis == "raw" and changed.height:
        names = ", ".join(changed["symbol"].head(5))
        raise DataError(
            f"dataset {base.name!r}: the source now gives other raw closes than it did for "
            f"{names}. Import it again, without --update."
        )
