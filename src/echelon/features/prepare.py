"""`echelon prepare`: configuration → prepared set, from the cache where it is known already.

1. The dataset is in the store, or is imported.
2. The key: data hash, features and their source, splits, scaling, window, and our own code.
3. Unknown key: panel → features → scaler fitted on the train window → files, in a staging
   directory that gets its final name only when it is complete.

Key and panel are made from one version of the dataset, pinned between 1 and 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import polars as pl

import echelon
from echelon.config import Config, FeaturesConfig
from echelon.config.code import describe_file
from echelon.data.build import PanelRequest, build_panel, has_limits
from echelon.data.datasets import ensure_dataset
from echelon.data.importing import ImportReport
from echelon.data.panel import Panel, forward_fill, has_vwap
from echelon.data.store import Manifest, Store, digest_code, digest_of
from echelon.errors import DataError, SourceError, StoreError, UsageError
from echelon.features.cache import Cache, empty_directory, open_caches
from echelon.features.engine import FeaturePlan, GridFile, SymbolProgress, compute, load_exogenous
from echelon.features.prepared import (
    ARRAYS,
    MANIFEST,
    OPTIONAL,
    PREPARED_FORMAT,
    Prepared,
    content_hash,
    facts_hash,
    file_hashes,
)
from echelon.features.registry import LeftOut, Selection, select
from echelon.features.scaler import RunningMoments, Scaler
from echelon.files import (
    exclusive_lock,
    recover_directory,
    sha256_file,
    staging_directory,
    swap_directory,
    write_json,
)
from echelon.sources import SourceInfo
from echelon.types import Bools, Times

log = logging.getLogger(__name__)

_LIBRARIES = ("numpy", "numba", "polars", "exchange_calendars")
"""Those whose arithmetic or tables a prepared set depends on."""


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` made, or took from the cache; left_out: what the source cannot support."""

    prepared: Prepared
    dataset: Manifest
    cached: bool
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class SplitLayout:
    """Which panel rows X covers, from first_row on, and which of X's rows each split covers."""

    first_row: int
    splits: dict[str, range]


def prepare(
    config: Config,
    directory: Path,
    *,
    expected: str | None = None,
    quarantine: bool = False,
    on_rows: Callable[[int], None] | None = None,
    on_import: Callable[[ImportReport], None] | None = None,
    on_symbols: SymbolProgress | None = None,
) -> PrepareReport:
    """Make (or fetch) the prepared set in `directory`/prepared; one at a time in a directory.

    expected: content hash of what agents there were trained on; another set is refused, and what
        is there stays
    Code that a run directory names and the user has not is neither run nor, while the set is there
    and was made with the same files, needed.
    """
    target = directory / "prepared"
    made_with = _sources_without_code(config.features, target)
    dataset = ensure_dataset(config, quarantine=quarantine, progress=on_rows, notice=on_import)
    # The features do not depend on it, but whoever trades them does: refuse before computing them.
    config.market.preset_for(dataset.info.calendar)
    if made_with is not None:
        ready = _standing(target, cache_key(config, dataset, made_with))
        if ready is not None and expected in (None, ready.manifest["content_hash"]):
            missing = ready.manifest["left_out"].items()
            left_out = tuple(LeftOut(name, tuple(fields)) for name, fields in missing)
            return PrepareReport(ready, dataset, True, left_out)
    selection = select(config.features, panel_fields(config, dataset.info))
    key = cache_key(config, dataset, source_ids(selection))
    caches = open_caches(config.data.cache)
    with exclusive_lock(directory / ".prepare.lock", f"the prepared set in {directory}"):
        recover_directory(target)
        ready = _standing(target, key)
        if ready is not None and expected in (None, ready.manifest["content_hash"]):
            return PrepareReport(ready, dataset, True, selection.left_out)
        with staging_directory(directory, ".prepared-") as staging:
            hit = _fetch(caches, key, staging)
            if hit is None:
                _make(config, dataset, selection, key, staging, on_symbols)
            content = Prepared(staging).manifest["content_hash"]
            if expected not in (None, content):
                raise StoreError(
                    f"{directory}: its agents were trained on the prepared set "
                    f"{str(expected)[:12]}, but preparing gives {content[:12]} now: the dataset, a "
                    "factor's file, a library or Echelon itself has changed. What is there was "
                    "left alone. Train in another directory."
                )
            for known in caches[:hit]:
                known.put(key, staging)
            swap_directory(staging, target)
    return PrepareReport(Prepared.open(target), dataset, hit is not None, selection.left_out)


def _sources_without_code(features: FeaturesConfig, target: Path) -> list[str] | None:
    """What the set in `target` was computed by, where that has to do instead of running the code.

    None: the code may run. Raises where it may not, but would have to: the set is not there, or was
    made with other files.
    """
    code, files = features.run_code, [Path(module) for module in features.modules]
    strange = [] if code is None else [file for file in files if not code.trusts(file)]
    if code is None or not strange:
        return None
    if not (target / MANIFEST).is_file():
        code.refuse(strange[0], "features.modules")
    sources = Prepared(target).manifest.get("sources", [])
    recorded = {source.partition(":")[0] for source in sources}
    for file in strange:
        described = describe_file(file)
        if described.removeprefix("sha256 ") not in recorded:
            raise UsageError(
                f"{file} ({described}) is not the file that {target} was computed with: its "
                "manifest records another sha256, or none. Bring the earlier file back; or, to "
                f"compute the features again with this one, read it and add --trust-code {file}"
            )
    return sources


def source_ids(selection: Selection) -> list[str]:
    """What computes each feature: of a user's, the hash of its file."""
    return [getattr(spec, "source_id", "") for spec in selection.specs]


def _standing(target: Path, key: str) -> Prepared | None:
    """The set of `key` that is there already; one that is damaged is made again."""
    if not (target / MANIFEST).is_file():
        return None
    prepared = Prepared(target)
    try:
        if prepared.manifest["key"] != key:
            return None
        prepared.verify()
    except StoreError as error:
        log.warning("%s It is made again now.", error)
        return None
    return prepared


def _fetch(caches: Sequence[Cache], key: str, staging: Path) -> int | None:
    """Number of the first cache that has a good set of `key`, which is in `staging` then."""
    for k, known in enumerate(caches):
        if not known.get(key, staging):
            continue
        try:
            Prepared(staging).verify(key=key)
        except StoreError as error:
            log.warning("cache entry %s is damaged (%s): computing again", key[:12], error)
            empty_directory(staging)
            continue
        return k
    return None


def panel_fields(config: Config, info: SourceInfo) -> frozenset[str]:
    """Fields a panel of such a dataset will have, without building it."""
    fields = set(info.fields) & {"open", "high", "low", "close", "volume"}
    if "amount" in info.fields and has_vwap(fields, info.price_basis):
        fields.add("vwap")
    if has_limits(config.data.limits, info):
        fields.add("limits")
    if info.freq != "1d":
        fields.add("time")
    return frozenset(fields)


def panel_request(config: Config) -> PanelRequest:
    """The part of the dataset a configuration uses: all history up to the last day it needs."""
    end = config.split.test[1]
    if config.data.end is not None:
        end = min(end, config.data.end)
    return PanelRequest(
        symbols=config.assets,
        end=end,
        limits=config.data.limits,
        delist_after=config.data.delist_after,
    )


def split_layout(config: Config, times: Times, span: tuple[datetime, datetime]) -> SplitLayout:
    """Rows of the splits; X begins W − 1 bars before the train window, where there are such."""
    days = times.astype("datetime64[D]")
    spans = {"train": config.split.train, "valid": config.split.valid, "test": config.split.test}
    rows = {}
    for name, (first, last) in spans.items():
        start = int(np.searchsorted(days, np.datetime64(first), side="left"))
        stop = int(np.searchsorted(days, np.datetime64(last), side="right"))
        if config.data.start is not None:
            start = max(start, int(np.searchsorted(days, np.datetime64(config.data.start))))
        if start >= stop:
            begin, end = (t.date() for t in span)
            raise DataError(
                f"split.{name} {first}..{last} is empty: the data run from {begin} to {end}. "
                f"Set dates that fit, for example -o '{_fit(begin, end)}'."
            )
        rows[name] = range(start, stop)
    if len(rows["train"]) < config.window:
        raise DataError(
            f"split.train has {len(rows['train'])} bars, fewer than window={config.window}. "
            "Lengthen the split or shorten the window."
        )
    first_row = max(0, rows["train"].start - (config.window - 1))
    return SplitLayout(
        first_row, {n: range(r.start - first_row, r.stop - first_row) for n, r in rows.items()}
    )


def _fit(first: date, last: date) -> str:
    """Windows that fit the data: 60 % to train, 20 % each to validate and to test."""
    days = (last - first).days
    valid, test = (first + timedelta(days=int(days * share)) for share in (0.6, 0.8))
    day = timedelta(days=1)
    return (
        f"split={{train: [{first}, {valid - day}], valid: [{valid}, {test - day}], "
        f"test: [{test}, {last}]}}"
    )


def _make(
    config: Config,
    dataset: Manifest,
    selection: Selection,
    key: str,
    out: Path,
    on_symbols: SymbolProgress | None,
) -> None:
    store = Store(config.data.store, pin=dataset)
    panel = build_panel(store, dataset.name, panel_request(config))
    where = split_layout(config, panel.times, dataset.span)
    exogenous = load_exogenous(config, panel)
    plan = FeaturePlan.from_specs(selection.specs, exogenous.names if exogenous else ())
    present, moments = compute(
        panel,
        plan,
        out / "X.npy",
        first_row=where.first_row,
        train=where.splits["train"],
        exogenous=exogenous,
        progress=on_symbols,
    )
    train = where.splits["train"]
    refuse_empty_train(present[train.start : train.stop], plan, config)
    scaler = fit_scaler(config, plan, moments, panel, where)
    with GridFile(out / "X.npy", (*present.shape, len(plan.names)), create=False) as grid:
        for part in grid.time_blocks():
            block = scaler.transform(grid.read_rows(part))
            block[~present[part.start : part.stop]] = 0.0
            grid.write_rows(part, block)
    made = {"present": present, "close": forward_fill(panel.close)[where.first_row :]}
    for name in (*ARRAYS, *OPTIONAL):
        array = getattr(panel, name, None)
        if name not in made and array is not None:
            made[name] = array[where.first_row :]
        if name in made:
            np.save(out / f"{name}.npy", made[name], allow_pickle=False)
    days = panel.times[where.first_row :].astype("datetime64[D]")
    splits = {
        name: {
            "rows": [rows.start, rows.stop],
            "first": str(days[rows.start]),
            "last": str(days[rows.stop - 1]),
        }
        for name, rows in where.splits.items()
    }
    write_json(out / "splits.json", splits)
    write_json(out / "scaler.json", scaler.to_dict())
    files = file_hashes(out)
    manifest = {
        "format": PREPARED_FORMAT,
        "key": key,
        "content_hash": content_hash(files),
        "files": files,
        "dataset": {"name": dataset.name, "content_hash": dataset.content_hash},
        "freq": panel.freq,
        "calendar": panel.calendar,
        "timezone": panel.timezone,
        "price_basis": panel.price_basis,
        "T": present.shape[0],
        "N": present.shape[1],
        "F": len(plan.names),
        "W": config.window,
        "features": list(plan.names),
        "sources": source_ids(selection),
        "groups": list(plan.groups),
        "lookbacks": plan.lookbacks,
        "warmup": plan.warmup,
        "symbols": list(panel.symbols),
        "delist_reasons": delist_reasons(panel, store.symbols(dataset.name)),
        "left_out": {item.name: sorted(item.missing) for item in selection.left_out},
        "echelon": echelon.__version__,
    }
    write_json(out / MANIFEST, manifest | {"facts_hash": facts_hash(manifest)})


def delist_reasons(panel: Panel, symbols: pl.DataFrame) -> list[str | None]:
    """Why each symbol [N] was delisted; None: not inside the panel, or it is not known."""
    last = panel.times[-1].astype("datetime64[D]").astype(date)
    past = symbols.filter(pl.col("delisted").is_null() | (pl.col("delisted") <= last))
    known = dict(zip(past["symbol"], past["reason"], strict=True))
    gone = np.asarray(panel.delisted.any(axis=0))
    return [known.get(n) if out else None for n, out in zip(panel.symbols, gone, strict=True)]


def refuse_empty_train(present: Bools, plan: FeaturePlan, config: Config) -> None:
    """There must be something to learn from: `present`[T,N] are the rows of the train window."""
    if not present.any():
        first, last = config.split.train
        raise DataError(
            f"no symbol is warmed up inside split.train: the features need {plan.warmup} bars "
            f"and the window {first}..{last} has {len(present)}. Lengthen the train window or use "
            "features with a shorter lookback."
        )


def fit_scaler(
    config: Config, plan: FeaturePlan, moments: RunningMoments, panel: Panel, where: SplitLayout
) -> Scaler:
    """The scaler of the train window, for the groups the configuration includes."""
    included = set(config.normalization.include) if config.normalization.method == "zscore" else ()
    scaled = np.array([group in included for group in plan.groups], dtype=np.bool_)
    days = panel.times[where.first_row :].astype("datetime64[D]")
    train = where.splits["train"]
    window = (days[train.start].astype(date), days[train.stop - 1].astype(date))
    return Scaler.fit(plan.names, moments, scaled, window)


def cache_key(config: Config, dataset: Manifest, sources: Sequence[str]) -> str:
    """Names everything the prepared set depends on; sources: as `source_ids` has them."""
    data, info = config.data, dataset.info
    return digest_of(
        {
            "format": PREPARED_FORMAT,
            "code": code_hash(),
            "data": dataset.content_hash,
            "kind": [info.freq, info.calendar, info.timezone, info.price_basis],
            "fields": sorted(info.fields),
            "features": config.features.model_dump(mode="json"),
            "sources": list(sources),
            "normalization": config.normalization.model_dump(mode="json"),
            "split": config.split.model_dump(mode="json"),
            "window": config.window,
            "assets": config.assets,
            "span": [data.start, data.end],
            "limits": data.limits,
            "delist_after": data.delist_after,
            "exogenous": [
                [item.model_dump(mode="json"), _series_hash(item.path)] for item in data.exogenous
            ],
        }
    )


def _series_hash(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read ({error.strerror}). Correct data.exogenous.path."
        ) from None


@cache
def code_hash() -> str:
    """Hash of the code a prepared set depends on, ours and others': new never meets old."""
    versions = {name: metadata.version(name) for name in _LIBRARIES}
    series = ("_tables.py", "_columns.py", "_times.py", "names.yaml")  # what reads exogenous series
    ours = digest_code("features/*.py", "data/*.py", *(f"data/sources/{m}" for m in series))
    return digest_of({"ours": ours, "others": versions})
