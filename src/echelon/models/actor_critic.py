"""QTMRL's network (design note 003, section 4), split so that the market is worked on once.

1. An encoder turns a stretch of features into an embedding z per bar and asset.
2. The first layer reads z joined with the book's holding and cash share, p. It is linear, so
   W·[z, p] + b = (W_z·z + b) + W_p·p, and the first part (`encode`) is the same for all books.
   Everything after it (`forward`) is per book.
3. A cross-asset layer lets the assets see one another; absent ones are left out.
4. The actor gives each asset its own three logits (the policy is their product), the critic
   gives the book a value from the mean over its assets.

For a book or two torch takes longer to find the weights of these small layers than to apply them.
So each gives itself as a function with its weights (`as_function`), for a whole rollout.

Weights are drawn from torch's global generator: the caller seeds it, see `init_linear`.

Axes: `G` groups of books, `S` rows of features, `L` bars that can be decided on (S-W+1), `E`
books, `N` assets, `F` features, `P` portfolio inputs, `H` hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as fn
from torch import Tensor, nn

from echelon.config import Config
from echelon.errors import ConfigError
from echelon.models.encoders import build_encoder, init_linear

N_ACTIONS = 3
"""HOLD, BUY and SELL, in this order on the last axis of logits and masks."""
MASKED = -1.0e9
"""Before a softmax or a ReLU this becomes exactly 0, and unlike -inf it never makes a NaN."""

_ATTENTION_HEADS = 4
_RELU_GAIN = math.sqrt(2)


class MarketTensors(NamedTuple):
    """The market before any book, [L, N, H] or [G, L, N, H]; critic None: it shares the encoder."""

    actor: Tensor
    critic: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> MarketTensors:
        """Apply the same indexing or expansion to all that is there."""
        critic = None if self.critic is None else change(self.critic)
        return MarketTensors(change(self.actor), critic)

    def cut(self) -> MarketTensors:
        """Copies without a history that gather gradients: see `backward`."""
        return self.map(lambda tensor: tensor.detach().requires_grad_())

    def backward(self, gathered: MarketTensors) -> None:
        """Send the gradients that `gathered`, a `cut` of this, has gathered into the encoders."""
        ends = [tensor for tensor in self if tensor is not None]
        torch.autograd.backward(ends, [leaf.grad for leaf in gathered if leaf is not None])


class ActorCriticOutput(NamedTuple):
    """What the network says about each book: logits [..., E, N, 3] and value [..., E]."""

    logits: Tensor
    value: Tensor


class Mixed(NamedTuple):
    """The hidden layer after the assets have seen one another: of asset i `asset[i] + common`.

    asset: [..., E, N, H]; common: [..., E, H], or None for zero: a linear layer can read it once
    per book, and the sum is never written out; mean: [..., E, H], over the present assets
    """

    asset: Tensor
    common: Tensor | None
    mean: Tensor


def _affine(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A linear layer as a function, its weights looked up."""
    return partial(fn.linear, weight=layer.weight, bias=layer.bias)


class JoinedLinear(nn.Module):
    """A linear layer over [z, p] in two parts, the first of them shared by all books."""

    def __init__(self, d_model: int, n_portfolio: int, hidden: int) -> None:
        super().__init__()
        self.market = init_linear(nn.Linear(d_model, hidden), _RELU_GAIN)
        # [P, H], not [H, P]: its gradient is then a product that BLAS does three times as fast.
        # Scaled by its own fan-in: two inputs among 130 would hardly be heard at the joint one.
        self.portfolio: nn.Parameter | None = None
        if n_portfolio:
            scale = 1.0 / math.sqrt(n_portfolio)
            self.portfolio = nn.Parameter(torch.randn(n_portfolio, hidden) * scale)


def join(market: Tensor, portfolio: Tensor, weight: Tensor | None) -> Tensor:
    """Market + W_p·p, [..., E, N, H], where market is W_z·z + b."""
    if weight is None:
        return market.expand(*portfolio.shape[:-1], -1)
    return (portfolio @ weight).add_(market)


Cross = Callable[[Tensor, Tensor, Tensor], Mixed]
"""(h, present, share) -> Mixed: h [..., E, N, H] is zero for assets not `present` [..., N], and
share [..., 1] is 1 over their number."""


class CrossAssetMLP(nn.Module):
    """Mean over the present assets, an MLP on it, added to each asset. Cheap: one MLP per book."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = init_linear(nn.Linear(hidden, hidden), _RELU_GAIN)
        self.outer = init_linear(nn.Linear(hidden, hidden))

    def as_function(self) -> Cross:
        inner, outer = _affine(self.inner), _affine(self.outer)

        def mix(h: Tensor, present: Tensor, share: Tensor) -> Mixed:
            mean = h.sum(-2) * share
            common = outer(inner(mean).relu_())
            return Mixed(h, common, mean + common)

        return mix


class CrossAssetAttention(nn.Module):
    """One pre-norm self-attention layer over the assets, with a residual; absent ones unseen."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        if hidden % _ATTENTION_HEADS:
            raise ConfigError(
                f"model.hidden = {hidden} cannot be split over the {_ATTENTION_HEADS} heads of "
                f'model.cross_asset = "attention"; take a multiple of {_ATTENTION_HEADS}'
            )
        self.norm = nn.LayerNorm(hidden)
        self.query_key_value = init_linear(nn.Linear(hidden, 3 * hidden))
        self.out = init_linear(nn.Linear(hidden, hidden))

    def forward(self, h: Tensor, present: Tensor, share: Tensor) -> Mixed:
        *lead, n_assets, hidden = h.shape
        shape = (-1, n_assets, 3, _ATTENTION_HEADS, hidden // _ATTENTION_HEADS)
        qkv = self.query_key_value(self.norm(h)).view(shape)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        # A large negative number, not -inf: a book without a present asset stays finite.
        unseen = torch.zeros(present.shape).masked_fill(~present, MASKED)
        unseen = unseen.expand(*lead, n_assets).reshape(-1, 1, 1, n_assets)
        seen = fn.scaled_dot_product_attention(query, key, value, attn_mask=unseen)
        h = h + self.out(seen.transpose(1, 2).reshape(h.shape))
        return Mixed(h, None, (h * present.unsqueeze(-1)).sum(-2) * share)

    def as_function(self) -> Cross:
        return self


def _no_cross_asset(h: Tensor, _present: Tensor, share: Tensor) -> Mixed:
    """Each asset by itself; only the critic's pooling joins them."""
    return Mixed(h, None, h.sum(-2) * share)


def _share(present: Tensor) -> Tensor:
    """1 over the number of assets `present` [..., N], as [..., 1]; 1 if none is.

    A mean over them is then a plain sum of what is zero for the others, times this: a weighted
    sum costs another pass over the largest tensor of the network, forward and backward.
    """
    return present.sum(-1, keepdim=True).clamp(min=1).to(torch.float32).reciprocal()


class Body(nn.Module):
    """First layer over [z, p], its activation and the cross-asset layer."""

    def __init__(self, d_model: int, n_portfolio: int, hidden: int, cross: str) -> None:
        super().__init__()
        self.join = JoinedLinear(d_model, n_portfolio, hidden)
        self.cross: CrossAssetMLP | CrossAssetAttention | None = None
        if cross == "mlp":
            self.cross = CrossAssetMLP(hidden)
        elif cross == "attention":
            self.cross = CrossAssetAttention(hidden)

    def forward(self, market: Tensor, portfolio: Tensor, present: Tensor) -> Mixed:
        """The part that does. Absent assets have hidden units that are switched off."""
        return self.as_function()(
            switched_off(market, present), portfolio, present, _share(present)
        )

    def as_function(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Mixed]:
        """(switched-off market, portfolio, present, share) -> Mixed, as a function."""
        weight = self.join.portfolio
        cross = _no_cross_asset if self.cross is None else self.cross.as_function()

        def mix(market: Tensor, portfolio: Tensor, present: Tensor, share: Tensor) -> Mixed:
            h = join(market, portfolio, weight)
            # What nothing was added to is a view of the market.
            return cross(fn.relu(h, inplace=weight is not None), present, share)

        return mix


def switched_off(market: Tensor, present: Tensor) -> Tensor:
    """`market` [..., N, H] so that the ReLU after it gives 0 for assets not `present` [..., N]."""
    return torch.where(present.unsqueeze(-1), market, MASKED)


class Actor(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = init_linear(nn.Linear(hidden, hidden), _RELU_GAIN)
        # A small gain: the first policy hardly depends on the state.
        self.outer = init_linear(nn.Linear(hidden, N_ACTIONS), 0.01)
        with torch.no_grad():
            # HOLD's logit, next to 0 for BUY and SELL. Drawn from, a policy of many heads invests
            # its cash soon, however likely HOLD is, so it hardly learns that a book in cash must
            # buy; taking the most probable actions, it would then never trade.
            self.outer.bias[0] = -1.0

    def as_function(self) -> Callable[[Mixed], Tensor]:
        """Mixed -> logits [..., E, N, 3], as a function."""
        inner, outer, weight = _affine(self.inner), _affine(self.outer), self.inner.weight

        def decide(mixed: Mixed) -> Tensor:
            if mixed.common is None:
                h = inner(mixed.asset)
            else:
                h = fn.linear(mixed.asset, weight).add_(inner(mixed.common).unsqueeze(-2))
            return outer(h.relu_())

        return decide


class Critic(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = init_linear(nn.Linear(hidden, hidden), _RELU_GAIN)
        self.outer = init_linear(nn.Linear(hidden, 1))

    def forward(self, mixed: Mixed) -> Tensor:
        """Values [..., E]."""
        value: Tensor = self.outer(fn.relu(self.inner(mixed.mean)))
        return value.squeeze(-1)


class ActorCritic(nn.Module):
    """Encoder, actor with one head per asset, and critic, which may have encoder and body too."""

    trades: Tensor

    def __init__(self, config: Config, n_features: int) -> None:
        """Raises ConfigError if window, widths and layers do not go together."""
        super().__init__()
        model, state = config.model, config.state
        encoder = build_encoder(config, n_features)
        own = None if model.shared_encoder else build_encoder(config, n_features)
        self.n_portfolio = int(state.include_pos) + int(state.include_cash)
        self.hidden = model.hidden
        self.encoder = encoder
        self.body = Body(encoder.d_model, self.n_portfolio, model.hidden, model.cross_asset)
        self.actor = Actor(model.hidden)
        self.critic_encoder = own
        self.critic_body: Body | None = None
        if own is not None:
            self.critic_body = Body(own.d_model, self.n_portfolio, model.hidden, model.cross_asset)
        self.critic = Critic(model.hidden)
        self.register_buffer("trades", torch.tensor((False, True, True)), persistent=False)

    def encode(self, x: Tensor) -> MarketTensors:
        """Work out what no book changes, of float32 features x [S, N, F] or [G, S, N, F], S ≥ W.

        Returns tensors [L, N, H] or [G, L, N, H] with L = S-W+1; bar k sees rows k to k+W-1.
        """
        actor = self.body.join.market(self.encoder(x))
        if self.critic_encoder is None or self.critic_body is None:
            return MarketTensors(actor, None)
        return MarketTensors(actor, self.critic_body.join.market(self.critic_encoder(x)))

    def forward(
        self, market: MarketTensors, portfolio: Tensor, present: Tensor, mask: Tensor | None = None
    ) -> ActorCriticOutput:
        """Decide for each book.

        market: from `encode`, as [..., E or 1, N, H], or [N, H], one bar for all books
        portfolio: float32 [..., E, N, P]; P in the order weight of the holding, cash share
        present: bool [..., E or 1, N], or [N]; an absent asset can only be held
        mask: bool [..., E or 1, N, 3], True where an action is allowed, as holding is; None: all
        Returns logits [..., E, N, 3] in the order HOLD, BUY, SELL, and value [..., E].
        """
        self._check(market, portfolio, present, mask)
        mixed = self.body(market.actor, portfolio, present)
        logits = self.mask_logits(self.actor.as_function()(mixed), present, mask)
        if self.critic_body is not None and market.critic is not None:
            mixed = self.critic_body(market.critic, portfolio, present)
        return ActorCriticOutput(logits, self.critic(mixed))

    def values(self, market: MarketTensors, portfolio: Tensor, present: Tensor) -> Tensor:
        self._check(market, portfolio, present, None)
        if self.critic_body is not None and market.critic is not None:
            mixed = self.critic_body(market.critic, portfolio, present)
        else:
            mixed = self.body(market.actor, portfolio, present)
        values: Tensor = self.critic(mixed)
        return values

    def mask_logits(self, logits: Tensor, present: Tensor, mask: Tensor | None) -> Tensor:
        """Logits of the actor, those of trades that cannot be made switched off."""
        allowed = present.unsqueeze(-1) if mask is None else mask & present.unsqueeze(-1)
        return logits.masked_fill(~allowed & self.trades, MASKED)

    def critic_parameters(self) -> list[nn.Parameter]:
        """What the critic's optimizer moves: its MLP, and its own encoder and body if any."""
        own = (self.critic, self.critic_encoder, self.critic_body)
        return [p for part in own if part is not None for p in part.parameters()]

    def actor_parameters(self) -> list[nn.Parameter]:
        """What the actor's optimizer moves: all the rest, a shared encoder included."""
        return [p for part in (self.encoder, self.body, self.actor) for p in part.parameters()]

    def _check(
        self, market: MarketTensors, portfolio: Tensor, present: Tensor, mask: Tensor | None
    ) -> None:
        """State the shapes; a wrong one would broadcast into a wrong answer without an error."""
        given = list(portfolio.shape)
        fits = len(given) >= 3 and given[-1] == self.n_portfolio
        assert fits, f"expected portfolio [..., E, N, {self.n_portfolio}], found {given}"
        assert portfolio.dtype == torch.float32, (
            f"expected portfolio as float32, found {portfolio.dtype}"
        )
        *lead, n_assets, _ = portfolio.shape
        masks = {"present": (n_assets,), "mask": (n_assets, N_ACTIONS)}
        parts = (market.actor, market.critic, present, mask)
        for name, tensor in zip(("market.actor", "market.critic", *masks), parts, strict=True):
            if tensor is None:
                continue
            tail = masks.get(name, (n_assets, self.hidden))
            shape, full = tuple(tensor.shape), (*lead, *tail)
            fits = len(shape) == len(full) and shape[len(lead) :] == tail
            fits = fits and all(have in (1, want) for have, want in zip(shape, full, strict=True))
            assert fits or shape == tail, (
                f"expected {name} {list(full)}, with 1 for any of {lead}, or {list(tail)}; "
                f"found {list(shape)}"
            )
            assert name not in masks or tensor.dtype == torch.bool, (
                f"expected {name} as bool, found {tensor.dtype}"
            )
        assert (market.critic is None) == (self.critic_body is None), (
            "expected a market encoded by this network; found "
            f"{'no critic part' if market.critic is None else 'a critic part'}"
        )


class Acting:
    """The actor alone at the bars of a stretch, with the weights it has when this is made."""

    def __init__(self, net: ActorCritic, market: MarketTensors, present: Tensor) -> None:
        """market: [L, ..., N, H], bars first; present: bool [L, ..., N]."""
        shape = market.actor.shape
        assert present.shape == shape[:-1], (
            f"expected present {list(shape[:-1])}, found {list(present.shape)}"
        )
        self._net = net
        self._body, self._actor = net.body.as_function(), net.actor.as_function()
        with torch.no_grad():
            self._market = switched_off(market.actor, present)
            self._present, self._share = present, _share(present)

    def logits(self, bars: int | Tensor, portfolio: Tensor, mask: Tensor) -> Tensor:
        """Logits [..., E, N, 3], as of `forward`, of books at the `bars`: one, or [B] of them."""
        assert mask.shape == (*portfolio.shape[:-1], N_ACTIONS), (
            f"expected mask {[*portfolio.shape[:-1], N_ACTIONS]}, found {list(mask.shape)}"
        )
        with torch.no_grad():
            present = self._present[bars]
            mixed = self._body(self._market[bars], portfolio, present, self._share[bars])
            return self._net.mask_logits(self._actor(mixed), present, mask)
