"""The seeded market generator behind the `synthetic` source.

Each step has its module: `market` (sessions, hidden regimes, factors, true parameters), `path` (one
symbol's days), `minutes` (the bars in between, and order books) and `index` (the benchmark).

Every draw comes from a stream named after the symbol and the block of days it serves, so a path is
the same in whatever pieces and at whatever frequency it is read, without the days before it.
"""
