"""From the configuration to a dataset in the store, importing it where it is not there yet."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from echelon.config import Config
from echelon.data.importing import Extras, ImportReport, import_source
from echelon.data.sources import Source, files, open_source
from echelon.data.store import Manifest, Store, import_fingerprint
from echelon.errors import ConfigError, UniverseError, UsageError
from echelon.files import sha256_file
from echelon.sources import IN_STORE, SOURCES, SourceInfo

log = logging.getLogger(__name__)


def read_extras(config: Config, info: SourceInfo) -> Extras:
    """Tables the configuration adds to a source's dataset: universe, instruments, benchmark."""
    data = config.data
    no_index = data.source != IN_STORE and not SOURCES[data.source].follows("benchmark")
    if data.benchmark is not None and data.benchmark_path is None and no_index:
        raise ConfigError(
            f"data.benchmark is {data.benchmark!r}, but data.source {data.source!r} has no index "
            "of its own to offer. Set data.benchmark_path to a file of index bars."
        )
    _refuse_missing_files(config)
    pad = files.pads_symbols(info.calendar)
    paths = [p for p in (data.universe, data.instruments, data.benchmark_path) if p is not None]
    if not paths:
        return Extras()
    membership = instruments = benchmark = None
    if data.universe is not None:
        membership = files.read_membership(data.universe, pad_symbols=pad, own=data.columns)
    if data.instruments is not None:
        instruments = files.read_instruments(data.instruments, pad_symbols=pad, own=data.columns)
    if data.benchmark_path is not None:
        benchmark = files.read_benchmark(
            data.benchmark_path,
            data.benchmark,
            freq=data.freq,
            timezone=data.timezone or info.timezone,
            pad_symbols=pad,
        )
    parts = [sha256_file(path) for path in paths] + [str(data.benchmark)]
    fingerprint = hashlib.sha256("".join(parts).encode()).hexdigest()
    return Extras(membership, instruments, benchmark, fingerprint)


def _refuse_missing_files(config: Config) -> None:
    """Name the option of a file that is not there before anything else takes its time."""
    data = config.data
    named = [(f"data.exogenous.{k}.path", item.path) for k, item in enumerate(data.exogenous)]
    if data.source != IN_STORE:  # where they are tables of the dataset already
        options = ("universe", "instruments", "benchmark_path")
        named += [(f"data.{option}", getattr(data, option)) for option in options]
    for option, path in named:
        if path is not None and not path.is_file():
            what = "is a directory, not a file" if path.is_dir() else "does not exist"
            raise ConfigError(
                f"{option}: {path} {what}. Name an existing file (relative to {Path.cwd()})."
            )


def grows(config: Config) -> bool:
    """Whether the source delivers more every day, so that its dataset is added to."""
    return config.data.source != IN_STORE and SOURCES[config.data.source].kind == "vendor"


def dataset_name(config: Config, source: Source, extras: Extras) -> str:
    """The configured name, or one made from what the source would deliver."""
    data = config.data
    if data.dataset is not None:
        return data.dataset
    delivers = source.info().fingerprint
    if grows(config):  # the question makes the name: tomorrow's import adds to today's dataset
        symbols = data.symbols or config.assets
        days = [day and day.isoformat() for day in (data.start, data.end)]
        query = [data.source, symbols, data.freq, days, data.benchmark, data.membership_index]
        more = sorted(SOURCES[data.source].reads - {"membership_index"})
        query += [str(getattr(data, option)) for option in more]
        delivers = json.dumps(query, ensure_ascii=False)
    print_ = hashlib.sha256((delivers + extras.fingerprint).encode())
    return f"{data.source}-{print_.hexdigest()[:12]}"


def check_universe(store: Store, name: str) -> None:
    """Refuse a membership that shares no symbol with the bars; warn where it shares only some."""
    membership = store.table(name, "membership")
    if membership is not None:
        compare_universe(set(membership["symbol"]), set(store.symbols(name)["symbol"]), name)


def compare_universe(members: Collection[str], known: Collection[str], name: str) -> None:
    """As `check_universe`, for the symbols of a membership and of the bars of dataset `name`."""
    strangers = sorted(set(members) - set(known))
    if strangers and len(strangers) == len(set(members)):
        raise UniverseError(
            f"dataset {name!r}: the membership shares no symbol with the bars. It has "
            f"{_some(strangers)}; the bars have {_some(sorted(known))}. Spell them alike: "
            "correct data.universe (or data.membership_index, or the file of `data universe`)."
        )
    if strangers:
        log.warning(
            "%d of %d member(s) have no bars in %s (%s); results will miss them",
            *(len(strangers), len(set(members)), name, _some(strangers)),
        )


def _some(symbols: Collection[str]) -> str:
    first = list(symbols)[:5]
    return ", ".join(first) + (" …" if len(symbols) > len(first) else "")


def ensure_dataset(
    config: Config,
    *,
    quarantine: bool = False,
    progress: Callable[[int], None] | None = None,
    notice: Callable[[ImportReport], None] | None = None,
) -> Manifest:
    """The manifest of the configured dataset; imports it unless the store has just that already."""
    _refuse_missing_files(config)
    store = Store(config.data.store)
    if config.data.source == IN_STORE:
        if config.data.dataset is None:
            have = ", ".join(store.datasets()) or "none"
            raise ConfigError(
                f"data.source is 'store' but data.dataset is not set. Datasets there: {have}."
            )
        return store.manifest(config.data.dataset)
    source = open_source(config)
    extras = read_extras(config, source.info())
    name = dataset_name(config, source, extras)
    stored = store.find(name)
    wanted = import_fingerprint(source.info().fingerprint, extras.fingerprint)
    if stored is not None and stored.fingerprint == wanted:
        check_universe(store, name)
        return stored
    run_code = config.features.run_code
    # A name that Echelon gave says what the dataset was imported from: to import it again, after an
    # update of Echelon say, replaces nothing by anything else. One that the user gave stays.
    replaceable = stored is None or grows(config) or config.data.dataset is None
    if run_code is not None and not replaceable:
        raise UsageError(
            f"{run_code.run}: was made from another import of dataset {config.data.dataset!r} than "
            f"{store.directory(name)} holds, which stays as it is. Import the data as they were "
            "(`echelon data import`), or name another store (-o data.store=DIR)."
        )
    update = grows(config) and stored is not None
    report = import_source(
        *(source, store, name),
        quarantine=quarantine,
        update=update,
        extras=extras,
        progress=progress,
    )
    if notice is not None:
        notice(report)
    check_universe(store, name)
    return report.manifest
