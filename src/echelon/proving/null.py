"""Null: how often does the pipeline claim an edge where there is none, and where there is one?

Prices have what real ones have and the planted markets lack: a common factor, volatility that
comes in clusters, heavy tails, a risk premium. What they lack is anything to earn beyond it. The
premium of an asset is the price of risk times its covariance with equal weight,

    E[R_{n,t} | past] = price · Cov(R_{n,t}, mean of R_t | past),

so equal weight, held all the time, has the highest Sharpe ratio any policy can have. (With a
constant premium, a policy that flees volatility would be truly better, and counting its claims as
false would be wrong.)

    volatility of factor and assets    exp of an AR(1), each its own
    innovations                        Student's t, five degrees of freedom
    a bar                              a fifth of drift and variance overnight, the rest after

A draw is traded in three windows: train, validation, test. A claim is that of `statistics.judge`,
and here every one is false. Who trades a draw is fixed beforehand by its number:

    agent          the configuration whole, through files: bars imported and prepared, trained,
                   evaluated; the claim is the one its report would show (`evaluation.trust`)
    rules          of twelve momentum and reversal rules the best one on validation: twelve trials
    random         BUY, SELL or HOLD by lot
    forecast       boosted trees of the whole configuration, fitted on the draw's train window
    min_variance   least variance over the last year, long only
    noise          as a forecaster trades, by scores without meaning: of four rules the best one on
                   validation, four trials

A wide market (`with_assets`: `echelon prove null --null-assets 120`) has as many assets as a
cross-section needs, and fewer years; there most draws are traded by noise.

On the trend market the agents of `planted` are judged, each draw once, as the mean of the seeds;
the deflated Sharpe ratio is that of the seed with the lowest one, on its own validation draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echelon.backtest.baselines import make_baseline
from echelon.backtest.forecaster import fit_forecaster
from echelon.backtest.policy import Policy
from echelon.backtest.top_k import RowScores, TopKPolicy, TopKRule
from echelon.config import Config
from echelon.config.features import FeaturesConfig, StationaryConfig
from echelon.envs.world import World
from echelon.evaluation.evaluate import evaluate
from echelon.evaluation.statistics import deflate, judge
from echelon.evaluation.trust import load_trust
from echelon.files import read_arrays
from echelon.proving.certificate import Bar, MarketResult, count_check
from echelon.proving.parts import Done, Finding, Part, time_spent
from echelon.proving.pipeline import on_file, train_through, write_bars
from echelon.proving.planted import RETURNS, PlantedSignal, claim_draws, rules_of_thumb
from echelon.proving.worlds import (
    WARMUP,
    YEAR,
    Arena,
    Draw,
    EqualWeight,
    autoregressive,
    last_bars,
    planted_worlds,
    trade_draws,
    with_test_window,
)
from echelon.rng import stream
from echelon.types import Floats
from echelon.workers import Report, ShouldStop

_PERSISTENCE = 0.9
"""Of noise scores from one bar to the next."""
_TAIL = 5
"""Degrees of freedom of the innovations: the least with a finite kurtosis."""


class NullWindows(NamedTuple):
    """Bars of the three windows of a draw."""

    train: int
    valid: int
    test: int


WIDE_FROM = 50
"""Assets from which a market is wide."""
WIDE_WINDOWS = NullWindows(1008, 252, 504)


@dataclass(frozen=True)
class NullMarket:
    """Numbers of the market; as in the planted ones, 8 assets with 1.2 % a bar.

    windows: ten, five and five years
    common: standard deviation of the common factor; own: of what is an asset's alone
    premium: of equal weight, per year
    persistence, spread: of the logarithms of the volatilities
    overnight: share of a bar's drift and variance that falls between close and open
    """

    windows: NullWindows = NullWindows(2520, 1260, 1260)  # noqa: RUF009 (frozen)
    n_assets: int = 8
    common: float = 0.008
    own: float = 0.009
    premium: float = 0.06
    persistence: float = 0.98
    spread: float = 0.4
    overnight: float = 0.2

    def with_assets(self, n_assets: int) -> NullMarket:
        """With another number of assets; a wide one has four, one and two years."""
        windows = WIDE_WINDOWS if n_assets >= WIDE_FROM else self.windows
        return replace(self, n_assets=n_assets, windows=windows)

    @property
    def rota(self) -> tuple[str, ...]:
        """Who trades a draw, by its number: most of all who chooses, least who is slow."""
        return WIDE_ROTA if self.n_assets >= WIDE_FROM else ROTA

    def draw(self, seed: int, name: str, warmup: int) -> Draw:
        """One history, `warmup` bars before its train window; hidden: deviation of each asset."""
        rng = stream(seed, "null", name)
        shape = (warmup + sum(self.windows), self.n_assets)
        factor = self.common * self._volatility(rng, (shape[0], 1))
        own = self.own * self._volatility(rng, shape)
        night, day = (
            self._part(rng, share, factor, own) for share in (self.overnight, 1 - self.overnight)
        )
        close = 100.0 * np.exp(np.cumsum(night + day, axis=0))
        return Draw(np.sqrt(factor**2 + own**2), close * np.exp(-day), close)

    def rows(self, warmup: int) -> dict[str, tuple[int, int]]:
        """First row of each window of a draw, and the row after its last."""
        train, valid, test = self.windows
        ends = np.cumsum([warmup, train, valid, test]).tolist()
        return dict(zip(self.windows._fields, pairwise(ends), strict=True))

    def _volatility(self, rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
        """[T,N]: around 1, in the sense that its square has mean 1."""
        first = rng.standard_normal(shape[1])
        size = np.sqrt(1.0 - self.persistence**2)
        level = autoregressive(first, size * rng.standard_normal(shape), self.persistence)
        return np.asarray(np.exp(self.spread * level - self.spread**2))

    def _part(self, rng: np.random.Generator, share: float, factor: Floats, own: Floats) -> Floats:
        """[T,N] log returns of a part of each bar: premium, moves, and half the variance less."""
        to_unit = np.sqrt((_TAIL - 2) / _TAIL)  # Student's t to variance 1
        common = factor * (rng.standard_t(_TAIL, factor.shape) * to_unit)
        moves = np.sqrt(share) * (common + own * (rng.standard_t(_TAIL, own.shape) * to_unit))
        with_equal_weight = factor**2 + own**2 / self.n_assets
        price_of_risk = self.premium / YEAR / (self.common**2 + self.own**2 / self.n_assets)
        drift = price_of_risk * with_equal_weight - 0.5 * (factor**2 + own**2)
        return np.asarray(share * drift + moves)


def null_world(market: NullMarket, seed: int, name: str, config: Config) -> World:
    """The world of a draw, with its three windows; features scaled by the train window alone."""
    before = WARMUP + config.window
    draw = market.draw(seed, name, before)
    splits = {name: range(*rows) for name, rows in market.rows(before).items()}
    known = Draw(*(part[: splits["train"].stop] for part in draw))
    _, world = planted_worlds([known, draw], config)
    return replace(world, splits=splits)


CHEAP = ("rules", "random", "forecast", "min_variance", "noise")
"""Policies that stand in for agents: they cost nothing to train."""
ROTA = ("rules", "random", "rules", "forecast", "rules", "min_variance")
WIDE_ROTA = ("noise", "rules", "noise", "forecast", "noise", "noise")
NOISE_RULES = tuple((share, buffer) for share in (0.1, 0.2) for buffer in (2.0, 3.0))
"""Share of the assets that is held, and the buffer of what may stay."""
FALSE_BAR = Bar("estimate", "at most", 0.05)
POWER_BAR = Bar("estimate", "at least", 0.90)
"""Shares of draws: claimed where there is nothing, and where there is something."""
BARS_BEFORE = 300
"""Bars before the train window of an agent's draw: features look back into them."""
RULE_BARS = (5, 20, 60)
"""Bars of the rules: times momentum or reversal, times absolute or relative, makes twelve."""


@dataclass(frozen=True)
class DrawVerdict:
    """Of one draw: annual Sharpe ratio over equal weight, and the lower of both lower bounds.

    deflated: the deflated Sharpe ratio; trials: what it was deflated by
    """

    draw: int
    policy: str
    made: bool
    advantage: float
    low: float
    deflated: float
    trials: int

    @staticmethod
    def from_returns(
        draw: int, policy: str, agents: Floats, baseline: Floats, deflated: float, trials: int
    ) -> DrawVerdict:
        """Judge agents[T,S] against baseline[T]; the draw's number seeds the bootstrap."""
        claim = judge(agents, baseline, deflated, seed=draw)
        year = math.sqrt(YEAR)
        return DrawVerdict(
            draw=draw,
            policy=policy,
            made=bool(claim.made),
            advantage=year * claim.sharpe.single.estimate,
            low=year * claim.sharpe.low,
            # A book that never moved has no Sharpe ratio, and nothing is claimed of it.
            deflated=deflated if math.isfinite(deflated) else 0.0,
            trials=trials,
        )

    @staticmethod
    def from_trust(draw: int, trust: Mapping[str, Any]) -> DrawVerdict:
        """What the trust.json of an agent's test window says."""
        against, claim = trust["differences"]["equal_weight"], trust["claim"]
        year = math.sqrt(YEAR)
        # What is not a number, of a book that never moved, is null there.
        return DrawVerdict(
            draw=draw,
            policy="agent",
            made=claim["made"],
            advantage=year * (against["single"]["estimate"] or 0.0),
            low=year * min(against[blocks]["low"] or 0.0 for blocks in ("single", "double")),
            deflated=claim["after_looks"] or 0.0,
            trials=claim["trials"] or 1,
        )


def assess_null(parts: Sequence[Done], market: NullMarket) -> MarketResult:
    """False claims on the null market, and claims on the trend market, where they were counted.

    parts: `PowerPart` last, but of a wide market, which has none
    """
    wide = market.n_assets >= WIDE_FROM
    null, power = (parts, ()) if wide else (parts[:-1], parts[-1:])
    verdicts, claimed = (
        [DrawVerdict(**v) for part in some for v in part.finding["verdicts"]]
        for some in (null, power)
    )
    kinds = [kind for kind in ("agent", *CHEAP) if any(v.policy == kind for v in verdicts)]
    groups = {kind: [v for v in verdicts if v.policy == kind] for kind in kinds}
    return MarketResult(
        name="null",
        checks=(
            count_check("null_claims", sum(v.made for v in verdicts), len(verdicts), FALSE_BAR),
            *(
                count_check("null_power", sum(v.made for v in claimed), len(claimed), POWER_BAR)
                for _ in power
            ),
        ),
        **time_spent(parts),
        facts={
            "claims": {kind: [sum(v.made for v in g), len(g)] for kind, g in groups.items()},
            "draws": len(verdicts),
            "power_draws": len(claimed),
            "windows": list(market.windows),
            "premium": market.premium,
            "assets": market.n_assets,
            "steps": max((part.finding.get("steps", 0) for part in null), default=0),
        },
        rows={f"null/{kind}": [v.low for v in group] for kind, group in groups.items()}
        | ({"trend/agent": [v.low for v in claimed]} if power else {}),
        notes=(
            "null_trials",
            "null_stand_ins" if "agent" in kinds else "null_cheap_only",
            *(("null_wide",) if wide else ()),
        ),
    )


@dataclass(frozen=True)
class NullAgentPart(Part):
    """The whole pipeline on one draw of the null market, agents included."""

    KEY = "null-agent-{0.draw:03d}"

    config: Config
    market: NullMarket
    draw: int

    @property
    def seeds(self) -> list[int]:
        return [self.config.seed + k for k in range(self.config.train.seeds)]

    @property
    def steps(self) -> int:
        return self.config.train.total_env_steps * len(self.seeds)

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        draw = self.market.draw(self.draw, "null agents", BARS_BEFORE)
        bars = write_bars(directory / "bars.parquet", draw, self.draw)
        windows = self.market.rows(BARS_BEFORE)
        config = on_file(self.config, directory, bars, windows, self.config.seed)
        trained = train_through(config, directory / "run", self.seeds, report, should_stop)
        if trained is None:
            return None
        run, outcomes = trained
        evaluate(run, "valid")
        evaluate(run, "test")
        trust = load_trust(run.path, "test")
        assert trust is not None, "just written"
        verdict = DrawVerdict.from_trust(self.draw, trust)
        return {"verdicts": [verdict.__dict__], "steps": sum(o.step for o in outcomes)}


@dataclass(frozen=True)
class NullCheapPart(Part):
    """The pipeline on some draws of the null market, with policies that need no training."""

    KEY = "null-cheap-{0.draws[0]:03d}"

    config: Config
    market: NullMarket
    draws: tuple[int, ...]

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        verdicts: list[DrawVerdict] = []
        for kind in CHEAP:
            config = self.config if kind == "forecast" else _few_features(self.config)
            rota = self.market.rota
            draws = [k for k in self.draws if rota[k % len(rota)] == kind]
            worlds = [null_world(self.market, k, "null", config) for k in draws]
            if should_stop():
                return None
            if kind == "rules" and draws:
                verdicts += _judge_best(kind, rules_of_thumb(RULE_BARS), draws, worlds, config)
            elif kind != "rules":
                for draw, world in zip(draws, worlds, strict=True):
                    own = config.model_copy(update={"seed": draw})
                    verdicts += _judge_best(kind, _policies(kind, own, world), [draw], [world], own)
        return {"verdicts": [v.__dict__ for v in sorted(verdicts, key=lambda v: v.draw)]}


@dataclass(frozen=True)
class PowerPart(Part):
    """Claims on the trend market, by the agents of other parts: their keys and identities."""

    KEY = "null-power"

    config: Config
    market: PlantedSignal
    sources: tuple[str, ...]
    identities: tuple[str, ...]
    n_draws: int
    n_bars: int

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        kept = [
            read_arrays(
                place / RETURNS,
                ("valid", "claims"),
                f"Delete {place} and run the same command: that agent is trained and tested again, "
                "the others are kept.",
            )
            for place in (directory.parent / source for source in self.sources)
        ]
        each = [deflate(k["valid"], k["valid"][:, None]).probability for k in kept]
        # Not `min`, which passes over a seed without a number, depending on its place.
        deflated = float(np.min(each))
        config = _few_features(self.config)
        draws = claim_draws(self.market, self.config, self.n_draws, self.n_bars)
        worlds = [last_bars(world, self.n_bars) for world in planted_worlds(draws, config)]
        baseline = trade_draws(EqualWeight(config), worlds, config).returns
        verdicts = []
        for d in range(self.n_draws):
            if should_stop():
                return None
            agents = np.column_stack([k["claims"][:, d] for k in kept])
            verdicts.append(
                DrawVerdict.from_returns(d, "agent", agents, baseline[:, d], deflated, trials=1)
            )
        return {"verdicts": [v.__dict__ for v in verdicts]}


class NoiseScores(RowScores):
    """Scores that mean nothing, but last as a forecaster's do."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of: tuple[int, int] | None = None

    def at(self, world: World, row: int) -> Floats:
        shape = (len(world.times), world.n_assets)
        if shape != self._of:
            rng = stream(self._seed, "noise scores")
            first, shocks = rng.standard_normal(shape[1]), rng.standard_normal(shape)
            self._scores, self._of = autoregressive(first, shocks, _PERSISTENCE), shape
        return np.asarray(self._scores[row])


def _policies(kind: str, config: Config, world: World) -> list[Policy]:
    """What is tried on a draw."""
    if kind == "noise":
        scores = NoiseScores(config.seed)
        rules = [
            TopKRule(max(1, round(share * world.n_assets)), buffer, tranches=5, horizon=5)
            for share, buffer in NOISE_RULES
        ]
        return [TopKPolicy(scores, rule, kind) for rule in rules]
    fitted = fit_forecaster(config, world) if kind == "forecast" else None
    return [make_baseline(kind, config, fitted)]


def _judge_best(
    name: str,
    policies: Sequence[Policy],
    draws: Sequence[int],
    worlds: Sequence[World],
    config: Config,
) -> list[DrawVerdict]:
    """Of each draw, judge the policy that was best on validation: as many trials as policies."""
    tried: dict[str, Floats] = {}  # [K,T,D] each
    for split in ("valid", "test"):
        at_split = [with_test_window(world, world.splits[split]) for world in worlds]
        arena = Arena.from_draws(at_split)
        tried[split] = np.stack([trade_draws(p, arena, config).returns for p in policies])
    theirs = trade_draws(EqualWeight(config), arena, config).returns  # on the test window
    verdicts = []
    for d, draw in enumerate(draws):
        trials = tried["valid"][:, :, d].T
        best = int(np.argmax(trials.mean(axis=0) / trials.std(axis=0, ddof=1)))
        deflated = deflate(trials[:, best], trials).probability
        agent = tried["test"][best, :, d][:, None]
        verdicts.append(
            DrawVerdict.from_returns(draw, name, agent, theirs[:, d], deflated, len(policies))
        )
    return verdicts


def _few_features(config: Config) -> Config:
    """The configuration with a single feature: policies that look at prices need none."""
    single = StationaryConfig(
        enabled=True, returns=(60,), volatility=(), volume_ratio=(), ranks=False
    )
    return config.model_copy(update={"features": FeaturesConfig(stationary=single)})
