"""TimesNet (Wu et al., 2023): a window folded at its periods, and convolved as a picture.

1. The stem: convolutions over 3, 5, 7 and 9 bars, a quarter of the width each, and a learned
   embedding of each place in the window.
2. A block folds the window at every period p into a picture whose rows are cycles and whose
   columns are phases, so that a convolution sees the bars before and the same phase one cycle
   ago. An inception, GELU and another inception; the same ones for all periods.
3. The pictures are unfolded and averaged, weighted by a softmax over the amplitudes that the
   window itself has at these periods; then the residual, and a LayerNorm.
4. The embedding is what the last block says about the window's last bar.

Where this departs from the paper, and why:

- Periods are chosen once, on the train window (`fit`), or given. Chosen again for each batch, a
  live batch of one would be encoded otherwise than the same bar was in training.
- A window is filled up at its front, not at its end: the last bar is then the last corner of
  every picture, with the bars before it on its left and the cycle before it above.
- The last block works for that corner alone, since nothing else is read from it. A mean over
  the window would need all of it, and be late: see TimeCNN.
- Cells that are filled up stay empty in every layer; so does all outside a picture.
- The inception has 1×1 and 3×3 cells. A window of 20 bars folds into 1 to 3 rows, of which 5×5
  cells lie outside for the most part, and they would take twice the time.

A convolution is a product with each tap of its kernel and a sum over neighbours. The products are
linear layers; the sums have a backward of their own, because autograd's would fill a tensor of
zeros for every slice: along time, inside each window, by `_SumInWindows`; in pictures by
`_SumLinked`, where `link` says who is whose neighbour.

Axes: `B` windows (of any asset), `S` rows, `A` assets of any group, `W` window, `F` features,
`D` embedding, `C` channels, `k` periods.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as fn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from echelon.config import Config
from echelon.errors import ConfigError, DataError
from echelon.models.encoders import Encoder, init_linear

STEM_KERNELS = (3, 5, 7, 9)
INCEPTION_KERNELS = (1, 3)
_CHUNK_WINDOWS = 384
"""Windows that are worked on at a time: enough to lose little on small operations, few enough that
their tensors stay below some MB."""
_KEPT_BYTES = 2 << 30
"""Activations that are kept for the backward pass at most, as in the Transformer."""
_FIT_BYTES = 64 << 20
"""Features that are transformed at a time when periods are chosen."""


def choose_periods(x: Tensor, window: int, count: int) -> tuple[int, ...]:
    """The `count` strongest periods of features x[S, N, F], in bars, strongest first.

    Strongest by the mean amplitude over windows of `window` bars (one after another, the last one
    ending with x), assets and features. Periods are W/k, k = 1 … W/2, rounded: 2 to W bars. Where
    fewer than `count` of them are distinct, all of them.
    """
    n_windows = len(x) // window
    if n_windows == 0:
        raise DataError(
            f"periods are looked for in windows of {window} bars, and there are {len(x)} bars to "
            "train on. Lengthen split.train, shorten window or set model.periods"
        )
    rows = x[len(x) - n_windows * window :].reshape(n_windows, window, *x.shape[1:])
    per_window = window * x.shape[1] * x.shape[2] * 8
    total = torch.zeros(window // 2 + 1, dtype=torch.float64)
    for part in torch.split(rows, max(1, _FIT_BYTES // per_window)):
        total += torch.fft.rfft(part.double(), dim=1).abs().mean(dim=(2, 3)).sum(0)
    strongest = torch.argsort(total[1:], descending=True, stable=True) + 1
    return tuple(dict.fromkeys(_period(window, k) for k in strongest.tolist()))[:count]


def _period(window: int, cycles: int) -> int:
    """Bars of a period that a window holds `cycles` times, rounded half up."""
    return (2 * window + cycles) // (2 * cycles)


class TimesNet(Encoder):
    """Periods found on the train window, pictures of them, inception convolutions.

    periods: int64[k], in bars, zeros before `fit` unless `model.periods` has them; part of
    `state_dict`, so a checkpoint carries those its weights were trained with
    """

    looks = True
    periods: Tensor

    def __init__(self, config: Config, n_features: int) -> None:
        """Without `model.periods`: the `n_periods` strongest ones of what `fit` is shown."""
        super().__init__(config, n_features)
        model, window, quarters = config.model, self.window, len(STEM_KERNELS)
        if self.d_model % quarters:
            raise ConfigError(
                f"model.d_model = {self.d_model} cannot be split over the {quarters} kernels of "
                f"TimesNet; take a multiple of {quarters}, such as "
                f"{quarters * math.ceil(self.d_model / quarters)}"
            )
        if window < 2:
            raise ConfigError(f"window = {window} is too short for TimesNet, which needs 2 bars")
        if any(not 2 <= period <= window for period in model.periods):
            raise ConfigError(
                f"model.periods = {list(model.periods)} do not all lie between 2 and window = "
                f"{window}. Name periods that a window can hold, or lengthen window"
            )
        if len(set(model.periods)) < len(model.periods):
            raise ConfigError(
                f"model.periods = {list(model.periods)} names a period twice; name it once"
            )
        self.given = tuple(model.periods)
        count = min(model.n_periods, len({_period(window, k) for k in range(1, window // 2 + 1)}))
        buffer = torch.tensor(self.given) if self.given else torch.zeros(count, dtype=torch.int64)
        self.register_buffer("periods", buffer)
        self.stem = Stem(n_features, self.d_model, window)
        self.blocks = nn.ModuleList(
            TimesBlock(self.d_model, model.dropout) for _ in range(model.n_layers)
        )
        self.dropout = nn.Dropout(model.dropout)

    def fit(self, x: Tensor) -> None:
        """Choose the periods from the train window's features x[S, N, F], unless they are given."""
        if not self.given:
            chosen = choose_periods(x, self.window, len(self.periods))
            self.periods = torch.tensor(chosen, device=self.periods.device)

    def for_export(self) -> nn.Module:
        """As of any encoder, with the periods and all sums over neighbours as constants."""
        return _TimesNetGraph(self, self._known_periods())

    def _known_periods(self) -> tuple[int, ...]:
        periods = tuple(self.periods.tolist())
        if 0 in periods:
            raise ConfigError(
                "TimesNet has no periods yet: it chooses them on the train window, by "
                "`encoder.fit(x)` before its first use. Call that, load a trained checkpoint or "
                "set model.periods"
            )
        return periods

    def _encode(self, x: Tensor) -> Tensor:
        periods = self._known_periods()
        # Groups become assets like others; [S, A, F] is then cut into chunks of a few assets and
        # of enough bars that the stem, which works per row, has little to do twice.
        columns = x.movedim(-3, 0).flatten(1, -2) if x.dim() == 4 else x
        n_bars = len(columns) - self.window + 1
        width = max(1, _CHUNK_WINDOWS // min(n_bars, 2 * self.window))
        bars = max(1, _CHUNK_WINDOWS // width)
        # A block keeps the picture, its middle twice and its result, per period, and the rest.
        per_bar = (2.5 * len(periods) + 4) * self.d_model * 4
        kept = n_bars * columns.shape[1] * self.window * len(self.blocks) * per_bar
        embed: Callable[..., Tensor] = self._windows
        if torch.is_grad_enabled() and kept > _KEPT_BYTES:
            embed = partial(checkpoint, self._windows, use_reentrant=False)
        parts = []
        for some in torch.split(columns, width, dim=1):
            embedded = []
            for first in range(0, n_bars, bars):
                count = min(bars, n_bars - first)
                stretch = some.narrow(0, first, count + self.window - 1)
                embedded.append(embed(stretch, periods))
            parts.append(torch.cat(embedded))
        z = torch.cat(parts, dim=1)
        return z.view(n_bars, -1, x.shape[-2], self.d_model).movedim(0, 1) if x.dim() == 4 else z

    def _windows(self, x: Tensor, periods: tuple[int, ...]) -> Tensor:
        """Embed each window of one chunk: x [S, A, F] -> [S-W+1, A, D]."""
        tokens = self.dropout(self.stem(x))
        basis, kernel = _basis(periods, self.window).to(tokens), INCEPTION_KERNELS[-1]
        h = tokens.flatten(0, 1)
        for block in self.blocks[:-1]:
            h = block(h, link(periods, self.window, kernel, n_bars=self.window), basis)
        z: Tensor = self.blocks[-1](h, link(periods, self.window, kernel, n_bars=1), basis)
        return z.view(*tokens.shape[:2], self.d_model)


class Stem(nn.Module):
    """Convolutions of several widths along time, inside each window.

    Outside a window is nothing, as if filled up with zeros. The products with a kernel's taps are
    the same for all windows that hold a row, so they are made once per row; only the sums near a
    window's ends differ. A kernel is at most as wide as a window has any use for.
    """

    def __init__(self, n_features: int, d_model: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.kernels = tuple(min(kernel, 2 * window - 1) for kernel in STEM_KERNELS)
        width = d_model // len(self.kernels)
        self.scales = nn.ModuleList(
            init_linear(nn.Linear(n_features, kernel * width, bias=False), 1 / math.sqrt(kernel))
            for kernel in self.kernels
        )
        self.place = nn.Parameter(torch.randn(window, d_model) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [S, A, F] to windows [S-W+1, A, W, D]."""
        sums = [
            _SumInWindows.apply(scale(x).unflatten(-1, (kernel, -1)), self.window)  # type: ignore[no-untyped-call]
            for kernel, scale in zip(self.kernels, self.scales, strict=True)
        ]
        return torch.cat(sums, dim=-1) + self.place


class TimesBlock(nn.Module):
    """Two inceptions on the pictures of all periods; their mean, residual and LayerNorm.

    An inception sums convolutions over 1×1, 3×3, … cells; it is held as the one whose kernel is
    their sum. All periods share kernels, and no picture is ever made:

    1. `inner` makes the products of each bar, once for all periods;
    2. they are summed over the neighbours in each picture, and go through GELU: the cells;
    3. cells, times the weight of their period, are gathered by the tap that looks at them, summed
       over the periods, and `outer` makes one product of it all.

    That takes half the time of `nn.Conv2d`.
    """

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        width, n_taps = max(1, d_model // 4), INCEPTION_KERNELS[-1] ** 2
        self.inner = nn.Linear(d_model, n_taps * width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        self.outer = nn.Linear(n_taps * width, d_model)
        nn.init.zeros_(self.outer.bias)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        with torch.no_grad():
            # Kernels are [out, in, taps]; `inner` has its taps with the outputs.
            kernel = _inception(d_model, width, math.sqrt(2))
            self.inner.weight.copy_(kernel.movedim(2, 0).flatten(0, 1))
            self.outer.weight.copy_(_inception(width, d_model, 1.0).movedim(2, 1).flatten(1))

    def forward(self, h: Tensor, links: Links, basis: Tensor) -> Tensor:
        """Update the bars of windows h [B, W, D]: all of them, or the last alone, [B, 1, D]."""
        shares = amplitude_shares(h, basis)[:, links.period_of_cell, None]
        products = self.inner(h).unflatten(-1, (-1, len(self.bias)))
        sums = _SumLinked.apply(products, links.inner, True)  # type: ignore[no-untyped-call]
        cells = fn.gelu(sums + self.bias) * shares
        seen = _SumLinked.apply(cells, links.outer, False)  # type: ignore[no-untyped-call]
        update = self.dropout(self.outer(seen.flatten(2)))
        updated: Tensor = self.norm(h[:, -links.outer.n_bars :] + update)
        return updated


def _inception(n_in: int, n_out: int, gain: float) -> Tensor:
    """Kernels [n_out, n_in, taps]: a sum of smaller and larger ones, each centred.

    Each is drawn with the variance gain²/fan_in, and their sum divided by the root of their
    number, so that the scale of a picture is kept.
    """
    widest = INCEPTION_KERNELS[-1]
    total = torch.zeros(n_out, n_in, widest, widest)
    for size in INCEPTION_KERNELS:
        std = gain / math.sqrt(n_in * size**2 * len(INCEPTION_KERNELS))
        kernel = torch.randn(n_out, n_in, size, size) * std
        total += fn.pad(kernel, ((widest - size) // 2,) * 4)
    return total.flatten(2)


def amplitude_shares(h: Tensor, basis: Tensor) -> Tensor:
    """Softmax[B, k] over the amplitudes of windows h [B, W, D] at the periods, mean of channels."""
    waves = (basis @ h).view(h.shape[0], 2, -1, h.shape[2])
    # A window without any movement has amplitude 0, where the root alone has no slope.
    amplitudes = (waves.square().sum(1) + 1e-12).sqrt().mean(-1)
    return torch.softmax(amplitudes, dim=-1)


def _basis(periods: tuple[int, ...], window: int) -> Tensor:
    """Float64 [2k, W]: cosines, then sines of the periods; white noise has the mean square 1.

    Each has mean 0 over the window, so that a window's level counts for no period, also for those
    that do not divide it.
    """
    angle = torch.arange(window, dtype=torch.float64) / torch.tensor(periods)[:, None]
    angle = 2 * math.pi * angle
    waves = torch.cat([angle.cos(), angle.sin()])
    return (waves - waves.mean(1, keepdim=True)) / math.sqrt(window)


class _Run(NamedTuple):
    """`length` cells from `cell` on, each linked by `tap` to its own of the bars from `bar` on."""

    cell: int
    bar: int
    tap: int
    length: int


class _Sums(NamedTuple):
    """Sums along runs, from the taps of bars to cells, and back: one is the other's transpose."""

    runs: tuple[_Run, ...]
    n_cells: int
    n_bars: int
    n_taps: int

    def __call__(self, values: Tensor, to_cells: bool) -> Tensor:
        """[B, n_bars, n_taps, C] -> [B, n_cells, C], or the other way."""
        shape = (self.n_cells,) if to_cells else (self.n_bars, self.n_taps)
        sums = values.new_zeros(len(values), *shape, values.shape[-1])
        for cell, bar, tap, length in self.runs:
            if to_cells:
                taps = values.narrow(1, bar, length)[:, :, tap]
                sums.narrow(1, cell, length).add_(taps)
            else:
                sums.narrow(1, bar, length)[:, :, tap].add_(values.narrow(1, cell, length))
        return sums

    def matrix(self) -> Tensor:
        """The same as a product: [n_cells, n_bars * n_taps] of zeros and ones."""
        linked = torch.zeros(self.n_cells, self.n_bars, self.n_taps)
        for cell, bar, tap, length in self.runs:
            steps = torch.arange(length)
            linked[cell + steps, bar + steps, tap] += 1.0
        return linked.flatten(1)


class Links(NamedTuple):
    """Who is whose neighbour in the pictures of a window.

    inner: cells of all pictures, and the bars they look at
    outer: cells, and the bars that look at them: those asked about, the last of the window
    period_of_cell: int64[n_cells]
    """

    inner: _Sums
    outer: _Sums
    period_of_cell: Tensor


@cache
def link(periods: tuple[int, ...], window: int, kernel: int, n_bars: int) -> Links:
    """Links between bars and cells, for the last `n_bars` of a window and kernel × kernel taps.

    A picture has the window's last bar in its last corner. Its cells before the window's first bar
    are empty, as is all that lies outside the picture.
    """
    first = window - n_bars
    neighbours = [_neighbours(period, window, kernel) for period in periods]
    looked_at = {(i, s) for i, near in enumerate(neighbours) for t, s, _ in near if t >= first}
    cell = {place: number for number, place in enumerate(sorted(looked_at))}
    inner, outer = [], []
    for i, near in enumerate(neighbours):
        for t, s, tap in near:
            if (i, t) in cell:
                inner.append((cell[i, t], s, tap))
            if t >= first:
                outer.append((cell[i, s], t - first, tap))
    period_of_cell = torch.tensor([i for i, _ in cell])
    looking = _Sums(_runs(inner), len(cell), window, kernel**2)
    return Links(looking, looking._replace(runs=_runs(outer), n_bars=n_bars), period_of_cell)


def _neighbours(period: int, window: int, kernel: int) -> list[tuple[int, int, int]]:
    """(bar, bar it looks at, tap) for all bars of a window folded at `period`."""
    missing = -window % period
    near = []
    for t in range(window):
        row, column = divmod(t + missing, period)
        for tap in range(kernel**2):
            below, across = tap // kernel - kernel // 2, tap % kernel - kernel // 2
            s = (row + below) * period + column + across - missing
            if 0 <= column + across < period and 0 <= s < window:
                near.append((t, s, tap))
    return near


def _runs(links: list[tuple[int, int, int]]) -> tuple[_Run, ...]:
    """(cell, bar, tap), joined where both cells and bars follow one another."""
    runs: list[_Run] = []
    # In this order those of one run are neighbours: they differ by the same amount.
    for cell, bar, tap in sorted(links, key=lambda link: (link[2], link[0] - link[1], link[0])):
        if runs:
            *start, length = runs[-1]
            if [cell - length, bar - length, tap] == start:
                runs[-1] = runs[-1]._replace(length=length + 1)
                continue
        runs.append(_Run(cell, bar, tap, 1))
    return tuple(runs)


class _TimesNetGraph(nn.Module):
    """TimesNet on windows, x[B, W, N, F] -> z[B, N, D], without loops: what is exported.

    The stem is one convolution as wide as its widest; sums over neighbours in the pictures are
    products with matrices of zeros and ones, which a runtime does faster than 1,600 slices.
    """

    taps: Tensor
    place: Tensor
    basis: Tensor

    def __init__(self, net: TimesNet, periods: tuple[int, ...]) -> None:
        super().__init__()
        kernel = INCEPTION_KERNELS[-1]
        self.register_buffer("taps", _stem_taps(net.stem))
        self.register_buffer("place", net.stem.place.detach())
        self.register_buffer("basis", _basis(periods, net.window).float())
        wholes = [net.window] * (len(net.blocks) - 1)
        self.blocks = nn.ModuleList(
            _BlockGraph(block, link(periods, net.window, kernel, n_bars=n_bars))
            for block, n_bars in zip(net.blocks, [*wholes, 1], strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x[B, W, N, F] -> z[B, N, D]."""
        window, n_assets, n_features = x.shape[1:]
        columns = x.permute(0, 2, 3, 1).reshape(-1, n_features, window)
        tokens = fn.conv1d(columns, self.taps, padding=self.taps.shape[2] // 2)
        h = tokens.transpose(1, 2) + self.place
        for block in self.blocks:
            h = block(h, self.basis)
        return h.reshape(-1, n_assets, h.shape[2])


class _BlockGraph(nn.Module):
    """A `TimesBlock` with its links as matrices."""

    gather: Tensor
    scatter: Tensor
    period_of_cell: Tensor

    def __init__(self, block: nn.Module, links: Links) -> None:
        super().__init__()
        assert isinstance(block, TimesBlock)
        self.block: TimesBlock = block
        self.n_bars = links.outer.n_bars
        self.register_buffer("gather", links.inner.matrix())
        self.register_buffer("scatter", links.outer.matrix().T.contiguous())
        self.register_buffer("period_of_cell", links.period_of_cell)

    def forward(self, h: Tensor, basis: Tensor) -> Tensor:
        """As of the block: h [B, W, D] -> [B, n_bars, D]."""
        block, width = self.block, len(self.block.bias)
        shares = amplitude_shares(h, basis).index_select(1, self.period_of_cell).unsqueeze(2)
        products = block.inner(h).reshape(-1, self.gather.shape[1], width)
        cells = fn.gelu(self.gather @ products + block.bias) * shares
        seen = (self.scatter @ cells).reshape(-1, self.n_bars, block.outer.in_features)
        updated: Tensor = block.norm(h[:, -self.n_bars :] + block.outer(seen))
        return updated


def _stem_taps(stem: Stem) -> Tensor:
    """The stem's kernels as one: [D, F, widest], narrower ones filled up with zeros."""
    widest, parts = max(stem.kernels), []
    for kernel, scale in zip(stem.kernels, stem.scales, strict=True):
        weight = scale.get_parameter("weight").detach()
        taps = weight.view(kernel, -1, weight.shape[1]).permute(1, 2, 0)
        parts.append(fn.pad(taps, ((widest - kernel) // 2,) * 2))
    return torch.cat(parts)


class _Context(Protocol):
    """What forward passes leave to their backward."""

    sums: _Sums
    to_cells: bool
    kernel: int


class _SumLinked(torch.autograd.Function):
    """For each cell what its taps look at, or for each bar and tap the cells it looks at."""

    @staticmethod
    def forward(ctx: _Context, values: Tensor, sums: _Sums, to_cells: bool) -> Tensor:
        ctx.sums, ctx.to_cells = sums, to_cells
        return sums(values, to_cells)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.sums(gradient, not ctx.to_cells), None, None


@cache
def _edges(window: int, kernel: int) -> tuple[tuple[int, int, int, int], ...]:
    """(first, length, low, high): places of a window where a kernel sees offsets low to high."""
    half = kernel // 2
    seen = [(max(-half, -j), min(half, window - 1 - j)) for j in range(window)]
    return tuple((seen.index(ends), seen.count(ends), *ends) for ends in dict.fromkeys(seen))


class _SumInWindows(torch.autograd.Function):
    """What a kernel gives at each place of each window: [S, A, kernel, C] -> [S-W+1, A, W, C].

    At place j of the window that begins at row s it is the sum of taps[s + j + o, :, half + o] over
    the offsets o that stay inside the window; but near the ends windows share these sums.
    """

    @staticmethod
    def forward(ctx: _Context, taps: Tensor, window: int) -> Tensor:
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
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        n_windows, n_assets, window, width = gradient.shape
        taps = gradient.new_zeros(n_windows + window - 1, n_assets, ctx.kernel, width)
        for first, length, low, high in _edges(window, ctx.kernel):
            total = gradient.new_zeros(length + n_windows - 1, n_assets, width)
            for j in range(length):
                total.narrow(0, j, n_windows).add_(gradient[:, :, first + j])
            for o in range(low, high + 1):
                taps.narrow(0, first + o, len(total))[:, :, ctx.kernel // 2 + o] += total
        return taps, None
