"""Every source of bars, in one table: a new one is its file in `data/sources` and its line here.

Configuration, command line and data read it; it needs nothing itself, so that the command line
can name the sources at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from echelon.types import Freq, PriceBasis

IN_STORE = "store"
"""The source that reads nothing: the dataset is in the store already."""


class SourceFacts(NamedTuple):
    """What the program must know of a source before it opens it.

    module: its file in data/sources, which has `from_config(config)`
    kind: reads the files at `data.path`; asks a vendor, who delivers more every day, for
        `data.symbols`; or makes its own bars. The last two have a market of their own: its
        calendar and time zone are not for the user to choose.
    reads: options of `data` that this source follows, of those that not all of them do
    """

    module: str
    kind: Literal["files", "vendor", "own"]
    reads: frozenset[str] = frozenset()

    def follows(self, option: str) -> bool:
        """Whether an option that not all sources read has an effect here."""
        return option in self.reads or (self.kind == "vendor" and option in _OF_VENDORS)


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What a source says before a bar is read; the fingerprint changes with what it delivers."""

    name: str
    freq: Freq
    calendar: str  # of exchange_calendars, "24/7", or "data": whatever days occur in the data
    timezone: str
    price_basis: PriceBasis
    fields: frozenset[str]
    fingerprint: str


_OF_VENDORS = frozenset({"symbols", "benchmark"})
_OF_FILES = frozenset({"columns", "price_basis"})

SOURCES: Mapping[str, SourceFacts] = {
    "sample": SourceFacts("sample", "own"),
    "synthetic": SourceFacts("synthetic", "own"),
    "csv": SourceFacts("files", "files", _OF_FILES),
    "parquet": SourceFacts("files", "files", _OF_FILES),
    "ticks": SourceFacts("ticks", "files", frozenset({"columns"})),
    "qlib": SourceFacts("qlib", "files", frozenset({"qlib_market", "benchmark"})),
    "yfinance": SourceFacts("yfinance_", "vendor"),
    "akshare": SourceFacts("akshare_", "vendor"),
    "tushare": SourceFacts("tushare_", "vendor", frozenset({"membership_index"})),
}

if TYPE_CHECKING:
    SourceName: TypeAlias = str
else:
    SourceName = Literal[(*SOURCES, IN_STORE)]
