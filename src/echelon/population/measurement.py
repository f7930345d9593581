"""What the coordinator measures of the experts: returns, fitness, whose bar is whose, diversity.

- `parts_of` shares the train window out. The router is to judge experts as they will be out of
  sample, so it learns on a window that no expert's gradient has seen: the last part of the train
  window, or the last of its stretches where it has several. Both parts are the same world with
  other spans; nothing is copied.
- `row_weights` and `routed_weights` say how much every bar is whose. Experts trained on every bar
  alike end up alike; so an expert whose own book has done better than the others' of late answers
  for more of the next bar's loss (a mixture of experts with `responsibilities`; Jacobs et al.,
  1991). They are causal, made of outcomes before the bar, as the router itself must choose: those
  made of the bar's own outcome would teach each expert its lucky bars.
- `measure_diversity` compares portfolios where all experts are asked the same thing: at rows of the
  train window, with books that are typical of no expert (`probe_states`, `probe_books`). Under the
  threshold the worst expert restarts with a skill that none of the others has (`fresh_skill`).

Axes: `K` experts, `S` probe states, `N` assets, `Z` of a skill, `T` rows, `P` pieces of a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.policy import Policy
from echelon.backtest.run import run_values
from echelon.config import Config
from echelon.config.hierarchy import ExpertsConfig
from echelon.envs.act import ActionRule, Holdings, cap_weights, holdings
from echelon.envs.world import World
from echelon.errors import ConfigError, DataError, TrainingError
from echelon.market import Book, Rows
from echelon.ops.diversity import mapd, population_volume
from echelon.ops.measures import sharpe_annual
from echelon.rng import stream
from echelon.types import Bools, Floats, Floats32

_PIECE = 500  # most bars that an own book trades at a time: pieces go side by side, hence quickly
_SIDE_BY_SIDE = 64  # pieces that a short window is cut into: together they cost little more
_NOBODY = 1e-6  # where the router gives all experts together less than this, the row is everybody's
_LEAST_STRETCHES = 4  # stretches from which on whole ones are kept for the router
_LEAST_SPREAD = 1e-6  # added to a standard deviation: experts closer than this are equals
_CANDIDATES = 512  # directions drawn for a skill that finds no right angle to the others
_FLAT = 1e-12  # returns that vary less than this do not vary


class Parts(NamedTuple):
    """The train window, shared out."""

    experts: World
    router: World


def parts_of(world: World, share: float) -> Parts:
    """The experts' and the router's part of `split.train`; share: the router's."""
    spans = world.spans("train")
    if len(spans) >= _LEAST_STRETCHES:
        kept = min(max(1, round(share * len(spans))), len(spans) - 1)
        return Parts(_with(world, spans[:-kept]), _with(world, spans[-kept:]))
    first, last = [], []
    for span in spans:
        cut = span.stop - int(share * len(span))
        if cut - span.start < 2 or span.stop - cut < 2:
            raise DataError(
                f"split.train has {len(span)} bars to decide on; shared out between experts and "
                f"router (meta_router.window_share = {share:g}) one of them has fewer than 2. "
                "Lengthen the split."
            )
        # The experts' last reward is paid at the row before the router's first.
        first.append(range(span.start, cut))
        last.append(range(cut, span.stop))
    return Parts(_with(world, first), _with(world, last))


def _with(world: World, spans: Sequence[range]) -> World:
    """The same world, whose train window is these spans."""
    whole = range(spans[0].start, spans[-1].stop)
    others = {name: pieces for name, pieces in world.stretches.items() if name != "train"}
    pieces = {"train": tuple(spans)} if len(spans) > 1 else {}
    return replace(world, splits={**world.splits, "train": whole}, stretches=others | pieces)


def own_returns(policy: Policy, world: World, config: Config) -> Floats:
    """[T] return that the policy's own book earned by its decision at each row of the train window.

    NaN elsewhere. Traded in pieces side by side, each with cash at first and
    `experts.responsibility_bars` before those that count: a book's beginning does not matter.
    """
    earned = np.full(len(world.times), np.nan)
    spans, warm = world.spans("train"), config.experts.responsibility_bars
    counted = min(_PIECE, max(warm, sum(len(span) for span in spans) // _SIDE_BY_SIDE))
    steps = min(counted + warm, min(len(span) for span in spans) - 1)
    stride = max(1, steps - warm)
    starts = [
        min(first, span.stop - 1 - steps)
        for span in spans
        for first in range(span.start, span.stop - 1 - min(warm, steps - 1), stride)
    ]
    begins = np.array(sorted(set(starts)), dtype=np.int64)
    values = run_values(policy, world, begins, steps, config)
    returns = values[1:] / values[:-1] - 1.0
    firsts = {span.start for span in spans}
    for e, start in enumerate(begins.tolist()):
        skip = 0 if start in firsts else min(warm, steps - 1)
        earned[start + skip : start + steps] = returns[skip:, e]
    return earned


def responsibilities(
    returns: Floats, window: int = 40, temperature: float = 0.5, floor: float = 0.05
) -> Floats:
    """Share[K,T,...] of each bar that each expert answers for; sums to 1 over K.

        (1 − floor) · softmax_k(standardised Σ_{u=t−window}^{t−1} returns_u / temperature) + floor/K

    returns[K,T,...]: of each expert's own book, [:,t] what the decision at bar t earned, known at
    t+1 and hence of no part in the share at t; trailing axes (paths, markets) do not mix.
    Standardised over the experts, by the sample standard deviation: what counts is the order of
    experts at one time, not how wild the market is. Even shares until `window` bars are known.
    As a weight of the loss multiply by K, so that the weights have a mean of 1.
    """
    r = np.asarray(returns, dtype=np.float64)
    assert r.ndim >= 2, f"returns should be [K,T,...], are {r.shape}"
    if not np.isfinite(r).all():
        raise TrainingError(
            "expected finite returns of the experts' own books, found NaN or infinity in those of "
            f"expert {int(np.argwhere(~np.isfinite(r))[0, 0])}: put it in quarantine and re-seed it"
        )
    trailing = np.zeros_like(r)
    n_bars = r.shape[1]
    if n_bars > window:
        known = np.concatenate([np.zeros_like(r[:, :1]), np.cumsum(r, axis=1)], axis=1)
        trailing[:, window:] = known[:, window:n_bars] - known[:, : n_bars - window]
    spread = trailing.std(axis=0, ddof=1) + _LEAST_SPREAD
    scores = (trailing - trailing.mean(axis=0)) / (spread * temperature)
    odds = np.exp(scores - scores.max(axis=0))
    return np.asarray((1.0 - floor) * (odds / odds.sum(axis=0)) + floor / len(r))


def row_weights(returns: Floats, world: World, experts: ExpertsConfig) -> Floats32:
    """[K,T] weight of each row in each expert's loss, K · responsibility, stretch by stretch."""
    weights = np.ones(returns.shape, dtype=np.float32)
    for span in world.spans("train"):
        rows = slice(span.start, span.stop - 1)
        weights[:, rows] = len(returns) * responsibilities(
            returns[:, rows],
            experts.responsibility_bars,
            experts.responsibility_temperature,
            experts.responsibility_floor,
        )
    return weights


def routed_weights(probabilities: Floats, floor: float) -> Floats32:
    """[K,T] weight of each row in each expert's loss, by the router's probabilities[T,K] of them.

    Without cash and rules, from which nobody learns; NaN: a row of nobody's; floor: shared by all
    """
    experts = np.nan_to_num(probabilities)
    total = experts.sum(axis=1, keepdims=True)
    n_experts = experts.shape[1]
    shares = np.full_like(experts, 1.0 / n_experts)
    np.divide(experts, total, out=shares, where=total > _NOBODY)
    weights = (1.0 - floor) * n_experts * shares + floor
    return np.ascontiguousarray(weights.T, dtype=np.float32)


def window_sharpes(policy: Policy, world: World, config: Config) -> Floats:
    """[P] annual Sharpe ratios on equal pieces of the validation window, each from cash on.

    Of a window that has stretches, each is cut into as many; all pieces are traded side by side.
    """
    spans, pieces = world.spans("valid"), config.trainer.evolution.windows
    steps = min(len(span) - 1 for span in spans) // pieces
    if steps < 2:
        raise DataError(
            f"split.valid is too short for trainer.evolution.windows = {pieces}: a piece would "
            f"have {steps} bars, and a Sharpe ratio needs 2. Lengthen the split or take fewer."
        )
    starts = np.array([span.start + k * steps for span in spans for k in range(pieces)])
    values = run_values(policy, world, starts, steps, config)
    returns = values[1:] / values[:-1] - 1.0
    return np.array([sharpe_annual(r, world.periods_per_year) for r in returns.T])


class Diversity(NamedTuple):
    """How different K ≥ 2 experts are: MAPD in [0, 1], population volume in (0, 1]; else NaN."""

    mapd: float
    volume: float


def probe_states(spans: Sequence[range], n: int, rng: np.random.Generator) -> Rows:
    """Rows[S] of the spans, rising, each once; fewer than n where the spans hold no more."""
    rows = np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in spans])
    return np.sort(rng.choice(rows, size=min(n, len(rows)), replace=False))


def probe_books(world: World, rows: Rows, rng: np.random.Generator) -> Holdings:
    """A book for each of rows[S], in turn: all cash, equal weights, weights by lot (cash too).

    Of assets that can be held at the row; by lot: from a Dirichlet distribution with parameters 1.
    """
    close = world.rows.close[rows]
    able: Bools = world.present[rows] & world.member[rows] & (close > 0.0)
    able &= ~world.rows.gone[rows]
    equal = able / np.maximum(able.sum(axis=1, keepdims=True), 1)
    draws = rng.exponential(size=(len(rows), world.n_assets + 1))
    draws[:, :-1] *= able
    by_lot = draws[:, :-1] / draws.sum(axis=1, keepdims=True)
    kind = (np.arange(len(rows)) % 3)[:, None]
    weights: Floats = np.select([kind == 1, kind == 2], [equal, by_lot], 0.0)
    value = np.full(len(rows), world.initial_cash)
    shares = weights * value[:, None] / np.where(able, close, 1.0)
    book = Book(value * (1.0 - weights.sum(axis=1)), shares, np.zeros_like(shares))
    return holdings(world, book, value, rows, ActionRule("weights"))


def fill_targets(weights: NDArray[np.floating[Any]], held: Holdings) -> Floats:
    """Target weights[S,N] with the present ones in place of NaN, at most 1 together."""
    filled = np.where(np.isnan(weights), held.weights, np.asarray(weights, dtype=np.float64))
    return cap_weights(filled)


def measure_diversity(weights: NDArray[np.floating[Any]]) -> Diversity:
    """Of target weights[K,S,N]; an expert whose are not finite (in quarantine) is left out."""
    assert weights.ndim == 3, f"weights should be [K,S,N], are {weights.shape}"
    known = weights[np.isfinite(weights).all(axis=(1, 2))]
    if len(known) < 2:
        return Diversity(math.nan, math.nan)
    return Diversity(mapd(known), population_volume(known))


def draw_skills(n: int, dim: int, seed: int) -> Floats:
    """Skills[K,Z] of n experts: unit vectors, at right angles where there is room for that."""
    if dim < 1 or (dim == 1 and n > 2):
        raise ConfigError(
            f"expected a skill for each of {n} experts, found room for {2 * dim} in "
            f"experts.skill_dim = {dim}: take 2 or more"
        )
    drawn = np.zeros((0, dim))
    for k in range(n):
        drawn = np.concatenate([drawn, fresh_skill(drawn, k, seed)[None]])
    return drawn


def fresh_skill(existing: Floats, number: int, seed: int) -> Floats:
    """Skill[Z] of this number: at right angles to existing[K,Z], or the farthest of many by lot."""
    rng, dim = stream(seed, "skill", number), existing.shape[1]
    if len(existing) < dim:
        inside = np.linalg.qr(existing.T)[0]  # [Z,K]: axes of the space they span
        draw = rng.standard_normal((dim,))
        for _ in range(2):  # the second time removes what rounding left
            draw -= inside @ (inside.T @ draw)
        return np.asarray(draw / np.linalg.norm(draw))
    draws = rng.standard_normal((_CANDIDATES, dim))
    draws /= np.linalg.norm(draws, axis=1, keepdims=True)
    nearest = (draws @ existing.T).max(axis=1)
    return np.asarray(draws[nearest.argmin()])


def return_correlations(returns: NDArray[np.floating[Any]]) -> Floats:
    """Correlation[K,K] of returns[K,T], where all are finite; NaN where they do not vary."""
    r = np.asarray(returns, dtype=np.float64)
    r = r[:, np.isfinite(r).all(axis=0)]
    if r.shape[1] < 2:
        return np.full((len(r), len(r)), np.nan)
    centred = r - r.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(centred, axis=1)
    varies = norm > _FLAT * math.sqrt(r.shape[1])
    unit = centred / np.where(varies, norm, np.nan)[:, None]
    correlation: Floats = np.clip(unit @ unit.T, -1.0, 1.0)
    return correlation


def rolling_usage_entropy(chosen: NDArray[np.integer[Any]], n_choices: int, window: int) -> Floats:
    """Entropy[D] of the last `window` (or fewer) of decisions[D], over log n; 1: evenly used."""
    counts = np.cumsum(chosen[:, None] == np.arange(n_choices), axis=0)
    counts[window:] -= counts[:-window].copy()
    share = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(share, where=share > 0.0, out=np.zeros_like(share))
    entropy: Floats = np.maximum(-(share * logs).sum(axis=1), 0.0) / math.log(n_choices)
    return entropy
