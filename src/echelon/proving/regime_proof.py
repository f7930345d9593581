"""Regime: can what is hidden from an agent be found in returns, and does the router find it?

1. The references trade draws and their mirrors (see `regime`). A pair's Sharpe ratio is the mean of
   both. Who chooses between the experts by what they earned must beat every rule that does not, in
   the sense of the interval over pairs.
2. Flat agents, in the full mode: one that sees x alone, which can earn nothing over a pair, and one
   that is also shown what a router sees. Neither is held to a bar: they say that the advantage is
   information. Neither sees its holdings, which drift with returns and would give the regime away.
   Agents by target weights, which would learn one path by heart, have several mirrored pairs to
   learn from, and one that chooses their checkpoint.
3. Of a hierarchy, one seed: experts learn on some mirrored pairs, the router on others, two shorter
   pairs choose the checkpoint, and the unseen test pairs are traded by

    hierarchy        router and experts as they were trained
    hedge            the fixed-share hedge over the same experts
    oracle           the better expert of each regime, knowing the regime at every bar
    expert 0, …      each expert by itself

   and, trained for as many environment steps on the same draws, by flat agents: SAC as the experts
   are, and A2C, each with and without what a router sees. None sees returns or what it holds. Held
   to a bar are the share of the regime filter's Sharpe ratio, and the advantage over the best
   single expert and over the flat agents that see the signal alone, over seeds.

Axes: `T` rows of the joined draws, `K` experts, `D` draws, `P` pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

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
from echelon.proving.regime import (
    RegimeDraw,
    RegimeMarket,
    regime_worlds,
    router_view,
    run_references,
)
from echelon.proving.trial import YEAR, Arena, SeedWorlds, TrainingPart, at_fee, trade_draws
from echelon.types import Floats
from echelon.workers import Report, ShouldStop

FEE_BPS = 5.0
BLIND = ("equal weight", "follow", "oppose")
"""References that do not look at what was earned."""
CHOOSING = ("trailing 40", "fixed-share hedge", "regime filter")
"""References that do."""
CHOOSING_BAR = Bar("low", "above", 0.0)
EXPERT_PAIRS = (4, 1)
"""Mirrored pairs that an agent by target weights trains on, and on which its checkpoint is chosen.
"""
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
        """Let the references trade."""
        draws = self.market.pairs(self.n_pairs, self.name)
        returns = run_references(self.market, draws, at_fee(self.config, FEE_BPS))
        return {"sharpes": {name: by_pair(traded) for name, traded in returns.items()}}


@dataclass(frozen=True)
class PairCounts:
    """How many mirrored pairs a seed has: to learn from, to choose its checkpoint, to be tested.

    names: of the three kinds; others have other draws. Not a field, but the class's: the proof's
    stay what they were, and whoever needs draws of its own has a class of its own.
    """

    names: ClassVar[tuple[str, str, str]] = ("trains", "valids", "test")

    train: int = 6
    valid: int = 2
    test: int = 4
    valid_bars: int = 3_000


class RegimeSetting:
    """Draws of one seed, and the worlds of them. Agents see neither holdings nor cash."""

    def __init__(
        self,
        config: Config,
        train: Sequence[RegimeDraw],
        valid: Sequence[RegimeDraw],
        test: Sequence[RegimeDraw],
    ) -> None:
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

        def make(draws: Sequence[RegimeDraw]) -> list[World]:
            view = router_view(draws, self.config) if shown else None
            return regime_worlds(draws, self.config, shown=view)

        return SeedWorlds(make(self.train), make(self.valid), make(self.test))


class FlatPart(TrainingPart):
    """One flat agent. shown: it sees what a router sees"""

    shown: bool

    def setting(self) -> RegimeSetting:
        """Its draws."""
        raise NotImplementedError

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Train on draws of its own, choose on others, trade the test pairs."""
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

    config: Config
    market: RegimeMarket
    n_pairs: int
    seed: int
    shown: bool

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"regime-{'shown' if self.shown else 'flat'}-{self.seed}"

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

    config: Config
    market: RegimeMarket
    draws: PairCounts
    seed: int
    algo: FlatAlgo
    shown: bool

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"regime-{self.algo}-{'shown' if self.shown else 'flat'}-{self.seed}"

    def setting(self) -> RegimeSetting:
        """As the hierarchy has them."""
        return RegimeSetting.from_counts(self.config, self.market, self.draws, self.seed)


@dataclass(frozen=True)
class RegimeHierarchyPart(TrainingPart):
    """One hierarchy and everybody in it."""

    config: Config
    market: RegimeMarket
    draws: PairCounts
    seed: int

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"regime-hierarchy-{self.seed}"

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Train experts and router, and let them trade the test pairs."""
        setting = RegimeSetting.from_counts(self.config, self.market, self.draws, self.seed)
        config, worlds = setting.config, setting.worlds()
        trained = self.train(config, worlds, directory, report, should_stop)
        if trained is None:
            return None
        policy = trained.policy
        assert isinstance(policy, HierarchyPolicy), "train.algo is HIERARCHY"
        watched, arena = (
            _Watched(policy),
            Arena.from_draws(worlds.test),
        )  # embeddings are worked out once
        returns = {"hierarchy": trade_draws(watched, arena, config).returns}
        chosen = watched.choices()
        experts = policy.experts
        returns["hedge"] = trade_draws(policy.companions()[HEDGE], arena, config).returns
        singles = [trade_draws(expert, arena, config).returns for expert in experts]
        returns |= {f"expert {k}": earned for k, earned in enumerate(singles)}
        regime = np.stack([draw.regime for draw in setting.test], axis=1)
        bars = len(chosen)
        decided = regime[-bars - 1 : -1]
        oracle = _Oracle(experts, regime, np.stack(singles), decided)
        returns["oracle"] = trade_draws(oracle, arena, config).returns
        return {
            "seed": self.seed,
            "steps": trained.outcome.step,
            "best_step": trained.outcome.best_step,
            "sharpes": {name: by_pair(earned) for name, earned in returns.items()},
            "information": mutual_information(chosen.ravel(), (decided.ravel() > 0).astype(int)),
            "usage": (
                np.bincount(chosen.ravel(), minlength=len(experts) + 1) / chosen.size
            ).tolist(),
            "shown": {
                "regime": decided[:_SHOWN_BARS, 0].astype(int).tolist(),
                "in_charge": chosen[:_SHOWN_BARS, 0].tolist(),
            },
        }


def by_pair(returns: Floats) -> list[float]:
    """[P] mean annual Sharpe ratio of each draw and its mirror; returns[S,2·P] in turn."""
    sharpes = np.array([sharpe_annual(series, YEAR) for series in returns.T])
    return [float(s) for s in sharpes.reshape(-1, 2).mean(axis=1)]


def assess_regime(references: Done, agents: Sequence[Done]) -> MarketResult:
    """Each of those that choose, less the best in each pair of those that do not."""
    sharpes: Mapping[str, list[float]] = references.finding["sharpes"]
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
    parts = [references, *agents]
    return MarketResult(
        name="regime",
        checks=tuple(checks),
        **time_spent(parts),
        facts={
            "pairs": len(best),
            "seeds": sorted({p.finding["seed"] for p in agents}),
            "steps": max((p.finding["steps"] for p in agents), default=0),
            "fee_bps": FEE_BPS,
        },
        rows=rows,
        notes=("regime_information", "regime_agents" if agents else "regime_references_only"),
    )


def flat_config(config: Config, algo: FlatAlgo) -> Config:
    """The flat agent next to a hierarchy's configuration."""
    if algo == "sac":
        return override_config(config, flat_sac(config))
    steps = f"train.total_env_steps={config.train.total_env_steps}"
    return override_config(config, [*FLAT_SETTINGS, "train.algo=A2C", steps])


def flat_sac(config: Config) -> tuple[str, ...]:
    """Overrides that make a hierarchy's configuration flat SAC's.

    It makes as many updates as the experts together, in as many environment steps.
    """
    schedule, n_experts = config.trainer.training_schedule, config.experts.n_experts
    learned = n_experts * schedule.experts.steps / schedule.experts.freq
    routed = schedule.router.steps * config.meta_router.every_bars / schedule.router.freq
    share = learned / (n_experts * config.trainer.round_steps + routed)
    per_step = config.expert.updates_per_step * share
    return ("train.algo=SAC", f"expert.updates_per_step={per_step:g}")


def with_hierarchy(result: MarketResult, parts: Sequence[Done]) -> MarketResult:
    """The regime market's result with the hierarchies that are among its parts, if any are."""
    own = [part for part in parts if part.key.startswith("regime-hierarchy")]
    if not own:
        return result
    n_pairs = len(own[0].finding["sharpes"]["hierarchy"])
    filtered = float(np.mean(result.rows["regime filter"][:n_pairs]))
    checks, rows = assess_hierarchy(filtered, parts)
    facts = {
        "hierarchy_seeds": sorted(part.finding["seed"] for part in own),
        "hierarchy_steps": max(part.finding["steps"] for part in own),
        "hierarchy_pairs": n_pairs,
        "information": {str(p.finding["seed"]): p.finding["information"] for p in own},
        "shown": {
            **own[0].finding["shown"],
            "seed": own[0].finding["seed"],
            "experts": sum(name.startswith("expert ") for name in own[0].finding["sharpes"]),
        },
    }
    spent = time_spent(part for part in parts if part.key != "regime-references")
    return replace(
        result,
        checks=(*result.checks, *checks),
        rows={**result.rows, **rows},
        seconds=result.seconds + spent["seconds"],
        cpu_seconds=result.cpu_seconds + spent["cpu_seconds"],
        facts={**result.facts, **facts},
        notes=("regime_information", "regime_hierarchy", *_left_out(rows, len(own))),
    )


def _left_out(rows: Mapping[str, Sequence[float]], n_seeds: int) -> Iterator[str]:
    """Notes on what a quick proof does without."""
    if n_seeds == 1:
        yield "regime_one_seed"
    if not any(name in rows for name in ("flat sac", "flat a2c")):
        yield "regime_no_flat"


def assess_hierarchy(
    filtered: float, parts: Sequence[Done]
) -> tuple[list[Check], Mapping[str, list[float]]]:
    """(checks, rows of Sharpe ratios by seed); filtered: the regime filter's, on the same pairs.

    One seed has no interval, and is held to no bar.
    """
    own = {
        done.finding["seed"]: {k: float(np.mean(v)) for k, v in done.finding["sharpes"].items()}
        for done in parts
        if done.key.startswith("regime-hierarchy")
    }
    seeds = sorted(own)
    rows = {name: [own[s][name] for s in seeds] for name in ("hierarchy", "hedge", "oracle")}
    singles = [k for k in own[seeds[0]] if k.startswith("expert")]
    rows["best single expert"] = [max(own[s][k] for k in singles) for s in seeds]
    for algo in FLAT:
        for kind in ("flat", "shown"):
            sharpes = {
                done.finding["seed"]: float(np.mean(done.finding["sharpes"]))
                for done in parts
                if done.key.startswith(f"regime-{algo}-{kind}")
            }
            if sorted(sharpes) == seeds:
                rows[f"{kind} {algo}"] = [sharpes[s] for s in seeds]
    ours = np.array(rows["hierarchy"])
    share_bars, gap_bars = ((HIERARCHY_BAR,), (ADVANTAGE_BAR,)) if len(seeds) > 1 else ((), ())
    checks = [seed_check("regime_share", "share", (ours / filtered).tolist(), *share_bars)]
    for name in ("best single expert", "flat sac", "flat a2c"):
        if name in rows:
            gap = (ours - np.array(rows[name])).tolist()
            checks.append(seed_check(f"regime_over_{name}", "sharpe", gap, *gap_bars))
    return checks, rows


class _Watched:
    """A hierarchy, and who was in charge of which book when."""

    kind: ActionKind = "weights"

    def __init__(self, policy: HierarchyPolicy) -> None:
        self.name = policy.name
        self._policy = policy
        self._chosen: list[NDArray[np.int64]] = []

    def start(self, world: World, span: range) -> None:
        """Begin."""
        self._chosen = []
        self._policy.start(world, span)

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """As the hierarchy does."""
        decided = self._policy.decide(row, held)
        self._chosen.append(self._policy.in_charge)
        return decided

    def choices(self) -> NDArray[np.int64]:
        """[S,D] experts in charge."""
        return np.stack(self._chosen)


class _Oracle:
    """At every bar the expert whose own book earned most in the regime there is."""

    kind: ActionKind = "weights"
    name = "oracle"

    def __init__(
        self,
        experts: Sequence[Policy],
        regime: Floats,
        returns: Floats,
        decided: Floats,
    ) -> None:
        """regime[T,D]: of the test draws; returns[K,S,D], decided[S,D]: what earned them."""
        self._experts = experts
        self._regime = regime.T.ravel()  # the draws one after the other, as they are joined
        self._best = {
            sign: int(np.argmax([earned[decided == sign].mean() for earned in returns]))
            for sign in (-1.0, 1.0)
        }

    def start(self, world: World, span: range) -> None:
        """Make the experts ready."""
        for expert in self._experts:
            expert.start(world, span)

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """What the better expert of the regime says."""
        low, high = (self._experts[self._best[s]].decide(row, held) for s in (-1.0, 1.0))
        return np.where(self._regime[row, None] > 0, high, low)
