"""What execution is learned and judged on: days, features, orders, by the configuration.

Days are those of a dataset's bars, or of a book: a recording cut into sessions, or the synthetic
market's. On a book trades are at the best quotes of a snapshot (`BookDays.to_days`), and its spread
and depth join the public features. A recording of some hours has too few dates for three splits, so
its sessions can be parted by share instead, in order of time.

Axes: `D` days.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from echelon.config import Config
from echelon.data.datasets import ensure_dataset
from echelon.data.sources import open_source
from echelon.data.sources._tables import inspect
from echelon.data.sources.synthetic import SyntheticSource
from echelon.data.store import Manifest, Store
from echelon.errors import ConfigError, DataError
from echelon.execution.book_days import BookDays, cut_sessions, read_book, synthetic_book_days
from echelon.execution.days import Days, load_days
from echelon.execution.features import (
    Extensions,
    PublicFeatures,
    Quotes,
    load_extensions,
    public_features,
)
from echelon.execution.orders import ParentOrders, draw_orders, read_orders
from echelon.execution.simulator import ExecutionRules
from echelon.features.prepared import SPLITS
from echelon.files import sha256_file
from echelon.types import Bools


class ExecutionData(NamedTuple):
    """What execution is learned and judged on.

    inside[split][D]: days of the split; orders: by split, of which some may have none
    content: hash of the dataset; asked: orders there were, with those on days of no split
    quotes: of a book; extensions: features of one's own
    """

    days: Days
    public: PublicFeatures
    inside: dict[str, Bools]
    orders: dict[str, ParentOrders]
    rules: ExecutionRules
    content: str
    asked: int
    quotes: Quotes | None = None
    extensions: Extensions = Extensions()


def load_execution_data(
    config: Config, needed: Sequence[str] = ("train", "valid"), orders: Path | None = None
) -> ExecutionData:
    """Days from the store, features scaled on the train days, and orders of all splits.

    needed: splits that must have orders; orders: a file of them, in place of the configuration's
    """
    execution = config.execution
    extensions = load_extensions(execution.extensions, execution.run_code)
    quotes: Quotes | None = None
    if execution.price == "book":
        book, content = (_synthetic_book if execution.book is None else _read_recording)(config)
        days, quotes, timezone = book.to_days(), book.quotes(), "UTC"
    else:
        days, manifest = _load_bars(config)
        content, timezone = manifest.content_hash, manifest.info.timezone
    inside = _split_days(config, days)
    names, own = extensions.split_names(execution.features)
    public = public_features(days, own, train=inside["train"], names=names, quotes=quotes)
    every = _load_orders(config, days, timezone, orders)
    by_split = {name: every.take(np.flatnonzero(mask[every.day])) for name, mask in inside.items()}
    path = orders or execution.orders.path
    for name in needed:
        if not len(by_split[name]):
            first, last = getattr(config.split, name)
            raise DataError(
                f"there are no orders in split.{name} ({first} to {last}). "
                + (f"Add some to {path}." if path else "Lengthen it: sizes need 5 days.")
            )
    return ExecutionData(
        days,
        public,
        inside,
        by_split,
        ExecutionRules.from_config(execution),
        content,
        len(every),
        quotes,
        extensions,
    )


def sessions_by_share(n_sessions: int, shares: tuple[float, float, float]) -> list[Bools]:
    """[D] of train, valid and test: so many of the first sessions, of those after, and the rest."""
    ends = np.round(np.cumsum(shares) * n_sessions).astype(int)
    place = np.searchsorted(ends, np.arange(n_sessions), side="right")
    return [np.asarray(place == k) for k in range(3)]


def _load_bars(config: Config) -> tuple[Days, Manifest]:
    if config.data.freq == "1d":
        raise ConfigError(
            "data.freq = 1d: orders are worked through the bars of a day. Set data.freq to 5min or "
            "1min, with data that has such bars."
        )
    manifest = ensure_dataset(config)
    if config.market.preset != "auto":  # which nothing here needs
        config.market.preset_for(manifest.info.calendar)
    store, first, last = Store(config.data.store), config.split.train[0], config.split.test[1]
    price = config.execution.price
    days = load_days(
        store, manifest.name, config.assets, first, last, price_source=price, outside="drop"
    )
    return days, manifest


def _read_recording(config: Config) -> tuple[BookDays, str]:
    """The book that `execution.book` names, and its hash."""
    path, length = config.execution.book, config.execution.book_session
    assert path is not None, "the caller looked"
    assert length is not None, "the configuration checks that it is there"
    if not path.is_file():
        raise ConfigError(f"execution.book: {path} is no file. Name a file of snapshots.")
    if len(config.assets) > 1:
        raise ConfigError(
            f"assets names {len(config.assets)} symbols, but execution.book is the recording of "
            "one. Name one, or none: then the file's name is the symbol."
        )
    symbol = config.assets[0] if config.assets else path.stem
    book = read_book(path, symbol, timezone=config.data.timezone or "UTC")
    content = hashlib.sha256(f"{sha256_file(path)} {length}".encode()).hexdigest()
    return cut_sessions(book, length), content


def _synthetic_book(config: Config) -> tuple[BookDays, str]:
    if config.data.source != "synthetic":
        raise ConfigError(
            f"execution.price is book, but data.source {config.data.source!r} has no order book. "
            "Set execution.book to a file of snapshots and execution.book_session to the length "
            "of a session."
        )
    source = open_source(config)
    assert isinstance(source, SyntheticSource), "the one maker of this name"
    first, last = config.split.train[0], config.split.test[1]
    every = (day.astype("datetime64[D]").item() for day in source.market.clock.sessions)
    sessions = [day for day in every if first <= day <= last]
    if not sessions:
        raise DataError(
            f"the synthetic market has no session from {first} to {last}. Set split to its days."
        )
    symbols = config.assets or source.market.symbols
    return synthetic_book_days(source, symbols, sessions), source.info().fingerprint


def _split_days(config: Config, days: Days) -> dict[str, Bools]:
    """[D] of each split: by date, or by share of the sessions of a book."""
    shares = config.execution.book_split
    date = days.dates.astype("datetime64[D]")
    if shares is not None:
        inside = dict(zip(SPLITS, sessions_by_share(len(date), shares), strict=True))
        if not all(which.any() for which in inside.values()):
            raise DataError(
                f"execution.book_split {shares} leaves a split of the {len(date)} sessions empty. "
                "Set execution.book_session lower, or the shares otherwise."
            )
        return inside
    inside = {}
    for name in SPLITS:
        first, last = (np.datetime64(bound) for bound in getattr(config.split, name))
        inside[name] = (date >= first) & (date <= last)
        if not inside[name].any():
            raise DataError(
                f"split.{name} ({first} to {last}) has no day of the data, which has {date.min()} "
                f"to {date.max()}. Set split to days that are there"
                + (", or execution.book_split." if config.execution.book else ".")
            )
    return inside


def _load_orders(config: Config, days: Days, timezone: str, file: Path | None) -> ParentOrders:
    rule = config.execution.orders
    if file is not None:
        # The map was written for another file: what fits this one counts.
        have = inspect(file).columns
        own = {theirs: ours for theirs, ours in rule.columns.items() if theirs in have}
        return read_orders(file, days, own=own, timezone=timezone)
    if rule.path is not None:
        return read_orders(rule.path, days, own=rule.columns, timezone=timezone)
    # Draws are named by date, which the sessions of a book share: there by number.
    number = np.arange(len(days.dates)) * np.timedelta64(1, "D")
    apart = replace(days, dates=days.dates[0] + number) if config.execution.book else days
    return draw_orders(apart, rule, config.seed)
