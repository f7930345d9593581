"""The hierarchy on the regime market: does the router find what is hidden from the experts?

One seed: experts learn on some mirrored pairs, the router on others, two shorter pairs choose the
checkpoint, and the unseen test pairs are traded by

    hierarchy        router and experts as they were trained
    hedge            the fixed-share hedge over the same experts
    oracle           the better expert of each regime, knowing the regime at every bar
    expert 0, …      each expert by itself

and, trained for as many environment steps on the same draws, by flat agents: SAC as the experts
are, and A2C, each with and without what a router sees. None sees returns or what it holds (see
`regime`). Held to a bar are the share of the regime filter's Sharpe ratio, and the advantage over
the best single expert and over the flat agents that see the signal alone, over seeds.

Axes: `T` rows of the joined draws, `K` experts, `D` draws, `P` pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from echelon.agents.jobs import Report, ShouldStop
from echelon.backtest.policy import Policy
from echelon.config import Config, override_config
from echelon.config.agents import StateConfig
from echelon.config.algorithms import FLAT_SETTINGS
from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.market import Rows
from echelon.ops.information import mutual_information
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HEDGE
from echelon.proving.certificate import Bar, Check, MarketResult, over_seeds
from echelon.proving.costly import at_fee
from echelon.proving.parts import Done, Finding
from echelon.proving.regime import RegimeDraw, RegimeMarket, regime_worlds
from echelon.proving.regime_references import router_view
from echelon.proving.regimes import FEE_BPS, by_pair
from echelon.proving.trial import Arena, trade, train_agent
from echelon.proving.worlds import joined
from echelon.training.learners import Worlds
from echelon.types import Floats

SHARE_BAR = Bar("estimate", "at least", 0.8)
ADVANTAGE_BAR = Bar("low", "above", 1.0)
_SHOWN_BARS = 2_000
"""Bars of the first test draw of which the certificate shows who was in charge."""

Flat = Literal["sac", "a2c"]
FLAT: tuple[Flat, ...] = ("sac", "a2c")


@dataclass(frozen=True)
class Draws:
    """How many mirrored pairs a seed has: to learn from, to choose its checkpoint, to be tested.

    names: of the three kinds; others have other draws. Not a field, but the class's: the proof's
    stay what they were, and whoever needs draws of its own has a class of its own.
    """

    names: ClassVar[tuple[str, str, str]] = ("trains", "valids", "test")

    train: int = 6
    valid: int = 2
    test: int = 4
    valid_bars: int = 3_000


class Setting:
    """Draws of one seed, and the worlds of them."""

    def __init__(self, config: Config, market: RegimeMarket, draws: Draws, seed: int) -> None:
        blind = StateConfig(include_pos=False, include_cash=False)
        self.config = at_fee(config, FEE_BPS).model_copy(update={"state": blind})
        shorter = replace(market, n_bars=draws.valid_bars)
        train, valid, test = draws.names
        self.train = market.pairs(draws.train, train, 1_000 * seed)
        self.valid = shorter.pairs(draws.valid, valid, 1_000 * seed)
        self.test = market.pairs(draws.test, test)

    def worlds(self, name: str, *, shown: bool = False) -> tuple[Worlds, list[World]]:
        """(where to learn and validate, the test draws); shown: with what a router sees."""

        def made(draws: Sequence[RegimeDraw]) -> list[World]:
            view = router_view(draws, self.config) if shown else None
            return regime_worlds(draws, self.config, shown=view)

        train, valid = joined(made(self.train))[0], joined(made(self.valid))[0]
        return Worlds(train, valid, name), made(self.test)


@dataclass(frozen=True)
class RegimeHierarchyPart:
    """One hierarchy and everybody in it."""

    config: Config
    market: RegimeMarket
    draws: Draws
    seed: int

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"regime-hierarchy-{self.seed}"

    @property
    def steps(self) -> int:
        """Of one training."""
        return self.config.train.total_env_steps

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Train experts and router, and let them trade the test pairs."""
        setting = Setting(self.config, self.market, self.draws, self.seed)
        config = setting.config
        worlds, tests = setting.worlds(self.key)
        place = directory / "seeds" / str(self.seed)
        trained = train_agent(config, worlds, place, self.seed, report, should_stop)
        if trained is None:
            return None
        policy = trained.policy
        assert isinstance(policy, HierarchyPolicy), "train.algo is HIERARCHY"
        watched, arena = _Watched(policy), Arena.of(tests)  # embeddings are worked out once
        returns = {"hierarchy": trade(watched, arena, config).returns}
        chosen = watched.chosen()
        experts = policy.experts
        returns["hedge"] = trade(policy.companions()[HEDGE], arena, config).returns
        singles = [trade(expert, arena, config).returns for expert in experts]
        returns |= {f"expert {k}": found for k, found in enumerate(singles)}
        regime = np.stack([draw.regime for draw in setting.test], axis=1)
        bars = len(chosen)
        decided = regime[-bars - 1 : -1]
        oracle = _Oracle(experts, regime, np.stack(singles), decided)
        returns["oracle"] = trade(oracle, arena, config).returns
        return {
            "seed": self.seed,
            "steps": trained.outcome.step,
            "best_step": trained.outcome.best_step,
            "sharpes": {name: by_pair(found) for name, found in returns.items()},
            "information": mutual_information(chosen.ravel(), (decided.ravel() > 0).astype(int)),
            "usage": (
                np.bincount(chosen.ravel(), minlength=len(experts) + 1) / chosen.size
            ).tolist(),
            "shown": {
                "regime": decided[:_SHOWN_BARS, 0].astype(int).tolist(),
                "in_charge": chosen[:_SHOWN_BARS, 0].tolist(),
            },
        }


@dataclass(frozen=True)
class RegimeFlatPart:
    """One flat agent, on the same draws for as many steps; shown: it sees what a router sees."""

    config: Config
    market: RegimeMarket
    draws: Draws
    seed: int
    algo: Flat
    shown: bool

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"regime-{self.algo}-{'shown' if self.shown else 'flat'}-{self.seed}"

    @property
    def steps(self) -> int:
        """Of one training."""
        return self.config.train.total_env_steps

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Train it and let it trade the test pairs."""
        setting = Setting(self.config, self.market, self.draws, self.seed)
        worlds, tests = setting.worlds(self.key, shown=self.shown)
        place = directory / "seeds" / str(self.seed)
        trained = train_agent(setting.config, worlds, place, self.seed, report, should_stop)
        if trained is None:
            return None
        found = trade(trained.policy, tests, setting.config).returns
        return {"seed": self.seed, "steps": trained.outcome.step, "sharpes": by_pair(found)}


def flat_config(config: Config, algo: Flat) -> Config:
    """The flat agent beside a hierarchy's configuration."""
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
    others = [part for part in parts if part.key != "regime-references"]
    return replace(
        result,
        checks=(*result.checks, *checks),
        rows={**result.rows, **rows},
        seconds=result.seconds + sum(part.seconds for part in others),
        cpu_seconds=result.cpu_seconds + sum(part.cpu_seconds for part in others),
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
            found = {
                done.finding["seed"]: float(np.mean(done.finding["sharpes"]))
                for done in parts
                if done.key.startswith(f"regime-{algo}-{kind}")
            }
            if sorted(found) == seeds:
                rows[f"{kind} {algo}"] = [found[s] for s in seeds]
    ours = np.array(rows["hierarchy"])
    share_bars, gap_bars = ((SHARE_BAR,), (ADVANTAGE_BAR,)) if len(seeds) > 1 else ((), ())
    checks = [over_seeds("regime_share", "share", (ours / filtered).tolist(), *share_bars)]
    for name in ("best single expert", "flat sac", "flat a2c"):
        if name in rows:
            gap = (ours - np.array(rows[name])).tolist()
            checks.append(over_seeds(f"regime_over_{name}", "sharpe", gap, *gap_bars))
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

    def chosen(self) -> NDArray[np.int64]:
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
            sign: int(np.argmax([one[decided == sign].mean() for one in returns]))
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
