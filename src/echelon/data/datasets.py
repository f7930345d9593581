"""From the configuration to a dataset in the store, importing it where it is not there yet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from echelon.config import Config
from echelon.data.bars import SourceInfo
from echelon.data.importing import Extras, ImportReport, import_source
from echelon.data.manifest import Manifest, import_fingerprint
from echelon.data.sources import open_source
from echelon.data.sources._protocol import Source
from echelon.data.sources.files import read_benchmark, read_instruments, read_membership
from echelon.data.store import Store
from echelon.errors import ConfigError
from echelon.files import sha256_file

VENDORS = ("yfinance", "akshare", "tushare")
_NO_INDEX = ("csv", "parquet", "ticks", "sample", "synthetic")


def read_extras(config: Config, info: SourceInfo) -> Extras:
    """Tables the configuration adds to a source's dataset: universe, instruments, benchmark."""
    data = config.data
    extras, files = Extras(), []
    if data.benchmark is not None and data.benchmark_path is None and data.source in _NO_INDEX:
        raise ConfigError(
            f"data.benchmark is {data.benchmark!r}, but data.source {data.source!r} has no index "
            "of its own to offer. Set data.benchmark_path to a file of index bars."
        )
    if data.universe is not None:
        extras = replace(extras, membership=read_membership(data.universe))
        files.append(data.universe)
    if data.instruments is not None:
        extras = replace(extras, instruments=read_instruments(data.instruments))
        files.append(data.instruments)
    if data.benchmark_path is not None:
        benchmark = read_benchmark(
            data.benchmark_path,
            data.benchmark,
            freq=data.freq,
            timezone=data.timezone or info.timezone,
        )
        extras = replace(extras, benchmark=benchmark)
        files.append(data.benchmark_path)
    if not files:
        return extras
    parts = [sha256_file(path) for path in files] + [str(data.benchmark)]
    return replace(extras, fingerprint=hashlib.sha256("".join(parts).encode()).hexdigest())


def dataset_name(config: Config, source: Source, extras: Extras) -> str:
    """The configured name, or one made from the source and what it would deliver."""
    if config.data.dataset is not None:
        return config.data.dataset
    print_ = hashlib.sha256((source.info().fingerprint + extras.fingerprint).encode())
    return f"{config.data.source}-{print_.hexdigest()[:12]}"


def ensure_dataset(
    config: Config,
    *,
    quarantine: bool = False,
    progress: Callable[[int], None] | None = None,
    notice: Callable[[ImportReport], None] | None = None,
) -> Manifest:
    """The manifest of the configured dataset; imports it unless the store has just that already.

    What a vendor delivered before is kept and added to; another data.dataset fetches it anew.
    """
    store = Store(config.data.store)
    if config.data.source == "store":
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
        return stored
    report = import_source(
        source,
        store,
        name,
        quarantine=quarantine,
        update=config.data.source in VENDORS and stored is not None,
        extras=extras,
        progress=progress,
    )
    if notice is not None:
        notice(report)
    return report.manifest


def store_of(config: Config) -> Store:
    """The store the configuration names."""
    return Store(Path(config.data.store))
