"""Are the experts still different: probe states, portfolios on them, and skills far apart.

Portfolios are compared where all experts are asked the same thing: at rows of the train window,
with books that are typical of no expert (`probe_states`, `probe_books`). `diversity` measures them
by the definitions of `ops.diversity`; under the threshold the worst expert begins anew with a skill
that none of the others has (`fresh_skill`).

Axes: `K` experts, `S` probe states, `N` assets, `Z` of a skill, `T` time, `D` decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.policy import Policy
from echelon.envs.act import ActionRule, Holdings, cap_weights, holdings
from echelon.envs.world import World
from echelon.errors import ConfigError
from echelon.market import Book, Rows
from echelon.ops.diversity import pairwise_distance, population_volume
from echelon.rng import stream
from echelon.types import Bools, Floats

_BOOK_KINDS = 3
_CANDIDATES = 512
"""Directions drawn for each skill where there is no room for one at right angles to the others."""
_FLAT = 1e-12
"""Returns that vary less than this do not vary."""


class Diversity(NamedTuple):
    """How different K experts are.

    mapd: in [0, 1]; volume: in (0, 1], with its logarithm; pairwise[K,K]: distances. All NaN where
    they are of an expert without finite weights, or of fewer than two.
    """

    mapd: float
    volume: float
    log_volume: float
    pairwise: Floats


def probe_states(world: World, spans: Sequence[range], n: int, rng: np.random.Generator) -> Rows:
    """Rows[S] of the spans, rising, each once; fewer than n where the spans hold no more.

    spans: rows a book can stand at, as `world.spans` gives them
    """
    rows = np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in spans])
    assert len(rows) > 0, "the spans have no rows"
    assert rows.max() < len(world.times), "the spans reach beyond the world"
    return np.sort(rng.choice(rows, size=min(n, len(rows)), replace=False))


def probe_books(world: World, rows: Rows, rng: np.random.Generator) -> Holdings:
    """A book for each of rows[S], in turn: all cash, equal weights, weights by lot (cash too).

    Weights are of assets that can be held at the row. Books by lot are drawn evenly from all there
    are (Dirichlet with parameters 1).
    """
    close = world.rows.close[rows]
    able: Bools = world.present[rows] & world.member[rows] & (close > 0.0)
    able &= ~world.rows.gone[rows]
    equal = able / np.maximum(able.sum(axis=1, keepdims=True), 1)
    draws = rng.exponential(size=(len(rows), world.n_assets + 1))
    draws[:, :-1] *= able
    by_lot = draws[:, :-1] / draws.sum(axis=1, keepdims=True)
    kind = (np.arange(len(rows)) % _BOOK_KINDS)[:, None]
    weights: Floats = np.select([kind == 1, kind == 2], [equal, by_lot], 0.0)
    value = np.full(len(rows), world.initial_cash)
    shares = weights * value[:, None] / np.where(able, close, 1.0)
    book = Book(value * (1.0 - weights.sum(axis=1)), shares, np.zeros_like(shares))
    return holdings(world, book, value, rows, ActionRule("weights"))


def portfolios(policy: Policy, world: World, rows: Rows, held: Holdings) -> Floats:
    """Target weights[S,N] of an expert at probe states; what it leaves as it is counts as held."""
    assert policy.kind == "weights", f"{policy.name} does not say target weights"
    policy.start(world, range(int(rows.min()), int(rows.max()) + 1))
    return whole(policy.decide(rows, held), held)


def whole(weights: NDArray[np.floating[Any]], held: Holdings) -> Floats:
    """Target weights[S,N] with the present ones in place of NaN, at most 1 together."""
    filled = np.where(np.isnan(weights), held.weights, np.asarray(weights, dtype=np.float64))
    return cap_weights(filled)


def diversity(weights: NDArray[np.floating[Any]]) -> Diversity:
    """Distances and volume of target weights[K,S,N].

    An expert with weights that are not finite (in quarantine) is left out.
    """
    assert weights.ndim == 3, f"weights should be [K,S,N], are {weights.shape}"
    known = np.flatnonzero(np.isfinite(weights).all(axis=(1, 2)))
    pairwise = np.full((len(weights), len(weights)), np.nan)
    if len(known) < 2:
        return Diversity(math.nan, math.nan, math.nan, pairwise)
    distance = pairwise_distance(weights[known])
    pairwise[np.ix_(known, known)] = distance
    volume = population_volume(weights[known])
    mapd = float(distance[np.triu_indices(len(known), 1)].mean())
    return Diversity(mapd, volume.volume, volume.log_volume, pairwise)


def skills(n: int, dim: int, seed: int) -> Floats:
    """Skills[K,Z] of n experts: unit vectors, at right angles where there is room for that."""
    if dim < 1 or (dim == 1 and n > 2):
        raise ConfigError(
            f"expected a skill for each of {n} experts, found room for {2 * dim} in "
            f"experts.skill_dim = {dim}: take 2 or more"
        )
    found = np.zeros((0, dim))
    for k in range(n):
        found = np.concatenate([found, _apart(found, stream(seed, "skill", k))[None]])
    return found


def fresh_skill(existing: Floats, number: int, seed: int) -> Floats:
    """One more skill[Z], far from the existing[K,Z]; number: how many there were before it.

    Include the skill that is given up: the new one is then no copy of it.
    """
    assert existing.ndim == 2, f"existing should be [K,Z], is {existing.shape}"
    return _apart(existing, stream(seed, "skill", number))


def _apart(existing: Floats, rng: np.random.Generator) -> Floats:
    """A unit vector at right angles to existing[K,Z], or else the farthest of many by lot."""
    dim = existing.shape[1]
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
    """Correlation[K,K] of experts' returns[K,T]; NaN beside one whose returns do not vary.

    Bars at which any expert's return is not finite are left out.
    """
    r = np.asarray(returns, dtype=np.float64)
    assert r.ndim == 2, f"returns should be [K,T], are {r.shape}"
    r = r[:, np.isfinite(r).all(axis=0)]
    if r.shape[1] < 2:
        return np.full((len(r), len(r)), np.nan)
    centred = r - r.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(centred, axis=1)
    varies = norm > _FLAT * math.sqrt(r.shape[1])
    unit = centred / np.where(varies, norm, np.nan)[:, None]
    correlation: Floats = np.clip(unit @ unit.T, -1.0, 1.0)
    return correlation


def usage_entropy(chosen: NDArray[np.integer[Any]], n_choices: int, window: int) -> Floats:
    """Entropy[D] of the last `window` of decisions[D], as a share of log n; 1: evenly used.

    At the beginning of fewer decisions; nothing is added to the counts.
    """
    c = np.asarray(chosen, dtype=np.int64)
    assert c.ndim == 1, f"chosen should be [D], is {c.shape}"
    assert n_choices >= 2, "there is nothing to choose from"
    assert window >= 1, "the window holds no decision"
    assert ((c >= 0) & (c < n_choices)).all(), f"a decision names none of {n_choices} choices"
    counts = np.cumsum(c[:, None] == np.arange(n_choices), axis=0)
    counts[window:] -= counts[:-window].copy()
    share = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(share, where=share > 0.0, out=np.zeros_like(share))
    entropy: Floats = np.maximum(-(share * logs).sum(axis=1), 0.0) / math.log(n_choices)
    return entropy
