"""`echelon data`: import, generate, check and look at market data.

Each command imports what it needs itself: together they would keep `echelon --help` waiting.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli import options
from echelon.cli.console import add_row, out, progress_bar, text_table, warn
from echelon.cli.prepare import tell_import
from echelon.errors import DataError, InvalidDataError, LeakageError, StoreError, UsageError
from echelon.files import atomic_file, scratch_directory, sweep
from echelon.sources import IN_STORE, SOURCES, SourceName
from echelon.types import Freq

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.data.sources import Source
    from echelon.data.store import Manifest, Store

app = typer.Typer(help="Import, generate, check and look at market data.", no_args_is_help=True)

StoreDir = Annotated[
    Path | None, typer.Option("--store", help="Directory of the store; default: data.store.")
]


DataPath = Annotated[
    Path | None, typer.Argument(help="File or directory, for csv, parquet, ticks and qlib.")
]
Frequency = Annotated[Freq | None, typer.Option("--freq", help="Length of a bar.")]
_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".txt": "csv", ".tsv": "csv", ".gz": "csv"}


def _tree(
    config: Path | None, override: list[str] | None, level: options.LogLevel, **data: object
) -> Config:
    values = [
        f"data.{key}={json.dumps(str(value) if isinstance(value, Path | date) else value)}"
        for key, value in data.items()
        if value is not None
    ]
    return options.read_config(config, [*(override or []), *values], level)


@app.command("import")
def import_(
    source: Annotated[SourceName, typer.Argument(help="Where bars come from.")],
    path: DataPath = None,
    config: options.ConfigFile = None,
    override: options.Overrides = None,
    dataset: options.DatasetName = None,
    store: StoreDir = None,
    freq: Frequency = None,
    symbols: Annotated[
        str | None, typer.Option("--symbols", help="Comma-separated symbols for a vendor.")
    ] = None,
    start: Annotated[str | None, typer.Option("--start", help="First day, YYYY-MM-DD.")] = None,
    end: Annotated[str | None, typer.Option("--end", help="Last day, YYYY-MM-DD.")] = None,
    benchmark: Annotated[
        str | None, typer.Option("--benchmark", help="Symbol of the benchmark index.")
    ] = None,
    benchmark_path: Annotated[
        Path | None, typer.Option("--benchmark-path", help="File of index bars.")
    ] = None,
    universe: Annotated[
        Path | None, typer.Option("--universe", help="File of membership intervals.")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Add new bars to the dataset instead of replacing it.")
    ] = False,
    quarantine: options.Quarantine = False,
    log_level: options.Level = "INFO",
) -> None:
    """Read a source into the store. All of it arrives, or nothing changes."""
    if path is not None and (source == IN_STORE or SOURCES[source].kind != "files"):
        raise UsageError(f"{path}: the source {source!r} reads no file. Leave the path out.")
    tree = _tree(
        config,
        override,
        log_level,
        source=source,
        path=path,
        dataset=dataset,
        store=store,
        freq=freq,
        symbols=symbols.split(",") if symbols else None,
        start=start,
        end=end,
        benchmark=benchmark,
        benchmark_path=benchmark_path,
        universe=universe,
    )
    _import(tree, update=update, quarantine=quarantine)


def _import(tree: Config, *, update: bool = False, quarantine: bool = False) -> None:
    from echelon.data.datasets import check_universe, dataset_name, grows, read_extras
    from echelon.data.importing import import_source
    from echelon.data.sources import open_source
    from echelon.data.store import Store

    if update and tree.data.dataset is None and not grows(tree):
        raise UsageError(
            "--update needs --dataset: a name made from the file is new whenever the file is. "
            "Add --dataset NAME, the dataset to add to."
        )
    origin = open_source(tree)
    extras = read_extras(tree, origin.info())
    name = dataset_name(tree, origin, extras)
    where = Store(tree.data.store)
    # Explicit --update of a damaged dataset is refused; a vendor is asked for everything again.
    joins = update or (grows(tree) and where.find(name) is not None)
    with progress_bar("reading bars") as bar:
        report = import_source(
            origin,
            where,
            name,
            quarantine=quarantine,
            update=joins,
            extras=extras,
            progress=bar.show,
        )
    tell_import(report)
    check_universe(where, name)
    _print_dataset(where, report.manifest)


@app.command()
def synth(
    config: options.ConfigFile = None,
    override: options.Overrides = None,
    dataset: options.DatasetName = None,
    store: StoreDir = None,
    freq: Frequency = None,
    n_symbols: Annotated[
        int | None, typer.Option("--symbols", min=1, help="How many symbols.")
    ] = None,
    n_days: Annotated[int | None, typer.Option("--days", min=1, help="How many sessions.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the market.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Also write the bars to this Parquet file.")
    ] = None,
    log_level: options.Level = "INFO",
) -> None:
    """Generate a seeded synthetic market into the store."""
    from echelon.data.sources import open_source

    if export is not None and export.suffix != ".parquet":  # before anything is made
        raise UsageError(f"--export {export}: the file is Parquet. Give it the ending .parquet.")
    market = {"n_symbols": n_symbols, "n_days": n_days, "seed": seed}
    values: dict[str, object] = {
        "source": "synthetic",
        "dataset": dataset,
        "store": store,
        "freq": freq,
    }
    values |= {f"synthetic.{key}": value for key, value in market.items()}
    tree = _tree(config, override, log_level, **values)
    _import(tree)
    if export is not None:
        _export(open_source(tree), export)
        typer.echo(f"bars: {export}")


def _export(source: Source, path: Path) -> None:
    """Write a source's bars to one Parquet file, piece by piece; it appears whole or not at all."""
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    with atomic_file(path) as handle, ExitStack() as stack:
        writer = None
        for raw in source.frames():
            piece = raw.frame.drop("row").to_arrow()
            if writer is None:
                writer = stack.enter_context(
                    pq.ParquetWriter(handle, piece.schema, compression="zstd")
                )
            writer.write_table(piece)
        if writer is None:
            raise DataError(f"{path}: the source has no bars, so there is nothing to export.")


@app.command()
def check(
    path: DataPath = None,
    config: options.ConfigFile = None,
    override: options.Overrides = None,
    source: Annotated[
        SourceName | None, typer.Option("--source", help="Default: by the file's ending.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Check a dataset that is in the store.")
    ] = None,
    store: StoreDir = None,
    freq: Frequency = None,
    leakage: Annotated[
        bool, typer.Option("--leakage", help="Check that no feature sees the future.")
    ] = False,
    cuts: Annotated[int, typer.Option("--cuts", min=1, help="Cuts of the leakage check.")] = 3,
    quarantine: options.Quarantine = False,
    log_level: options.Level = "WARNING",
) -> None:
    """List everything wrong with the data at once; with --leakage, test the features too.

    Exit code 4: the data have errors. Exit code 7: something depends on the future.
    """
    from echelon.data.checking import check_source, check_stored
    from echelon.data.datasets import read_extras
    from echelon.data.sources import open_source
    from echelon.data.store import Store

    if path is not None and dataset is not None:
        raise UsageError("give a file or --dataset, not both.")
    if path is not None and source is None:
        source = _source_of(path)
    if dataset is not None:
        source = IN_STORE
    tree = _tree(
        config,
        override,
        log_level,
        source=source,
        path=path,
        dataset=dataset,
        store=store,
        freq=freq,
    )
    if leakage:
        _check_leakage(tree, cuts, quarantine)
        return
    with progress_bar("checking") as bar, scratch_directory("check") as scratch:
        if tree.data.source == IN_STORE:
            problems = check_stored(Store(tree.data.store), str(tree.data.dataset))
        else:
            origin = open_source(tree)
            extras = read_extras(tree, origin.info())
            problems = check_source(origin, extras, scratch, progress=bar.show)
    errors = [p for p in problems if p.severity == "error"]
    for problem in problems:
        if problem.severity == "warning":
            warn(str(problem))
    if errors:
        raise InvalidDataError(errors, f"{len(errors)} problem(s) in the data:")
    typer.echo(f"no errors, {len(problems)} warning(s)")


def _source_of(path: Path) -> SourceName:
    if path.is_dir():
        inside = next((p for p in sorted(path.iterdir()) if p.suffix in _SUFFIXES), None)
        if (path / "calendars").is_dir():
            return "qlib"
        if inside is not None:
            return _source_of(inside)
    source = _SUFFIXES.get(path.suffix)
    if source is None:
        raise UsageError(f"{path}: cannot tell what it is by its ending. Add --source.")
    return "parquet" if source == "parquet" else "csv"


def _check_leakage(tree: Config, cuts: int, quarantine: bool) -> None:
    from echelon.data.datasets import ensure_dataset
    from echelon.data.store import Store
    from echelon.features import check_leakage

    with progress_bar("preparing") as bar:
        manifest = ensure_dataset(tree, quarantine=quarantine, progress=bar.show)
        report = check_leakage(tree, Store(tree.data.store), manifest, n_cuts=cuts, step=bar.label)
    if not report.leaks:
        typer.echo(
            f"no leak: {len(report.features)} features, scaler, membership and masks of "
            f"{report.symbols} symbols are the same without, and with another, future after "
            f"{', '.join(str(c.date()) for c in report.cuts)}, and in other price units"
        )
        return
    columns = ("name", "kind", "test", "cut", "where", "what happens")
    table = text_table("What depends on the future or on price units", *columns)
    for leak in report.leaks:
        cut = str(leak.cut or "")
        add_row(table, leak.name, leak.kind, leak.test, cut, leak.where, leak.detail)
    out.print(table)
    raise LeakageError(
        f"{len(report.names)} leak(s): {', '.join(report.names)}. Mend or leave out what is named."
    )


@app.command()
def show(
    dataset: Annotated[str | None, typer.Argument(help="Name in the store.")] = None,
    config: options.ConfigFile = None,
    override: options.Overrides = None,
    store: StoreDir = None,
    symbols: Annotated[bool, typer.Option("--symbols", help="Also list every symbol.")] = False,
    log_level: options.Level = "WARNING",
) -> None:
    """List the datasets in the store, or show one."""
    from echelon.data.store import Store

    tree = _tree(config, override, log_level, store=store)
    where = Store(tree.data.store)
    if dataset is not None:
        _print_dataset(where, where.manifest(dataset), symbols=symbols)
        return
    names = where.datasets()
    if not names:
        typer.echo(f"{where.root}: no datasets. Import one with `echelon data import`.")
        return
    columns = ("dataset", "bars", "freq", "from", "to", "calendar", "prices")
    table = text_table(f"Datasets in {where.root}", *columns)
    for name in names:
        try:
            manifest = where.manifest(name)
        except StoreError as error:
            warn(str(error))  # one damaged dataset does not hide the others
            continue
        info, span = manifest.info, (str(time.date()) for time in manifest.span)
        rows = f"{manifest.rows:,}"
        add_row(table, name, rows, info.freq, *span, info.calendar, info.price_basis)
    out.print(table)


def _print_dataset(store: Store, manifest: Manifest, *, symbols: bool = False) -> None:
    import polars as pl

    facts = store.symbols(manifest.name)
    info = manifest.info
    first, last = manifest.span
    membership = store.table(manifest.name, "membership")
    benchmark = store.table(manifest.name, "benchmark")
    table = text_table(f"Dataset {manifest.name}", "what", "value")
    add_row(table, "bars", f"{manifest.rows:,} of {info.freq}, {first} to {last}")
    late = facts.filter(pl.col("first") > first).height
    gone = facts.filter(pl.col("delisted").is_not_null()).height
    add_row(table, "symbols", f"{facts.height}, {late} list after the start, {gone} delisted")
    add_row(table, "fields", ", ".join(sorted(info.fields)))
    add_row(table, "prices", f"{info.price_basis}; features use them anchored at the first bar")
    add_row(table, "calendar", f"{info.calendar} ({info.timezone})")
    add_row(table, "benchmark", "none" if benchmark is None else f"{benchmark.height} levels")
    add_row(table, "universe", "all" if membership is None else f"{membership.height} intervals")
    if manifest.quarantined:
        add_row(table, "set aside", f"{manifest.quarantined} bad rows")
    add_row(table, "content hash", manifest.content_hash[:16])
    out.print(table)
    if symbols:
        columns = ("symbol", "first", "last", "bars", "delisted", "reason", "name")
        listing = text_table("", *columns)
        for row in facts.iter_rows(named=True):
            span = (str(row[c].date()) for c in ("first", "last"))
            ending = (str(row[c] or "") for c in ("delisted", "reason", "name"))
            add_row(listing, row["symbol"], *span, f"{row['bars']:,}", *ending)
        out.print(listing)


@app.command()
def universe(
    path: Annotated[Path, typer.Argument(help="CSV or Parquet: symbol, start, end (exclusive).")],
    dataset: Annotated[str, typer.Option("--dataset", help="Dataset to give it to.")],
    config: options.ConfigFile = None,
    override: options.Overrides = None,
    store: StoreDir = None,
    log_level: options.Level = "INFO",
) -> None:
    """Import membership intervals: who was in the universe when, as known then."""
    from echelon.data.datasets import compare_universe
    from echelon.data.sources.files import pads_symbols, read_membership
    from echelon.data.store import Store

    tree = _tree(config, override, log_level, store=store)
    where = Store(tree.data.store)
    pad = pads_symbols(where.manifest(dataset).info.calendar)
    intervals = read_membership(path, pad_symbols=pad, own=tree.data.columns)
    known = set(where.symbols(dataset)["symbol"])
    named = set(intervals["symbol"])
    compare_universe(named, known, dataset)
    where.replace_table(dataset, "membership", intervals)
    typer.echo(
        f"{dataset}: {intervals.height} intervals of {len(named)} symbols; "
        f"{len(known & named)} of the dataset's {len(known)} symbols are members at some time"
    )
