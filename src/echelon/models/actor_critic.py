"""QTMRL's network (seed 003, section 4), split so that the market is worked on once.

1. An encoder turns a stretch of features into an embedding z per bar and asset.
2. The first layer reads z joined with the book's holding and cash share, p. It is linear, so
   W·[z, p] + b = (W_z·z + b) + W_p·p, and the first part (`encode`) is the same for all books.
   Everything after it (`forward`) is per book.
3. A cross-asset layer lets the assets see one another; absent ones are left out.
4. The actor gives each asset its own three logits (the policy is their product), the critic
   gives the book a value from the mean over its assets.

Weights are drawn from torch's global generator: the caller seeds it, see `init_linear`.

Axes: `G` groups of books, `S` rows of features, `L` bars that can be decided on (S-W+1), `E`
books, `N` assets, `F` features, `P` portfolio inputs, `H` hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as fn
from torch import Tensor, nn

from echelon.config import Config
from echelon.errors import ConfigError
from echelon.models.encoders import Encoder, build_encoder, init_linear

N_ACTIONS = 3
"""HOLD, BUY and SELL, in this order on the last axis of logits and masks."""
_IS_TRADE = (False, True, True)

MASKED = -1.0e9
"""Before a softmax or a ReLU this becomes exactly 0, and unlike -inf it never makes a NaN."""

_ATTENTION_HEADS = 4
_RELU_GAIN = math.sqrt(2)
_POLICY_GAIN = 0.01
"""Gain of the actor's last layer: the first policy is close to uniform."""

CrossAsset = Literal["mlp", "attention", "none"]


class Market(NamedTuple):
    """What a network made of the market, before any book: [L, N, H] or [G, L, N, H].

    `critic` is None where actor and critic share their encoder. Index and expand both at once
    with `map`, for example `market.map(lambda m: m[:, t, None])`.
    """

    actor: Tensor
    critic: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> Market:
        """Apply the same indexing or expansion to all that is there."""
        return Market(change(self.actor), None if self.critic is None else change(self.critic))

    def cut(self) -> Market:
        """Copies without a history that gather gradients: see `backward`."""
        return self.map(lambda tensor: tensor.detach().requires_grad_())

    def backward(self, gathered: Market) -> None:
        """Send the gradients that `gathered`, a `cut` of this, has gathered into the encoders.

        Lets a learner take the books in several small batches, each with its own forward and
        backward, and go through the encoder once. The gradients are those of one large batch;
        but its tensors, tens of MB each, cost more to allocate than to fill.
        """
        ends = [tensor for tensor in self if tensor is not None]
        torch.autograd.backward(ends, [leaf.grad for leaf in gathered if leaf is not None])


class Output(NamedTuple):
    """What the network says about each book: logits [..., E, N, 3] and value [..., E]."""

    logits: Tensor
    value: Tensor


class Mixed(NamedTuple):
    """The hidden layer after the assets have seen one another.

    Attributes:
        asset: [..., E, N, H]; the hidden of asset i is `asset[i] + common`.
        common: [..., E, H], or None for zero. Kept apart because it is the same for all assets:
            a linear layer can read it once per book, and the sum is never written out.
        mean: [..., E, H], the mean of the hidden over the present assets.
    """

    asset: Tensor
    common: Tensor | None
    mean: Tensor


class JoinedLinear(nn.Module):
    """A linear layer over [z, p] in two parts, the first of them shared by all books."""

    def __init__(self, d_model: int, n_portfolio: int, hidden: int) -> None:
        super().__init__()
        self.market = init_linear(nn.Linear(d_model, hidden), _RELU_GAIN)
        # [P, H], not [H, P]: its gradient is then a product that BLAS does three times as fast.
        # Scaled by its own fan-in: two inputs beside 128 would hardly be heard at the joint one.
        self.portfolio: nn.Parameter | None = None
        if n_portfolio:
            scale = 1.0 / math.sqrt(n_portfolio)
            self.portfolio = nn.Parameter(torch.randn(n_portfolio, hidden) * scale)

    def project(self, z: Tensor) -> Tensor:
        """Return W_z·z + b: z [..., N, D] -> [..., N, H]."""
        projected: Tensor = self.market(z)
        return projected

    def forward(self, market: Tensor, portfolio: Tensor) -> Tensor:
        """Return market + W_p·p, [..., E, N, H]."""
        if self.portfolio is None:
            return market.expand(*portfolio.shape[:-1], -1)
        return (portfolio @ self.portfolio).add_(market)


class CrossAssetMLP(nn.Module):
    """Mean over the present assets, an MLP on it, added to each asset. Cheap: one MLP per book."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = init_linear(nn.Linear(hidden, hidden), _RELU_GAIN)
        self.outer = init_linear(nn.Linear(hidden, hidden))

    def forward(self, h: Tensor, present: Tensor) -> Mixed:
        """Mix h [..., N, H], zero for absent assets, over those `present` [..., N]."""
        mean = _mean_of_zeroed(h, present)
        common = self.outer(fn.relu(self.inner(mean)))
        return Mixed(h, common, mean + common)


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

    def forward(self, h: Tensor, present: Tensor) -> Mixed:
        """Mix h [..., N, H] over the assets that are `present` [..., N]."""
        *lead, n_assets, hidden = h.shape
        shape = (-1, n_assets, 3, _ATTENTION_HEADS, hidden // _ATTENTION_HEADS)
        qkv = self.query_key_value(self.norm(h)).view(shape)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        # A large negative number, not -inf: a book without a present asset stays finite.
        unseen = torch.zeros(present.shape).masked_fill(~present, MASKED)
        unseen = unseen.expand(*lead, n_assets).reshape(-1, 1, 1, n_assets)
        seen = fn.scaled_dot_product_attention(query, key, value, attn_mask=unseen)
        h = h + self.out(seen.transpose(1, 2).reshape(h.shape))
        return Mixed(h, None, _mean_of_zeroed(h * present.unsqueeze(-1), present))


class NoCrossAsset(nn.Module):
    """Each asset by itself; only the critic's pooling joins them."""

    def forward(self, h: Tensor, present: Tensor) -> Mixed:
        """Leave h [..., N, H], zero for absent assets, as it is."""
        return Mixed(h, None, _mean_of_zeroed(h, present))


def _mean_of_zeroed(h: Tensor, present: Tensor) -> Tensor:
    """Mean over the assets `present` [..., N] of h [..., N, H], which is zero for the others.

    Zero if none is present. A plain sum: a weighted one costs another pass over the largest
    tensor of the network, forward and backward.
    """
    return h.sum(-2) / present.sum(-1, keepdim=True).clamp(min=1)


class Body(nn.Module):
    """First layer over [z, p], its activation and the cross-asset layer."""

    def __init__(self, d_model: int, n_portfolio: int, hidden: int, cross: CrossAsset) -> None:
        super().__init__()
        kinds = {"mlp": CrossAssetMLP, "attention": CrossAssetAttention}
        self.join = JoinedLinear(d_model, n_portfolio, hidden)
        self.cross = kinds[cross](hidden) if cross != "none" else NoCrossAsset()

    def project(self, z: Tensor) -> Tensor:
        """The part that does not depend on the book: z [..., N, D] -> [..., N, H]."""
        return self.join.project(z)

    def forward(self, market: Tensor, portfolio: Tensor, present: Tensor) -> Mixed:
        """The part that does. Absent assets have hidden units that are switched off."""
        # Done before the market is spread over the books, while the tensor is small.
        market = torch.where(present.unsqueeze(-1), market, MASKED)
        mixed: Mixed = self.cross(fn.relu(self.join(market, portfolio)), present)
        return mixed


class Actor(nn.Module):
    """The same MLP for each asset, to three logits."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = init_linear(nn.Linear(hidden, hidden), _RELU_GAIN)
        self.outer = init_linear(nn.Linear(hidden, N_ACTIONS), _POLICY_GAIN)

    def forward(self, mixed: Mixed) -> Tensor:
        """Logits [..., E, N, 3]."""
        if mixed.common is None:
            h = self.inner(mixed.asset)
        else:
            h = fn.linear(mixed.asset, self.inner.weight)
            h = h.add_(self.inner(mixed.common).unsqueeze(-2))
        logits: Tensor = self.outer(fn.relu(h, inplace=True))
        return logits


class Critic(nn.Module):
    """An MLP on the mean over the assets, to one value."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = init_linear(nn.Linear(hidden, hidden), _RELU_GAIN)
        self.outer = init_linear(nn.Linear(hidden, 1))

    def forward(self, mixed: Mixed) -> Tensor:
        """Values [..., E]."""
        value: Tensor = self.outer(fn.relu(self.inner(mixed.mean)))
        return value.squeeze(-1)


class ActorCritic(nn.Module):
    """Encoder, actor with one head per asset, and critic.

    Args:
        encoder: the encoder of the actor, and of the critic too where they share.
        critic_encoder: the critic's own encoder, or None to share encoder and body.
        n_portfolio: portfolio inputs per asset (P): holding's weight, cash share.
        hidden: width of the layers after the encoder (H).
        cross_asset: how assets see one another.
    """

    trades: Tensor

    def __init__(
        self,
        encoder: Encoder,
        critic_encoder: Encoder | None,
        n_portfolio: int,
        hidden: int,
        cross_asset: CrossAsset,
    ) -> None:
        super().__init__()
        self.n_portfolio = n_portfolio
        self.hidden = hidden
        self.encoder = encoder
        self.body = Body(encoder.d_model, n_portfolio, hidden, cross_asset)
        self.actor = Actor(hidden)
        self.critic_encoder = critic_encoder
        self.critic_body: Body | None = None
        if critic_encoder is not None:
            self.critic_body = Body(critic_encoder.d_model, n_portfolio, hidden, cross_asset)
        self.critic = Critic(hidden)
        self.register_buffer("trades", torch.tensor(_IS_TRADE), persistent=False)

    def encode(self, x: Tensor) -> Market:
        """Work out what no book changes.

        Args:
            x: float32 features [S, N, F] or [G, S, N, F], S ≥ W.

        Returns:
            Tensors [L, N, H] or [G, L, N, H] with L = S-W+1; bar k sees rows k to k+W-1.
        """
        actor = self.body.project(self.encoder(x))
        if self.critic_encoder is None or self.critic_body is None:
            return Market(actor, None)
        return Market(actor, self.critic_body.project(self.critic_encoder(x)))

    def forward(
        self, market: Market, portfolio: Tensor, present: Tensor, mask: Tensor | None = None
    ) -> Output:
        """Decide for each book.

        Args:
            market: from `encode`, indexed and expanded to [..., E or 1, N, H], with as many axes
                as `portfolio`; or [N, H], one bar for all books.
            portfolio: float32 [..., E, N, P]; P in the order weight of the holding, cash share.
            present: bool [..., E or 1, N], one axis fewer than `portfolio`, or [N]. An absent
                asset is left out of every mean and attention and can only be held.
            mask: bool [..., E or 1, N, 3], True where an action is allowed, or None: all are.
                Holding is always allowed, whatever the mask says.

        Returns:
            logits [..., E, N, 3] in the order HOLD, BUY, SELL, and value [..., E].
        """
        self._check(market, portfolio, present, mask)
        mixed = self.body(market.actor, portfolio, present)
        logits = self.actor(mixed)
        allowed = present.unsqueeze(-1) if mask is None else mask & present.unsqueeze(-1)
        logits = logits.masked_fill(~allowed & self.trades, MASKED)
        if self.critic_body is not None and market.critic is not None:
            mixed = self.critic_body(market.critic, portfolio, present)
        return Output(logits, self.critic(mixed))

    def critic_parameters(self) -> list[nn.Parameter]:
        """What the critic's optimizer moves: its MLP, and its own encoder and body if any."""
        own = (self.critic, self.critic_encoder, self.critic_body)
        return [p for part in own if part is not None for p in part.parameters()]

    def actor_parameters(self) -> list[nn.Parameter]:
        """What the actor's optimizer moves: all the rest, a shared encoder included."""
        return [p for part in (self.encoder, self.body, self.actor) for p in part.parameters()]

    def _check(
        self, market: Market, portfolio: Tensor, present: Tensor, mask: Tensor | None
    ) -> None:
        """State the shapes; a wrong one would broadcast into a wrong answer without an error."""
        found = list(portfolio.shape)
        wanted = len(found) >= 3 and found[-1] == self.n_portfolio
        assert wanted, f"expected portfolio [..., E, N, {self.n_portfolio}], found {found}"
        *lead, n_assets, _ = portfolio.shape
        for name, tensor in (("actor", market.actor), ("critic", market.critic)):
            if tensor is not None:
                _check_shape(f"market.{name}", tensor, lead, (n_assets, self.hidden))
        _check_shape("present", present, lead, (n_assets,))
        assert present.dtype == torch.bool, f"expected present as bool, found {present.dtype}"
        assert portfolio.dtype == torch.float32, (
            f"expected portfolio as float32, found {portfolio.dtype}"
        )
        assert (market.critic is None) == (self.critic_body is None), (
            "expected a market encoded by this network; found "
            f"{'no critic part' if market.critic is None else 'a critic part'}"
        )
        if mask is not None:
            _check_shape("mask", mask, lead, (n_assets, N_ACTIONS))
            assert mask.dtype == torch.bool, f"expected mask as bool, found {mask.dtype}"


def _check_shape(name: str, tensor: Tensor, lead: list[int], tail: tuple[int, ...]) -> None:
    """Assert that `tensor` is `tail`, or `lead` + `tail` with 1 for any axis of `lead`."""
    found = tuple(tensor.shape)
    full = (*lead, *tail)
    fits = len(found) == len(full) and found[len(lead) :] == tail
    fits = fits and all(have in (1, want) for have, want in zip(found, full, strict=True))
    assert fits or found == tail, (
        f"expected {name} {list(full)}, with 1 for any of {lead}, or {list(tail)}; "
        f"found {list(found)}"
    )


def build_actor_critic(config: Config, n_features: int) -> ActorCritic:
    """The network that `config.model`, `config.state` and `config.window` describe.

    Weights come from torch's global generator; seed it first.

    Raises:
        ConfigError: if window, widths and layers do not go together.
    """
    model = config.model
    return ActorCritic(
        encoder=build_encoder(config, n_features),
        critic_encoder=None if model.shared_encoder else build_encoder(config, n_features),
        n_portfolio=int(config.state.include_pos) + int(config.state.include_cash),
        hidden=model.hidden,
        cross_asset=model.cross_asset,
    )
