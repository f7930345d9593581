"""Encoders: a stretch of market features in, one embedding per bar and asset out.

An encoder sees the market and nothing else, so a bar is encoded once and its embedding serves
every book that visits it. `encoder(x[S, N, F])` gives `z[S-W+1, N, D]`, where `z[k]` depends on
the W rows `x[k : k+W]` only: it is what an agent may know at the close of row `k+W-1`. Encoding a
long stretch equals encoding each window by itself, and assets do not see one another here.

A new encoder is a file here, with a class over `Encoder`, and its line in `config.agents.ENCODERS`.
Two things may be put behind any of them (`JoinedEncoder`): with `model.direct` an MLP on the bar's
own features, added to the embedding of the window; with `pretrain.cross_fit` the head, so that the
embedding is the forecasts themselves (`Scores`), compared across the assets of their bar.

Axes: `G` groups of books (each at its own time offset), `S` rows of a stretch, `W` window,
`N` assets, `F` features, `D` embedding, `H` hidden width, `K` targets.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as fn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.config import Config
from echelon.config.agents import ENCODERS
from echelon.errors import ConfigError

GLU_GAIN = 1.85
"""Keeps the variance through a GLU: 1/√E[σ(b)²] for b ~ N(0, 1). Default weights lose 70 % of the
scale in every layer, and after three of them an embedding is little more than its bias."""

_KERNEL = 3
"""Bars that a convolution of TimeCNN sees."""
_CHUNK_ROWS = 5_120
"""Rows × assets that TimeCNN works on at a time. The tensors of more, 20 MB and up, are given back
to the system when freed, and it costs more to get their pages again than to fill them."""
_HEADS = 4
_CHUNK_TOKENS = 4_096
"""Tokens that the Transformer works on at a time: enough for BLAS, few enough for the cache."""
_KEPT_BYTES = 2 << 30
"""Activations that the Transformer keeps for the backward pass at most; above that each chunk is
computed again, which takes a third more time."""


def init_linear(layer: nn.Linear, gain: float = 1.0) -> nn.Linear:
    """Draw the weights of `layer` from N(0, gain²/fan_in) and set its bias to zero.

    Draws come from torch's global generator, which the caller seeds. Not orthogonal: such a matrix
    passes through LAPACK, whose last bits depend on the number of threads.
    """
    nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.in_features))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class Fold(NamedTuple):
    """Rows of the train window, and an encoder that was fitted without them."""

    rows: range
    encoder: Encoder


class Encoder(nn.Module, ABC):
    """Market features (F) to embeddings (D), one per bar and asset, each of W bars (`window`).

    looks: whether `fit` has something to choose
    folds: who encodes rows of the train window in place of this encoder, which was fitted on them
        (`pretrain.cross_fit`); tables follow them. No part of the state: a bundle needs none
    """

    looks = False

    def __init__(self, config: Config, n_features: int) -> None:
        """Weights come from torch's global generator, which the caller seeds."""
        super().__init__()
        self.folds: tuple[Fold, ...] = ()
        self.n_features = n_features
        self.d_model = config.model.d_model
        self.window = config.window

    def forward(self, x: Tensor) -> Tensor:
        """Encode a stretch, or a batch of stretches.

        x: float32 [S, N, F] or [G, S, N, F], S ≥ W, all finite
        Returns z: [S-W+1, N, D] or [G, S-W+1, N, D]; `z[..., k, :, :]` sees rows k to k+W-1.
        """
        wanted, shape = f"[S, N, {self.n_features}]", f"found {list(x.shape)}"
        fits = x.dim() in (3, 4) and x.shape[-1] == self.n_features
        assert fits, f"expected features {wanted} or [G, S, N, {self.n_features}], {shape}"
        assert x.shape[-3] >= self.window, f"expected S >= {self.window} rows (the window), {shape}"
        assert x.dtype == torch.float32, f"expected float32 features, found {x.dtype}"
        z = self._encode(x)
        assert z.shape == (*x.shape[:-3], x.shape[-3] - self.window + 1, x.shape[-2], self.d_model)
        return z

    def fit(self, x: Tensor) -> None:
        """Look at the train window's features x[S, N, F], where there is something to choose."""

    def for_export(self) -> nn.Module:
        """A module x[B, W, N, F] -> z[B, N, D], one window a row: what an exported graph computes.

        It shares the weights, and neither loops nor branches over what it is given.
        """
        return _WindowEncoder(self)

    def encode_windows(self, x: Tensor) -> Tensor:
        """Embed one window a row, all of them at once: x[B, W, N, F] -> z[B, N, D]."""
        return self._encode(x)[:, 0]

    @abstractmethod
    def _encode(self, x: Tensor) -> Tensor:
        """Do the work of `forward` on checked features."""


class _WindowEncoder(nn.Module):
    """An encoder as a module of windows: see `Encoder.for_export`."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        """x[B, W, N, F] -> z[B, N, D]."""
        return self.encoder.encode_windows(x)


class TimeCNN(Encoder):
    """Convolutions along time with gated units, then pooling over the window.

    Each layer is a valid convolution (no padding, hence no edge that would make a window differ
    from a stretch), a GLU and dropout. Half of the channels are pooled by their mean; the other
    half keep the last position, because a mean alone sees everything half a window late. A
    convolution is a matrix product over neighbouring rows: a quarter faster than `nn.Conv1d`.
    """

    def __init__(self, config: Config, n_features: int) -> None:
        super().__init__(config, n_features)
        n_layers, d_model = config.model.n_layers, self.d_model
        least = n_layers * (_KERNEL - 1) + 1
        if self.window < least:
            raise ConfigError(
                f"window = {self.window} is too short for model.n_layers = {n_layers}: each layer "
                f"of TimeCNN uses up {_KERNEL - 1} bars, so the least window is {least}. "
                f"Raise window or lower model.n_layers"
            )
        self.pooled = self.window - least + 1
        widths = [n_features] + [d_model] * (n_layers - 1)
        self.layers = nn.ModuleList(
            init_linear(nn.Linear(_KERNEL * width, 2 * d_model), GLU_GAIN) for width in widths
        )
        self.dropout = nn.Dropout(config.model.dropout)

    def _encode(self, x: Tensor) -> Tensor:
        *_, rows, n_assets, _ = x.shape
        if rows * n_assets > _CHUNK_ROWS:
            parts = torch.split(x, max(1, _CHUNK_ROWS // rows), dim=-2)
            return torch.cat([self._convolve(part) for part in parts], dim=-2)
        groups = _CHUNK_ROWS // (rows * n_assets)
        if x.dim() == 4 and len(x) > groups:
            return torch.cat([self._convolve(part) for part in torch.split(x, groups)])
        return self._convolve(x)

    def encode_windows(self, x: Tensor) -> Tensor:
        """As of any encoder; a graph has no use for chunks."""
        return self._convolve(x)[:, 0]

    def _convolve(self, x: Tensor) -> Tensor:
        """Embed each window of a few assets or groups: [.., S, N, F] -> [.., S-W+1, N, D]."""
        h = x
        for layer in self.layers:
            rows = h.shape[-3] - _KERNEL + 1
            joined = torch.cat([h.narrow(-3, k, rows) for k in range(_KERNEL)], dim=-1)
            value, gate = layer(joined).chunk(2, dim=-1)
            h = self.dropout(value * torch.sigmoid(gate))
        latest = h.narrow(-3, self.pooled - 1, h.shape[-3] - self.pooled + 1)
        half = self.d_model // 2
        return torch.cat([_sliding_mean(h[..., :half], self.pooled), latest[..., half:]], dim=-1)


def _sliding_mean(h: Tensor, size: int) -> Tensor:
    """Mean of every `size` neighbouring rows: h[.., S, N, D] -> [.., S-size+1, N, D].

    Sums of 1, 2, 4, … rows by doubling, put together by the binary digits of `size`: a third of
    the time of `avg_pool2d`, and unlike a running total it carries no error along the stretch.
    """
    rows = h.shape[-3] - size + 1
    total: Tensor | None = None
    sums, span, start = h, 1, 0
    while True:
        if size & span:
            part = sums.narrow(-3, start, rows)
            total = part if total is None else total + part
            start += span
        if 2 * span > size:
            break
        left = sums.shape[-3] - span
        sums = sums.narrow(-3, 0, left) + sums.narrow(-3, span, left)
        span *= 2
    assert total is not None
    return total / size


class TransformerEncoder(Encoder):
    """A pre-norm Transformer over the window of each asset; the last bar's token is the embedding.

    Rows get their features projected once, then each window is unfolded and its tokens get a
    learned embedding of their place. The last layer works for the last token alone, since nothing
    else is read from it. Much slower than TimeCNN: W tokens per layer and window, not one row.
    """

    def __init__(self, config: Config, n_features: int) -> None:
        super().__init__(config, n_features)
        model, d_model = config.model, self.d_model
        if d_model % _HEADS:
            raise ConfigError(
                f"model.d_model = {d_model} cannot be split over the {_HEADS} heads of the "
                f"Transformer; take a multiple of {_HEADS}, such as "
                f"{_HEADS * math.ceil(d_model / _HEADS)}"
            )
        self.embed = init_linear(nn.Linear(n_features, d_model))
        self.place = nn.Parameter(torch.randn(self.window, d_model) * 0.02)
        self.blocks = nn.ModuleList(_Block(d_model, model.dropout) for _ in range(model.n_layers))
        self.norm = nn.LayerNorm(d_model)

    def _encode(self, x: Tensor) -> Tensor:
        tokens = self.embed(x)
        n_windows = x.shape[-3] - self.window + 1
        per_bar = math.prod(x.shape[:-3]) * x.shape[-2] * self.window
        step = max(1, _CHUNK_TOKENS // per_bar)
        # A layer keeps about 12 vectors per token: norms, queries, keys, values, feed-forward.
        kept = n_windows * per_bar * len(self.blocks) * 12 * self.d_model * x.element_size()
        embed: Callable[..., Tensor] = self._windows
        if torch.is_grad_enabled() and kept > _KEPT_BYTES:
            embed = partial(checkpoint, self._windows, use_reentrant=False)
        parts = []
        for first in range(0, n_windows, step):
            count = min(step, n_windows - first)
            stretch = tokens.narrow(-3, first, count + self.window - 1)
            parts.append(embed(stretch))
        return torch.cat(parts, dim=-3)

    def encode_windows(self, x: Tensor) -> Tensor:
        """As of any encoder; nothing is unfolded."""
        windows = self.embed(x).transpose(1, 2)
        return self._attend(windows).view(*windows.shape[:2], self.d_model)

    def _windows(self, tokens: Tensor) -> Tensor:
        """Embed each window of one chunk: tokens [.., S, N, D] -> [.., S-W+1, N, D]."""
        windows = tokens.unfold(-3, self.window, 1).transpose(-1, -2)
        return self._attend(windows).view(*windows.shape[:-2], self.d_model)

    def _attend(self, windows: Tensor) -> Tensor:
        """Windows [.., W, D] -> [B, 1, D]."""
        h = windows.reshape(-1, self.window, self.d_model) + self.place
        for block in self.blocks[:-1]:
            h = block(h, h)
        h = self.blocks[-1](h[:, -1:], h)
        z: Tensor = self.norm(h)
        return z


class _Block(nn.Module):
    """One pre-norm layer: attention of the queried tokens over all, then a feed-forward net."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(d_model)
        self.query = init_linear(nn.Linear(d_model, d_model))
        self.key_value = init_linear(nn.Linear(d_model, 2 * d_model))
        self.out = init_linear(nn.Linear(d_model, d_model))
        self.norm_feed = nn.LayerNorm(d_model)
        self.expand = init_linear(nn.Linear(d_model, 2 * d_model), math.sqrt(2))
        self.contract = init_linear(nn.Linear(2 * d_model, d_model))
        self.dropout = nn.Dropout(dropout)

    def forward(self, queried: Tensor, tokens: Tensor) -> Tensor:
        """Update `queried` [B, Q, D], which are some of `tokens` [B, W, D]."""
        normed = self.norm_attention(tokens)
        asking = normed if queried is tokens else self.norm_attention(queried)
        key, value = self.key_value(normed).chunk(2, dim=-1)
        seen = fn.scaled_dot_product_attention(
            _split_heads(self.query(asking)), _split_heads(key), _split_heads(value)
        )
        h = queried + self.dropout(self.out(seen.transpose(1, 2).reshape(queried.shape)))
        fed = self.contract(fn.gelu(self.expand(self.norm_feed(h))))
        updated: Tensor = h + self.dropout(fed)
        return updated


def _split_heads(x: Tensor) -> Tensor:
    """[B, W, D] -> [B, heads, W, D/heads]."""
    return x.view(*x.shape[:2], _HEADS, -1).transpose(1, 2)


class JoinedEncoder(Encoder):
    """An encoder of the window, and what is made of its embedding and the bar's own features."""

    def __init__(self, config: Config, inner: Encoder, join: nn.Module, d_model: int) -> None:
        """join: (z[.., N, D], x[.., N, F]) -> [.., N, d_model], bar by bar"""
        super().__init__(config, inner.n_features)
        self.inner, self.join, self.d_model = inner, join, d_model
        self.looks = inner.looks

    def fit(self, x: Tensor) -> None:
        self.inner.fit(x)

    def for_export(self) -> nn.Module:
        """As of any encoder."""
        return _JoinedGraph(self.inner.for_export(), self.join)

    def _encode(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        joined: Tensor = self.join(z, x.narrow(-3, self.window - 1, z.shape[-3]))
        return joined


class _JoinedGraph(nn.Module):
    """A joined encoder as a module of windows: see `Encoder.for_export`."""

    def __init__(self, inner: nn.Module, join: nn.Module) -> None:
        super().__init__()
        self.inner, self.join = inner, join

    def forward(self, x: Tensor) -> Tensor:
        """x[B, W, N, F] -> z[B, N, D]."""
        z: Tensor = self.join(self.inner(x), x[:, -1])
        return z


class DirectFeatures(nn.Module):
    """An MLP on the features of a bar, added to the embedding of its window.

    Features that look back by themselves, such as ranks of factors, say more at the bar than a
    window of them: through convolutions they arrive late, and only in part.
    """

    def __init__(self, n_features: int, hidden: int, d_model: int) -> None:
        super().__init__()
        self.first = init_linear(nn.Linear(n_features, hidden), math.sqrt(2))
        self.second = init_linear(nn.Linear(hidden, hidden), math.sqrt(2))
        self.last = init_linear(nn.Linear(hidden, d_model))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """(z[.., N, D], x[.., N, F]) -> [.., N, D]."""
        h: Tensor = self.last(fn.relu(self.second(fn.relu(self.first(x)))))
        return z + h


class Scores(nn.Module):
    """Forecasts of the targets, brought to mean 0 and deviation 1 across the assets of a bar.

    An absent asset has no features, so all of them are zero, and its scores are zero too.
    """

    def __init__(self, d_model: int, n_targets: int) -> None:
        super().__init__()
        self.ahead = nn.Linear(d_model, n_targets)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """(z[.., N, D], x[.., N, F]) -> [.., N, K]."""
        present = x.ne(0.0).any(-1, keepdim=True)
        count = present.sum(-2, keepdim=True).clamp(min=1)
        said: Tensor = self.ahead(z)
        mean = torch.where(present, said, 0.0).sum(-2, keepdim=True) / count
        centred = torch.where(present, said - mean, 0.0)
        spread = (centred.square().sum(-2, keepdim=True) / count).sqrt()
        return centred / spread.clamp(min=1e-6)


def build_encoder(config: Config, n_features: int) -> Encoder:
    """The encoder that `config.model` asks for; `fit` it before its first use, or load a state."""
    module, _, name = ENCODERS[config.model.encoder].partition(":")
    kind: type[Encoder] = getattr(importlib.import_module(f"echelon.models.{module}"), name)
    encoder, direct = kind(config, n_features), config.model.direct
    if not direct:
        return encoder
    join = DirectFeatures(n_features, direct, encoder.d_model)
    return JoinedEncoder(config, encoder, join, encoder.d_model)


def served_width(config: Config) -> int:
    """D of what agents on a pre-trained encoder see of an asset: scores, or an embedding."""
    pretrain = config.pretrain
    return pretrain.n_targets if pretrain.cross_fit else config.model.d_model


def build_served(config: Config, n_features: int) -> Encoder:
    """What agents stand on that take a pre-trained encoder: with cross-fitting its forecasts."""
    encoder = build_encoder(config, n_features)
    if not config.pretrain.cross_fit:
        return encoder
    width = served_width(config)
    return JoinedEncoder(config, encoder, Scores(encoder.d_model, width), width)
