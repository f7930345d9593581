"""The seeded market generator behind the `synthetic` source.

From the top down, each step in its own module:

1. `market`: sessions, hidden regimes, the factors they drive, each symbol's true parameters.
2. `path`: `trace` walks one symbol through its days: volatility, returns, suspensions, splits,
   dividends, and from them the raw open and close.
3. `minutes`: bridges of known end points fill a day with minute bars; longer bars are their
   exact aggregate. Five levels of an order book stand around each minute's close.
4. `index`: membership reviews and the capitalisation-weighted benchmark.

Days come first and minutes are filled in between, so any day of any symbol can be had without
the days before it. Every draw comes from a stream named after the symbol and the block of days
it serves, so a path is the same in whatever pieces and at whatever frequency it is read.
"""
