"""The seeded market generator behind the `synthetic` source.

From the top down, each step in its own module:

1. `clock`: the sessions and the minutes of a session.
2. `factors`: a hidden Markov regime drives the volatility and drift of a market factor and of
   sector factors.
3. `market`: `Market`, the latent state: factors, each symbol's true parameters, its listing.
4. `path`: `trace` walks one symbol through its days: volatility, returns, suspensions, splits,
   dividends, and from them the raw open and close.
5. `minutes`: bridges of known end points fill a day with minute bars; longer bars are their
   exact aggregate.
6. `index`: membership reviews and the capitalisation-weighted benchmark.
7. `book`: five levels of an order book around each minute's close.

Days come first and minutes are filled in between, so any day of any symbol can be had without
the days before it. Every draw comes from a stream named after the symbol and the block of days
it serves, so a path is the same in whatever pieces and at whatever frequency it is read.
"""

from echelon.data.synth.book import LEVELS, OrderBook, order_book
from echelon.data.synth.clock import Clock, make_clock
from echelon.data.synth.factors import REGIMES, Factor
from echelon.data.synth.index import Interval, index_levels, index_membership
from echelon.data.synth.market import GENERATOR_VERSION, Market, build_market
from echelon.data.synth.minutes import BarBlock, MinuteEngine, aggregate, join
from echelon.data.synth.path import CorporateAction, Suspension, SymbolPath, trace

__all__ = [
    "GENERATOR_VERSION",
    "LEVELS",
    "REGIMES",
    "BarBlock",
    "Clock",
    "CorporateAction",
    "Factor",
    "Interval",
    "Market",
    "MinuteEngine",
    "OrderBook",
    "Suspension",
    "SymbolPath",
    "aggregate",
    "build_market",
    "index_levels",
    "index_membership",
    "join",
    "make_clock",
    "order_book",
    "trace",
]
