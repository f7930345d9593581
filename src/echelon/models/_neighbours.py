"""Sums over neighbours, of which TimesNet's convolutions are made.

A convolution is a product with each tap of its kernel and a sum over neighbours. The products are
linear layers; the sums are here, each with a backward of its own, because autograd's would fill a
tensor of zeros for every slice. There are two kinds:

- along time, inside each window of a stretch: `sum_in_windows`;
- in pictures, a window folded at a period with cycles as rows and phases as columns: `link` says
  who is whose neighbour there, `collect` and `spread` sum accordingly.

Axes: `B` windows, `S` rows, `A` assets, `W` window, `C` channels.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def sum_in_windows(taps: Tensor, window: int) -> Tensor:
    """What a kernel gives at each place of each window: [S, A, kernel, C] -> [S-W+1, A, W, C].

    At place j of the window that begins at row s it is the sum of taps[s + j + o, :, half + o] over
    the offsets o that stay inside the window. Places with the same offsets, which are all but
    those near the ends, share their sums with other windows.
    """
    summed: Tensor = _SumInWindows.apply(taps, window)  # type: ignore[no-untyped-call]
    return summed


class Run(NamedTuple):
    """`length` cells from `cell` on, each linked by `tap` to its own of the bars from `bar` on."""

    cell: int
    bar: int
    tap: int
    length: int


class Links(NamedTuple):
    """Who is whose neighbour in the pictures of a window.

    Attributes:
        n_taps: taps of the kernel, row by row.
        n_bars: bars that are asked about: the last ones of the window.
        n_cells: cells of all pictures that they look at.
        inner: cells, and the bars they look at.
        outer: cells, and the bars that look at them, counted from the first that is asked about.
        period_of_cell: int64[n_cells], which of the periods a cell belongs to.
    """

    n_taps: int
    n_bars: int
    n_cells: int
    inner: tuple[Run, ...]
    outer: tuple[Run, ...]
    period_of_cell: Tensor


def collect(products: Tensor, links: Links) -> Tensor:
    """Sum, for each cell, what its taps look at: [B, W, taps, C] -> [B, n_cells, C]."""
    cells: Tensor = _Collect.apply(products, links)  # type: ignore[no-untyped-call]
    return cells


def spread(cells: Tensor, links: Links) -> Tensor:
    """Sum, for each bar and tap, the cells it looks at: [B, n_cells, C] -> [B, n_bars, taps, C]."""
    seen: Tensor = _Spread.apply(cells, links)  # type: ignore[no-untyped-call]
    return seen


@cache
def link(periods: tuple[int, ...], window: int, kernel: int, n_bars: int) -> Links:
    """Links between bars and cells, for the last `n_bars` of a window and kernel × kernel taps.

    A picture has the window's last bar in its last corner. Its cells before the window's first bar
    are empty, as is all that lies outside the picture.
    """
    first = window - n_bars
    neighbours = [_neighbours(period, window, kernel) for period in periods]
    looked_at = {(i, s) for i, found in enumerate(neighbours) for t, s, _ in found if t >= first}
    cell = {place: number for number, place in enumerate(sorted(looked_at))}
    inner, outer = [], []
    for i, found in enumerate(neighbours):
        for t, s, tap in found:
            if (i, t) in cell:
                inner.append((cell[i, t], s, tap))
            if t >= first:
                outer.append((cell[i, s], t - first, tap))
    period_of_cell = torch.tensor([i for i, _ in cell])
    return Links(kernel**2, n_bars, len(cell), _runs(inner), _runs(outer), period_of_cell)


def _neighbours(period: int, window: int, kernel: int) -> list[tuple[int, int, int]]:
    """(bar, bar it looks at, tap) for all bars of a window folded at `period`."""
    missing = -window % period
    found = []
    for t in range(window):
        row, column = divmod(t + missing, period)
        for tap in range(kernel**2):
            below, beside = tap // kernel - kernel // 2, tap % kernel - kernel // 2
            s = (row + below) * period + column + beside - missing
            if 0 <= column + beside < period and 0 <= s < window:
                found.append((t, s, tap))
    return found


def _runs(links: list[tuple[int, int, int]]) -> tuple[Run, ...]:
    """(cell, bar, tap), joined where both cells and bars follow one another."""
    runs: list[Run] = []
    # In this order those of one run are neighbours: they differ by the same amount.
    for cell, bar, tap in sorted(links, key=lambda link: (link[2], link[0] - link[1], link[0])):
        if runs:
            *start, length = runs[-1]
            if [cell - length, bar - length, tap] == start:
                runs[-1] = runs[-1]._replace(length=length + 1)
                continue
        runs.append(Run(cell, bar, tap, 1))
    return tuple(runs)


def _sum_to_cells(products: Tensor, runs: tuple[Run, ...], n_cells: int) -> Tensor:
    """[B, bars, taps, C] -> [B, n_cells, C]."""
    cells = products.new_zeros(len(products), n_cells, products.shape[3])
    for cell, bar, tap, length in runs:
        cells.narrow(1, cell, length).add_(products.narrow(1, bar, length)[:, :, tap])
    return cells


def _sum_to_taps(cells: Tensor, runs: tuple[Run, ...], n_bars: int, n_taps: int) -> Tensor:
    """The transpose of `_sum_to_cells`: [B, cells, C] -> [B, n_bars, n_taps, C]."""
    taps = cells.new_zeros(len(cells), n_bars, n_taps, cells.shape[2])
    for cell, bar, tap, length in runs:
        taps.narrow(1, bar, length)[:, :, tap].add_(cells.narrow(1, cell, length))
    return taps


class _Linked(Protocol):
    """What a forward pass leaves to its backward."""

    links: Links
    window: int


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Linked, products: Tensor, links: Links) -> Tensor:
        ctx.links, ctx.window = links, products.shape[1]
        return _sum_to_cells(products, links.inner, links.n_cells)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Linked, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_to_taps(gradient, ctx.links.inner, ctx.window, ctx.links.n_taps), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Linked, cells: Tensor, links: Links) -> Tensor:
        ctx.links = links
        return _sum_to_taps(cells, links.outer, links.n_bars, links.n_taps)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Linked, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum_to_cells(gradient, ctx.links.outer, ctx.links.n_cells), None


class _Edge(NamedTuple):
    """Places of a window, `length` from `first` on, where a kernel sees offsets `low` to `high`."""

    first: int
    length: int
    low: int
    high: int


@cache
def _edges(window: int, kernel: int) -> tuple[_Edge, ...]:
    """All places of a window by what a kernel sees there: one by one near the ends."""
    half = kernel // 2
    seen = [(max(-half, -j), min(half, window - 1 - j)) for j in range(window)]
    return tuple(_Edge(seen.index(ends), seen.count(ends), *ends) for ends in dict.fromkeys(seen))


class _Sized(Protocol):
    """What `sum_in_windows` leaves to its backward."""

    kernel: int


class _SumInWindows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Sized, taps: Tensor, window: int) -> Tensor:
        rows, n_assets, kernel, width = taps.shape
        ctx.kernel, n_windows = kernel, rows - window + 1
        out = taps.new_empty(n_windows, n_assets, window, width)
        for first, length, low, high in _edges(window, kernel):
            total = taps.new_zeros(length + n_windows - 1, n_assets, width)
            for o in range(low, high + 1):
                total += taps.narrow(0, first + o, len(total))[:, :, kernel // 2 + o]
            for j in range(length):
                out[:, :, first + j] = total.narrow(0, j, n_windows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Sized, gradient: Tensor) -> tuple[Tensor, None]:
        n_windows, n_assets, window, width = gradient.shape
        taps = gradient.new_zeros(n_windows + window - 1, n_assets, ctx.kernel, width)
        for first, length, low, high in _edges(window, ctx.kernel):
            total = gradient.new_zeros(length + n_windows - 1, n_assets, width)
            for j in range(length):
                total.narrow(0, j, n_windows).add_(gradient[:, :, first + j])
            for o in range(low, high + 1):
                taps.narrow(0, first + o, len(total))[:, :, ctx.kernel // 2 + o] += total
        return taps, None
