"""Sources of market data. `open_source` makes the one a configuration names.

`echelon.sources` lists them, each with the file here that makes it and what it reads. Each is
imported when it is opened: a vendor's library, or torch-sized dependencies, cost nothing to those
who do not use them. An option that a source cannot follow is refused: bars that silently differ
from what was asked for are worse than none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from echelon.config import Config, DataConfig
from echelon.data.sources._base import Source
from echelon.errors import ConfigError
from echelon.sources import SOURCES

__all__ = ["Source", "open_source"]

_OPTIONS = ("columns", "price_basis", "symbols", "membership_index", "qlib_market")
"""What only some sources read; elsewhere it must not be set."""


def open_source(config: Config) -> Source:
    """Make the source `data.source` names, from the `data` section."""
    data = config.data
    facts = SOURCES.get(data.source)
    if facts is None:
        raise ConfigError(
            f"data.source {data.source!r} cannot be imported from: it names a dataset that "
            "is in the store already."
        )
    _refuse_unread(data)
    module = importlib.import_module(f"{__name__}.{facts.module}")
    from_config: Callable[[Config], Source] = module.from_config
    source = from_config(config)
    if facts.kind != "files":
        _refuse_other_market(data, source)
    return source


def _refuse_unread(data: DataConfig) -> None:
    """Refuse options that are set and that the source does not read."""
    default = DataConfig()
    for option in _OPTIONS:
        value = getattr(data, option)
        if value != getattr(default, option) and not SOURCES[data.source].follows(option):
            readers = ", ".join(name for name, facts in SOURCES.items() if facts.follows(option))
            raise ConfigError(
                f"data.{option} is {value!r}, but data.source {data.source!r} does not read it "
                f"(only {readers} do). Leave data.{option} out."
            )


def _refuse_other_market(data: DataConfig, source: Source) -> None:
    """Refuse a calendar, time zone or length of bars that is not the source's own."""
    info = source.info()
    asked = {
        "freq": (data.freq, info.freq),
        "calendar": (data.calendar, info.calendar),
        "timezone": (data.timezone, info.timezone),
    }
    for option, (wanted, own) in asked.items():
        if wanted not in (None, "auto", own):
            raise ConfigError(
                f"data.{option} is {wanted!r}, but the bars of data.source {data.source!r} have "
                f"{own!r} and no other. Leave data.{option} out."
            )
