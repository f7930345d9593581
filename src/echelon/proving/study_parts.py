"""Parts of the study: its variants, its draws, and one training of one variant.

What a variant changes of the configuration is told as overrides, so that anyone can repeat it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from echelon.agents.jobs import Report, ShouldStop
from echelon.config import Config, override_config
from echelon.config.algorithms import ALGORITHMS
from echelon.config.hierarchy import ExpertsConfig, MetaRouterConfig
from echelon.errors import ConfigError
from echelon.population.artefacts import PopulationHistory
from echelon.proving.costly import at_fee
from echelon.proving.hierarchies import Draws, RegimeFlatPart, RegimeHierarchyPart, flat_sac
from echelon.proving.parts import Finding, Part
from echelon.proving.regime import RegimeMarket
from echelon.proving.regime_references import run_references
from echelon.proving.regimes import FEE_BPS, by_pair
from echelon.proving.trial import proof_config
from echelon.runs.metrics import read_metrics

_MAPD = "population/mapd"
HELD = 0.25
"""MAPD that the experts of M3 are to keep through training."""
EVOLVES_EVERY = 5
"""Most rounds from one evolution to the next in variants with MF-PBT."""


@dataclass(frozen=True)
class StudyDraws(Draws):
    """Draws of the study's own."""

    names: ClassVar[tuple[str, str, str]] = ("study trains", "study valids", "study test")


@dataclass(frozen=True)
class Sizes:
    """The market, and how many draws of it."""

    market: RegimeMarket
    draws: StudyDraws


SIZES = Sizes(RegimeMarket(), StudyDraws())


class Variant(NamedTuple):
    """What is switched on."""

    name: str
    title: str
    bonuses: bool = False
    evolution: bool = False
    responsibility: bool = False


ONE = Variant("m1", "M1: one expert")
_HIERARCHIES = (
    Variant("m2", "M2: population and router"),
    Variant("m3", "M3: + KL and MI", bonuses=True),
    Variant("m3-mfpbt", "M3 + MF-PBT", bonuses=True, evolution=True),
)
WEIGHTED = tuple(one._replace(responsibility=True) for one in _HIERARCHIES)
UNWEIGHTED = tuple(
    one._replace(name=f"{one.name}-unweighted", title=f"{one.title}, unweighted")
    for one in _HIERARCHIES
)
VARIANTS = (ONE, *WEIGHTED, *UNWEIGHTED)


def changes_of(variant: Variant, config: Config) -> tuple[str, ...]:
    """Overrides that make the configuration the variant's.

    A configuration without bonuses gets the design's where the variant has them.
    """
    if variant == ONE:
        return flat_sac(config)
    told = [
        f"experts.responsibility={str(variant.responsibility).lower()}",
        f"trainer.evolution.enabled={str(variant.evolution).lower()}",
    ]
    if variant.evolution and config.trainer.training_schedule.population.freq > EVOLVES_EVERY:
        # The seeds' schedule, every 20 rounds, would let a study of 40 evolve twice, and the first
        # time when its best checkpoint is often behind it.
        told.append(f"trainer.training_schedule.population.freq={EVOLVES_EVERY}")
    if not variant.bonuses:
        none = ("experts.mi_reward_weight=0", "meta_router.kl_lambda=0")
        return (*told, *none, "meta_router.kl_lambda_max=0")
    if not config.experts.mi_reward_weight:
        told.append(f"experts.mi_reward_weight={ExpertsConfig().mi_reward_weight:g}")
    if not (config.meta_router.kl_lambda and config.meta_router.kl_lambda_max):
        usual = MetaRouterConfig()
        told += [f"meta_router.kl_lambda={usual.kl_lambda:g}"]
        told += [f"meta_router.kl_lambda_max={usual.kl_lambda_max:g}"]
    return tuple(told)


@dataclass(frozen=True)
class ReferencePart:
    """The references on the study's test pairs: the regime filter among them."""

    config: Config
    market: RegimeMarket
    draws: Draws

    @property
    def key(self) -> str:
        """Where it is kept."""
        return "references"

    @property
    def steps(self) -> int:
        """None: nothing is trained."""
        return 0

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Let the references trade."""
        pairs = self.market.pairs(self.draws.test, self.draws.names[2])
        found = run_references(self.market, pairs, at_fee(self.config, FEE_BPS))
        return {"sharpes": {name: by_pair(returns) for name, returns in found.items()}}


@dataclass(frozen=True)
class StudyPart:
    """One variant with one seed; config: already the variant's."""

    config: Config
    market: RegimeMarket
    draws: Draws
    seed: int
    variant: str

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"{self.variant}-{self.seed}"

    @property
    def steps(self) -> int:
        """Of one training."""
        return self.config.train.total_env_steps

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """As the proof does it, and what the population left behind."""
        given = (self.config, self.market, self.draws, self.seed)
        if self.variant == ONE.name:
            return RegimeFlatPart(*given, "sac", shown=False).run(directory, report, should_stop)
        found = RegimeHierarchyPart(*given).run(directory, report, should_stop)
        if found is None:
            return None
        return {**found, "population": population_facts(directory / "seeds" / str(self.seed))}


def population_facts(directory: Path) -> dict[str, Any]:
    """How different the experts of a training were; None where no check came.

    mapd: of each check of the population, by step; mapd_lowest: of these and of the training log
    (means of its intervals), from where it first reached `HELD`; where it never did, the highest
    begun_anew: how many experts
    """
    history = PopulationHistory.find(directory)
    checks = [] if history is None else [r for r in history.rounds if math.isfinite(r.mapd)]
    if history is None or not checks:
        nothing = ("mapd_end", "mapd_lowest", "volume", "usage_entropy", "begun_anew")
        return {"mapd": [], **dict.fromkeys(nothing)}
    log = read_metrics(directory)
    every = {one.step: one.mapd for one in checks}
    for step, value in zip(log["step"].to_list(), log[_MAPD].to_list(), strict=True):
        if value is not None:
            every.setdefault(step, value)
    seen = [every[step] for step in sorted(every)]
    reached = next((k for k, value in enumerate(seen) if value >= HELD), None)
    last = checks[-1]
    return {
        "mapd": [[one.step, one.mapd] for one in checks],
        "mapd_end": last.mapd,
        "mapd_lowest": max(seen) if reached is None else min(seen[reached:]),
        "volume": known(last.volume),
        "usage_entropy": known(last.usage_entropy / math.log(len(history.experts))),
        "begun_anew": sum(life.kind == "reseed" for life in history.lineage),
    }


def plan_study(config: Config, seeds: int, sizes: Sizes) -> list[Part]:
    """All parts; the seeds of every variant side by side, so that early ones can be compared."""
    if ALGORITHMS[config.train.algo].family != "hierarchy":
        raise ConfigError(
            f"train.algo = {config.train.algo}: the study is of a hierarchy. Name a configuration "
            "with train.algo: HIERARCHY."
        )
    # Parts run side by side already; results do not depend on a hierarchy's own processes.
    base = override_config(proof_config(config), ["trainer.workers=1"])
    parts: list[Part] = [ReferencePart(base, sizes.market, sizes.draws)]
    for seed in range(config.seed, config.seed + seeds):
        parts += [
            StudyPart(
                override_config(base, changes_of(variant, base)),
                sizes.market,
                sizes.draws,
                seed,
                variant.name,
            )
            for variant in VARIANTS
        ]
    return parts


def known(value: float) -> float | None:
    """The value; None where it is not finite, as JSON has it."""
    return float(value) if math.isfinite(value) else None
