"""Regime: a signal everybody sees, whose meaning flips and is hidden; does the router find it?

    x[t]    per asset an AR(1) of unit variance, seen by all
    g[t]    ±1, the same for all assets, flips with a small probability at every bar, hidden
    r[t+1] = strength · noise · g[t] · x[t] + noise · ε      simple returns

Each draw comes with its mirror: the same x, the same ε, and −g. Over the pair a rule that looks at
x alone gets the noise twice and the signal not at all (`RegimeMarket.pairs`).

**The advantage of a router here is information, and nothing else.** Experts and flat agents see
20 bars of x and their last *target* weights; no returns, and no holdings, which drift with returns
and would give g away. The router sees the returns of the experts' books over `HORIZONS`, from which
g can be guessed. Whether a hierarchy is better than a flat agent that is shown the same is another
question: for it `regime_worlds` takes `shown`.

What can be made of it, from knowing nothing to knowing the regime (`run_references`):

    equal weight       the same share of every asset, at every bar
    follow, oppose     experts: weights softmax(±1.5 · x)
    trailing 40        the expert whose book earned more over the last 40 bars
    fixed-share hedge  the expert in which exponential weights of the books' returns trust most, a
                       small share of trust being spread again at every bar
                       (Herbster & Warmuth 1998, Tracking the best expert)
    regime filter      the expert for the regime that is more likely, by the exact filter
    regime-aware       the expert for the regime as it is: beyond what can be known

Those that choose do so every 5 bars, from nothing but the past, the last one excepted; they must
beat every rule that does not, by the interval over pairs. Flat agents stand next to them without a
bar. Of a hierarchy the test pairs are traded by

    hierarchy        router and experts as they were trained
    hedge            the fixed-share hedge over the same experts
    oracle           the better expert of each regime, knowing the regime at every bar
    expert 0, …      each expert by itself

and by flat agents, SAC as the experts are and A2C, trained for as many environment steps on the
same draws. Axes: `T` rows of the joined draws, `K` experts, `D` draws, `P` pairs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from echelon.backtest.policy import Policy
from echelon.config import Config, override_config
from echelon.config.agents import StateConfig
from echelon.config.algorithms import ALGORITHMS, FLAT_SETTINGS
from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.market import Rows
from echelon.ops.information import mutual_information
from echelon.ops.measures import sharpe_annual
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HEDGE
from echelon.proving.certificate import Bar, Check, MarketResult, seed_check
from echelon.proving.parts import Done, Finding, Part, time_spent
from echelon.proving.worlds import (
    YEAR,
    Arena,
    SeedWorlds,
    TrainingPart,
    at_fee,
    autoregressive,
    drawn_world,
    trade_draws,
)
from echelon.rng import stream
from echelon.types import Floats
from echelon.workers import Report, ShouldStop

HORIZONS = (5, 20, 40, 120)
"""Bars over which a router sees the returns of the experts' books."""
TILT = 1.5
"""Weights of the experts: softmax(±TILT · x)."""
EVERY = 5
"""Bars between the decisions of those that choose."""
TRAILING_BARS = 40
_HINT_MEMORY = 0.9
"""Of the noise in a hint, per bar."""
_RATE, _SHARE = 60.0, 0.004
"""Of the hedge: how fast trust follows returns, and how much of it is spread again at each bar."""


class RegimeDraw(NamedTuple):
    """One history: x[T,N] the signal, regime[T] its hidden meaning ±1, open[T,N], close[T,N].

    hint[T]: a series that shows the regime, in noise; 0 where the market has no `lead`
    """

    x: Floats
    regime: Floats
    open: Floats
    close: Floats
    hint: Floats


@dataclass(frozen=True)
class RegimeMarket:
    """Numbers of the market; noise: sd of a bar's, of which `strength` is the drift per unit of x.

    persistence: of x, per bar; flip: probability that the regime turns, per bar
    overnight: share of a bar's drift and variance that falls between close and open
    fast_flip, turns: with the probability `turns` a bar the rate of flips changes between `flip`
        and this; lead: of the series lead · g[t] + e[t], e an AR(1) of unit variance, which shows
        the regime before returns can
    """

    n_assets: int = 8
    n_bars: int = 10_000
    noise: float = 0.012
    strength: float = 0.12
    persistence: float = 0.98
    flip: float = 1 / 400
    overnight: float = 0.2
    fast_flip: float = 0.0
    turns: float = 0.0
    lead: float = 0.0

    def __repr__(self) -> str:
        """Without what is not there: proofs made before are known by it."""
        optional = {"fast_flip", "turns", "lead"}
        told = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = (f"{n}={v!r}" for n, v in told.items() if v or n not in optional)
        return f"{type(self).__name__}({', '.join(shown)})"

    def draw(self, seed: int, name: str, *, mirrored: bool = False) -> RegimeDraw:
        """One history; `mirrored`: the same x and noise under the opposite regime."""
        rng = stream(seed, "regime", name)
        shape = (self.n_bars, self.n_assets)
        size = np.sqrt(1.0 - self.persistence**2)
        first = rng.standard_normal(self.n_assets)
        x = autoregressive(first, size * rng.standard_normal(shape), self.persistence)
        more = stream(seed, "regime", name, "rates and hints")
        fast = np.cumsum(more.random(self.n_bars) < self.turns) % 2 == 1
        flips = rng.random(self.n_bars) < np.where(fast, self.fast_flip, self.flip)
        flips[0] = rng.random() < 0.5
        regime = np.where(np.cumsum(flips) % 2 == int(mirrored), 1.0, -1.0)
        drift = np.zeros(shape)
        drift[1:] = self.strength * self.noise * regime[:-1, None] * x[:-1]
        night, day = self.overnight, 1.0 - self.overnight
        gap = night * drift + np.sqrt(night) * self.noise * rng.standard_normal(shape)
        session = day * drift + np.sqrt(day) * self.noise * rng.standard_normal(shape)
        gap[0] = session[0] = 0.0
        close = 100.0 * np.cumprod(1.0 + gap + session, axis=0)
        # Both parts of a bar's return count from the close before: their sum is exact.
        before = np.vstack([close[:1], close[:-1]])
        shocks = np.sqrt(1.0 - _HINT_MEMORY**2) * more.standard_normal((self.n_bars, 1))
        noise = autoregressive(more.standard_normal(1), shocks, _HINT_MEMORY)[:, 0]
        hint = self.lead * regime + noise if self.lead else np.zeros(self.n_bars)
        return RegimeDraw(x, regime, before * (1.0 + gap), close, hint)

    def pairs(self, n_pairs: int, name: str, first_seed: int = 0) -> list[RegimeDraw]:
        """Draws and their mirrors in turn: 2 · `n_pairs` of them."""
        seeds = range(first_seed, first_seed + n_pairs)
        return [self.draw(s, name, mirrored=mirrored) for s in seeds for mirrored in (False, True)]

    def follow_probability(self, x: Floats, close: Floats) -> Floats:
        """[T] exact P(g = 1 | x[T,N] and close[T,N] up to and including each row).

        Opens would add nothing: drift and variance are split overnight in the same proportion.
        """
        returns = close[1:] / close[:-1] - 1.0
        evidence = 2.0 * self.strength / self.noise * (x[:-1] * returns).sum(axis=1)
        probability = np.full(len(close), 0.5)
        for t, more in enumerate(evidence, start=1):
            against = (1.0 - probability[t - 1]) * np.exp(-more)
            belief = probability[t - 1] / (probability[t - 1] + against)
            probability[t] = belief * (1.0 - self.flip) + (1.0 - belief) * self.flip
        return probability

    def filter_probability(self, draw: RegimeDraw) -> Floats:
        """[T] exact P(g = 1 | x, returns and hint up to and including each row)."""
        if not self.turns and not self.lead:
            return self.follow_probability(draw.x, draw.close)
        sign, rate = np.array([1.0, -1.0]), np.array([self.flip, self.fast_flip])
        returns = draw.close[1:] / draw.close[:-1] - 1.0
        evidence = 2.0 * self.strength / self.noise * (draw.x[:-1] * returns).sum(axis=1)
        likely = 1.0 / (
            1.0 + np.exp(-evidence[:, None] * sign)
        )  # [T−1,g] of the return, up to a factor
        away = draw.hint[:, None] - self.lead * sign  # [T,g] the hint's noise, were it so
        step = away[1:, None, :] - _HINT_MEMORY * away[:-1, :, None]  # [T−1,g,g'] its shock
        shown = np.exp(-0.5 * np.square(step) / (1.0 - _HINT_MEMORY**2))
        change = np.array([[1.0 - self.turns, self.turns], [self.turns, 1.0 - self.turns]])
        stay = np.eye(2)[:, :, None]
        flip = stay * (1.0 - rate) + (1.0 - stay) * rate  # [g,g',v']
        # [g,v]; histories begin at the slow rate.
        state = np.exp(-0.5 * np.square(away[0]))[:, None] * np.array(
            [1.0 - self.turns, self.turns]
        )
        probability = np.empty(len(draw.close))
        for t in range(len(probability)):
            if t:
                moved = (likely[t - 1][:, None] * state) @ change  # [g,v']
                state = np.einsum("gv,ghv,gh->hv", moved, flip, shown[t - 1])
            state = state / state.sum()
            probability[t] = state[0].sum()
        return probability


def regime_worlds(
    draws: Sequence[RegimeDraw], config: Config, *, shown: Sequence[Floats] | None = None
) -> list[World]:
    """Worlds of draws with x as the only feature, unscaled; shown: [T,M] more of each draw."""
    worlds = []
    for d, draw in enumerate(draws):
        x = draw.x[..., None]
        if shown is not None:
            x = np.concatenate([x, np.repeat(shown[d][:, None], x.shape[1], axis=1)], axis=2)
        present = np.ones(draw.close.shape, dtype=bool)
        worlds.append(drawn_world(draw.open, draw.close, x.astype(np.float32), present, config))
    return worlds


def book_returns(values: Floats, horizons: Sequence[int] = HORIZONS) -> Floats:
    """[S+1,…,H] returns of values[S+1,…] over the last h bars, or since the start, for each h."""
    steps = np.arange(len(values))
    returns = [values / values[np.maximum(steps - h, 0)] - 1.0 for h in horizons]
    return np.stack(returns, axis=-1)


class TiltedWeights:
    """Target weights softmax(tilt · x) at every bar. tilt: one, or [T,1] of each row"""

    kind: ActionKind = "weights"

    def __init__(self, name: str, tilt: float | Floats) -> None:
        self.name = name
        self._tilt = tilt

    def start(self, world: World, span: range) -> None:
        self._weights = self.weights(world.x[..., 0])

    def decide(self, row: Rows, held: Holdings) -> Floats:
        return self._weights[row]

    def weights(self, x: NDArray[np.floating]) -> Floats:
        """[T,N] of x[T,N]."""
        return np.asarray(softmax(self._tilt * x.astype(np.float64), axis=1))


FOLLOW, OPPOSE = TiltedWeights("follow", TILT), TiltedWeights("oppose", -TILT)
EQUAL = TiltedWeights("equal weight", 0.0)


def choose_expert(scores: Floats, starts: Rows, every: int = EVERY) -> Rows:
    """[T] number of the expert in charge at each row: the best when last decided, `every` so often.

    scores[T,K]: of K experts, from what is known at each row; starts[D]: rows where books begin
    """
    rows = np.arange(len(scores))
    start = starts[np.maximum(np.searchsorted(starts, rows, side="right") - 1, 0)]
    decided = np.where(rows < start, rows, start + (rows - start) // every * every)
    chosen: Rows = scores.argmax(axis=1)[decided]
    return chosen


def hedge(returns: Floats) -> Floats:
    """[S+1,…,K] trust of the fixed-share hedge in experts with returns[S,…,K], from before on."""
    trust = np.full((len(returns) + 1, *returns.shape[1:]), 1.0 / returns.shape[-1])
    for k, earned in enumerate(returns):
        weight = trust[k] * np.exp(_RATE * earned)
        weight /= weight.sum(axis=-1, keepdims=True)
        trust[k + 1] = (1.0 - _SHARE) * weight + _SHARE / returns.shape[-1]
    return trust


def expert_values(arena: Arena, config: Config) -> Floats:
    """[S+1,D,2] values of the books of follow and oppose, from a draw's first whole window on."""
    return np.stack([arena.values(expert, config) for expert in (FOLLOW, OPPOSE)], axis=-1)


def router_view(draws: Sequence[RegimeDraw], config: Config) -> list[Floats]:
    """[T,K·H] for each draw: what a router sees, the experts' book returns over `HORIZONS`.

    In units of noise · √bars, and 0 before the books begin; `regime_worlds` takes it as `shown`.
    """
    values = expert_values(Arena.from_draws(regime_worlds(draws, config)), config)
    seen = book_returns(values) / (RegimeMarket.noise * np.sqrt(HORIZONS))
    return list(_by_bar(seen.reshape(*seen.shape[:2], -1), len(draws[0].x)))


def _by_bar(values: Floats, n_bars: int) -> Floats:
    """[D,T,K] of values[S,D,K], which are of the last S bars; 0 before."""
    padded = np.zeros((values.shape[1], n_bars, values.shape[2]))
    padded[:, n_bars - len(values) :] = values.swapaxes(0, 1)
    return padded


def run_references(
    market: RegimeMarket, draws: Sequence[RegimeDraw], config: Config
) -> Mapping[str, Floats]:
    """Name → returns[S,D] of every reference on every draw, by the market kernel."""
    arena = Arena.from_draws(regime_worlds(draws, config))
    books = expert_values(arena, config)
    values = {EQUAL.name: arena.values(EQUAL, config)}
    values |= {expert.name: books[..., k] for k, expert in enumerate((FOLLOW, OPPOSE))}
    n_bars = len(draws[0].x)
    trailing = _by_bar(book_returns(books, (TRAILING_BARS,))[..., 0], n_bars)
    trust = _by_bar(hedge(books[1:] / books[:-1] - 1.0), n_bars)
    up = np.concatenate([market.filter_probability(draw) for draw in draws])
    regime = np.concatenate([draw.regime for draw in draws])
    scores = {  # [D·T,2] of follow and oppose at each row of the joined draws
        f"trailing {TRAILING_BARS}": trailing.reshape(-1, 2),
        "fixed-share hedge": trust.reshape(-1, 2),
        "regime filter": np.column_stack([up, 1.0 - up]),
        "regime-aware": np.column_stack([regime, -regime]),
    }
    for name, score in scores.items():
        choice = choose_expert(score, arena.starts, 1 if name == "regime-aware" else EVERY)
        tilt = np.where(choice == 0, TILT, -TILT)
        values[name] = arena.values(TiltedWeights(name, tilt[:, None]), config)
    return {name: value[1:] / value[:-1] - 1.0 for name, value in values.items()}


FEE_BPS = 5.0
BLIND = ("equal weight", "follow", "oppose")
"""References that do not look at what was earned."""
CHOOSING = ("trailing 40", "fixed-share hedge", "regime filter")
"""References that do."""
CHOOSING_BAR = Bar("low", "above", 0.0)
EXPERT_PAIRS = (4, 1)
"""Mirrored pairs to train on, and to choose a checkpoint by, of an agent by target weights."""
HIERARCHY_BAR = Bar("estimate", "at least", 0.8)
ADVANTAGE_BAR = Bar("low", "above", 1.0)
_SHOWN_BARS = 2_000
"""Bars of the first test draw of which the certificate shows who was in charge."""

FlatAlgo = Literal["sac", "a2c"]
FLAT: tuple[FlatAlgo, ...] = ("sac", "a2c")


@dataclass(frozen=True)
class ReferencesPart(Part):
    """All references on mirrored pairs. name: of the draws, as `RegimeMarket.draw` takes it"""

    config: Config
    market: RegimeMarket
    n_pairs: int
    name: str = "test"
    key: str = "regime-references"

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        draws = self.market.pairs(self.n_pairs, self.name)
        returns = run_references(self.market, draws, at_fee(self.config, FEE_BPS))
        return {"sharpes": {name: by_pair(traded) for name, traded in returns.items()}}


@dataclass(frozen=True)
class PairCounts:
    """How many mirrored pairs a seed has: to learn from, to choose its checkpoint, to be tested.

    names: of the three kinds of draws; the class's, as parts of proofs are known by the fields
    """

    names: ClassVar[tuple[str, str, str]] = ("trains", "valids", "test")

    train: int = 6
    valid: int = 2
    test: int = 4
    valid_bars: int = 3_000


_Draws: TypeAlias = Sequence[RegimeDraw]


class RegimeSetting:
    """Draws of one seed, and the worlds of them. Agents see neither holdings nor cash."""

    def __init__(self, config: Config, train: _Draws, valid: _Draws, test: _Draws) -> None:
        blind = StateConfig(include_pos=False, include_cash=False)
        self.config = at_fee(config, FEE_BPS).model_copy(update={"state": blind})
        self.train, self.valid, self.test = train, valid, test

    @staticmethod
    def from_counts(
        config: Config, market: RegimeMarket, counts: PairCounts, seed: int
    ) -> RegimeSetting:
        """Mirrored pairs: of the seed alone to learn from and to choose by, shared for the test."""
        train, valid, test = counts.names
        shorter = replace(market, n_bars=counts.valid_bars)
        return RegimeSetting(
            config,
            market.pairs(counts.train, train, 1_000 * seed),
            shorter.pairs(counts.valid, valid, 1_000 * seed),
            market.pairs(counts.test, test),
        )

    def worlds(self, *, shown: bool = False) -> SeedWorlds:
        """Where to learn, to validate and to be tested; shown: with what a router sees."""

        def make(draws: _Draws) -> list[World]:
            view = router_view(draws, self.config) if shown else None
            return regime_worlds(draws, self.config, shown=view)

        return SeedWorlds(make(self.train), make(self.valid), make(self.test))


class FlatPart(TrainingPart):
    """One flat agent. shown: it sees what a router sees"""

    shown: bool

    @property
    def sight(self) -> str:
        return "shown" if self.shown else "flat"

    @abstractmethod
    def setting(self) -> RegimeSetting:
        """Its draws."""

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        setting = self.setting()
        worlds = setting.worlds(shown=self.shown)
        trained = self.train(setting.config, worlds, directory, report, should_stop)
        if trained is None:
            return None
        traded = trade_draws(trained.policy, worlds.test, setting.config)
        return {
            "seed": self.seed,
            "steps": trained.outcome.step,
            "sharpes": by_pair(traded.returns),
        }


@dataclass(frozen=True)
class RegimeAgentPart(FlatPart):
    """One flat agent that stands by itself."""

    KEY = "regime-{0.sight}-{0.seed}"

    config: Config
    market: RegimeMarket
    n_pairs: int
    seed: int
    shown: bool

    def setting(self) -> RegimeSetting:
        """One draw of each kind, mirrored pairs of each for who says weights."""
        market, seed = self.market, self.seed
        if ALGORITHMS[self.config.train.algo].family != "flat":
            n_train, n_valid = EXPERT_PAIRS
            counts = PairCounts(n_train, n_valid, self.n_pairs, market.n_bars)
            return RegimeSetting.from_counts(self.config, market, counts, seed)
        train, valid = ([market.draw(seed, name)] for name in ("train", "valid"))
        return RegimeSetting(self.config, train, valid, market.pairs(self.n_pairs, "test"))


@dataclass(frozen=True)
class RegimeFlatPart(FlatPart):
    """One flat agent next to a hierarchy, on the same draws for as many steps."""

    KEY = "regime-{0.algo}-{0.sight}-{0.seed}"

    config: Config
    market: RegimeMarket
    draws: PairCounts
    seed: int
    algo: FlatAlgo
    shown: bool

    def setting(self) -> RegimeSetting:
        return RegimeSetting.from_counts(self.config, self.market, self.draws, self.seed)


@dataclass(frozen=True)
class RegimeHierarchyPart(TrainingPart):
    """One hierarchy and everybody in it."""

    KEY = "regime-hierarchy-{0.seed}"

    config: Config
    market: RegimeMarket
    draws: PairCounts
    seed: int

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        setting = RegimeSetting.from_counts(self.config, self.market, self.draws, self.seed)
        config, worlds = setting.config, setting.worlds()
        trained = self.train(config, worlds, directory, report, should_stop)
        if trained is None:
            return None
        policy = trained.policy
        assert isinstance(policy, HierarchyPolicy), "train.algo is HIERARCHY"
        arena = Arena.from_draws(worlds.test)  # embeddings are worked out once
        in_charge: list[NDArray[np.int64]] = []
        own = trade_draws(policy, arena, config, lambda: in_charge.append(policy.in_charge))
        returns, chosen = {"hierarchy": own.returns}, np.stack(in_charge)  # [S,D] both
        experts = policy.experts
        returns["hedge"] = trade_draws(policy.reference_policies()[HEDGE], arena, config).returns
        singles = [trade_draws(expert, arena, config).returns for expert in experts]
        returns |= {f"expert {k}": earned for k, earned in enumerate(singles)}
        regime = np.stack([draw.regime for draw in setting.test], axis=1)
        decided = regime[-len(chosen) - 1 : -1]
        usage = np.bincount(chosen.ravel(), minlength=len(experts) + 1) / chosen.size
        oracle = _Oracle(experts, regime, np.stack(singles), decided)
        returns["oracle"] = trade_draws(oracle, arena, config).returns
        return {
            "seed": self.seed,
            "steps": trained.outcome.step,
            "best_step": trained.outcome.best_step,
            "sharpes": {name: by_pair(earned) for name, earned in returns.items()},
            "information": mutual_information(chosen.ravel(), (decided.ravel() > 0).astype(int)),
            "usage": usage.tolist(),
            "shown": {
                "regime": decided[:_SHOWN_BARS, 0].astype(int).tolist(),
                "in_charge": chosen[:_SHOWN_BARS, 0].tolist(),
            },
        }


def by_pair(returns: Floats) -> list[float]:
    """[P] mean annual Sharpe ratio of each draw and its mirror; returns[S,2·P] in turn."""
    sharpes = np.array([sharpe_annual(series, YEAR) for series in returns.T])
    return [float(s) for s in sharpes.reshape(-1, 2).mean(axis=1)]


def assess_regime(parts: Sequence[Done]) -> MarketResult:
    """Those that choose, less the best in each pair of those that do not; references first."""
    agents = [p for p in parts if p.key.startswith(("regime-flat-", "regime-shown-"))]
    sharpes: Mapping[str, list[float]] = parts[0].finding["sharpes"]
    best = np.max([sharpes[name] for name in BLIND], axis=0)
    checks: list[Check] = [
        seed_check(f"regime_{name}", "sharpe", (sharpes[name] - best).tolist(), CHOOSING_BAR)
        for name in CHOOSING
    ]
    rows = {name: list(values) for name, values in sharpes.items()}
    for kind in ("flat", "shown"):
        traded = [p.finding["sharpes"] for p in agents if p.key.startswith(f"regime-{kind}")]
        if traded:
            rows[f"{kind} agent"] = np.mean(traded, axis=0).tolist()
            checks.append(seed_check(f"regime_{kind}_agent", "sharpe", rows[f"{kind} agent"]))
    facts: dict[str, Any] = {
        "pairs": len(best),
        "seeds": sorted({p.finding["seed"] for p in agents}),
        "steps": max((p.finding["steps"] for p in agents), default=0),
        "fee_bps": FEE_BPS,
    }
    notes = ["regime_information", "regime_agents" if agents else "regime_references_only"]
    own = [part for part in parts if part.key.startswith("regime-hierarchy")]
    if own:
        first = own[0].finding
        facts |= {
            "hierarchy_seeds": sorted(part.finding["seed"] for part in own),
            "hierarchy_steps": max(part.finding["steps"] for part in own),
            "hierarchy_pairs": len(first["sharpes"]["hierarchy"]),
            "information": {str(p.finding["seed"]): p.finding["information"] for p in own},
            "shown": {
                **first["shown"],
                "seed": first["seed"],
                "experts": sum(name.startswith("expert ") for name in first["sharpes"]),
            },
        }
        filtered = float(np.mean(rows["regime filter"][: facts["hierarchy_pairs"]]))
        more, theirs = assess_hierarchy(filtered, parts)
        checks, rows = [*checks, *more], {**rows, **theirs}
        notes[1:] = ["regime_hierarchy", *["regime_one_seed"] * (len(own) == 1)]
        # What a quick proof does without.
        notes += ["regime_no_flat"] * (not {"flat sac", "flat a2c"} & rows.keys())
    return MarketResult(
        name="regime",
        checks=tuple(checks),
        **time_spent(parts),
        facts=facts,
        rows=rows,
        notes=tuple(notes),
    )


def flat_config(config: Config, algo: FlatAlgo) -> Config:
    if algo == "sac":
        return override_config(config, flat_sac(config))
    steps = f"train.total_env_steps={config.train.total_env_steps}"
    return override_config(config, [*FLAT_SETTINGS, "train.algo=A2C", steps])


def flat_sac(config: Config) -> tuple[str, ...]:
    """Overrides to flat SAC, with as many updates as a hierarchy's experts together, and steps."""
    schedule, n_experts = config.trainer.training_schedule, config.experts.n_experts
    learned = n_experts * schedule.experts.steps / schedule.experts.freq
    routed = schedule.router.steps * config.meta_router.every_bars / schedule.router.freq
    share = learned / (n_experts * config.trainer.round_steps + routed)
    per_step = config.expert.updates_per_step * share
    return ("train.algo=SAC", f"expert.updates_per_step={per_step:g}")


def assess_hierarchy(
    filtered: float, parts: Sequence[Done]
) -> tuple[list[Check], Mapping[str, list[float]]]:
    """(checks, rows of Sharpe ratios by seed); one seed is held to no bar."""

    def by_seed(kind: str) -> dict[int, Any]:
        findings = [part.finding for part in parts if part.key.startswith(f"regime-{kind}-")]
        return {finding["seed"]: finding["sharpes"] for finding in findings}

    own = by_seed("hierarchy")
    seeds = sorted(own)
    means = [{name: float(np.mean(v)) for name, v in own[seed].items()} for seed in seeds]
    rows = {name: [mean[name] for mean in means] for name in ("hierarchy", "hedge", "oracle")}
    singles = [name for name in means[0] if name.startswith("expert")]
    rows["best single expert"] = [max(mean[name] for name in singles) for mean in means]
    for algo, kind in product(FLAT, ("flat", "shown")):
        sharpes = by_seed(f"{algo}-{kind}")
        if sorted(sharpes) == seeds:
            rows[f"{kind} {algo}"] = [float(np.mean(sharpes[seed])) for seed in seeds]
    ours = np.array(rows["hierarchy"])
    share_bars, gap_bars = ((HIERARCHY_BAR,), (ADVANTAGE_BAR,)) if len(seeds) > 1 else ((), ())
    checks = [seed_check("regime_share", "share", (ours / filtered).tolist(), *share_bars)]
    for name in ("best single expert", "flat sac", "flat a2c"):
        if name in rows:
            gap = (ours - np.array(rows[name])).tolist()
            checks.append(seed_check(f"regime_over_{name}", "sharpe", gap, *gap_bars))
    return checks, rows


class _Oracle:
    """At every bar the expert whose own book earned most in the regime there is."""

    kind: ActionKind = "weights"
    name = "oracle"

    def __init__(
        self, experts: Sequence[Policy], regime: Floats, returns: Floats, decided: Floats
    ) -> None:
        """regime[T,D]: of the test draws; returns[K,S,D], decided[S,D]: what earned them."""
        self._experts = experts
        self._regime = regime.T.ravel()  # the draws one after the other, as they are joined
        self._best = {
            sign: int(np.argmax([earned[decided == sign].mean() for earned in returns]))
            for sign in (-1.0, 1.0)
        }

    def start(self, world: World, span: range) -> None:
        for expert in self._experts:
            expert.start(world, span)

    def decide(self, row: Rows, held: Holdings) -> Floats:
        low, high = (self._experts[self._best[s]].decide(row, held) for s in (-1.0, 1.0))
        return np.where(self._regime[row, None] > 0, high, low)
