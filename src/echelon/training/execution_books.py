"""Books that execution is learned on: a recording cut into sessions, or the synthetic market's.

Trades are at the best quotes of a snapshot (`BookDays.to_days`); spread and depth of the book join
the public features. A recording of some hours has too few dates for three splits, so its sessions
can be parted by share instead, in order of time.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from echelon.config import Config
from echelon.data.sources import open_source
from echelon.data.sources.synthetic import SyntheticSource
from echelon.errors import ConfigError, DataError
from echelon.execution.book_days import BookDays, read_book, synthetic_book_days
from echelon.execution.book_sessions import cut_sessions
from echelon.execution.days import Days
from echelon.execution.features import Quotes
from echelon.files import sha256_file
from echelon.types import Bools


class Traded(NamedTuple):
    """What orders are worked on.

    quotes: None where the days are bars; content: their hash; timezone: of the exchange
    """

    days: Days
    quotes: Quotes | None
    content: str
    timezone: str = "UTC"


def load_book(config: Config) -> Traded:
    """The book that `execution.book` names, or that of the synthetic source."""
    book, content = _synthetic(config) if config.execution.book is None else _recorded(config)
    return Traded(book.to_days(), book.quotes(), content)


def sessions_by_share(n_sessions: int, shares: tuple[float, float, float]) -> list[Bools]:
    """[D] of train, valid and test: so many of the first sessions, of those after, and the rest."""
    ends = np.round(np.cumsum(shares) * n_sessions).astype(int)
    place = np.searchsorted(ends, np.arange(n_sessions), side="right")
    return [np.asarray(place == k) for k in range(3)]


def _recorded(config: Config) -> tuple[BookDays, str]:
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


def _synthetic(config: Config) -> tuple[BookDays, str]:
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
