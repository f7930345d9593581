"""The study: which part of the hierarchy helps? M1 to M3 with MF-PBT, on the regime market.

    m1          one expert: flat SAC, for as many environment steps
    m2          population and router, without information bonuses
    m3          with them: KL for the router, mutual information for the experts
    m3-mfpbt    and hyperparameters that evolve

each hierarchy with and without responsibility weighting (`…-unweighted`), all with the same seeds,
draws of the study's own, and the same number of steps. What a variant changes of the configuration
is given as overrides, so that anyone can repeat it. Differences are paired by seed.

    DIR/study.json     everything, by seed
    DIR/study.md       the same as tables (see `study_markdown`)
    DIR/parts/…        findings and trainings (see `parts`)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from echelon.config import Config, override_config, to_yaml
from echelon.config.algorithms import ALGORITHMS
from echelon.config.hierarchy import ExpertsConfig, MetaRouterConfig
from echelon.errors import ConfigError
from echelon.evaluation.statistics import seed_interval
from echelon.files import finite_or_none, write_atomic, write_json
from echelon.population.record import PopulationHistory
from echelon.proving.certificate import round_tree
from echelon.proving.parts import Done, Finding, Part, clear_proof, proof_facts, run_all
from echelon.proving.regime import (
    PairCounts,
    ReferencesPart,
    RegimeFlatPart,
    RegimeHierarchyPart,
    RegimeMarket,
    flat_sac,
)
from echelon.proving.worlds import TrainingPart, proof_config
from echelon.runs.metrics import read_metrics
from echelon.workers import Report, ShouldStop

_FORMAT = 1
_RESULT, _TABLE = "study.json", "study.md"
HELD = 0.25
"""MAPD that the experts of M3 are to keep through training."""
EVOLVES_EVERY = 5
"""Most rounds from one evolution to the next in variants with MF-PBT."""
STUDY_COLUMNS = ("sharpe", "share", "best expert", "hedge", "oracle", "information")
_DIVERSITY = (
    *("mapd end", "mapd lowest", "held", "restarted", "volume"),
    *("usage entropy, training", "usage entropy, test", "cash, test"),
)
_HEADS = {
    "sharpe": "Sharpe ratio",
    "share": "of the filter's",
    "information": "choice tells of the regime, bits",
    "mapd end": "MAPD, last check",
    "mapd lowest": "lowest",
    "held": f"≥ {HELD:g} held, seeds",
    "volume": "DvD volume",
}
_SHARES = ("share", "usage entropy, training", "usage entropy, test", "cash, test")
_WHOLE = ("sharpe", "share")
"""Measures shown with their interval."""


@dataclass(frozen=True)
class StudyPairs(PairCounts):
    """Draws of the study's own."""

    names: ClassVar[tuple[str, str, str]] = ("study trains", "study valids", "study test")


MARKET, DRAWS = RegimeMarket(), StudyPairs()


class StudyVariant(NamedTuple):
    name: str
    title: str
    bonuses: bool = False
    evolution: bool = False
    responsibility: bool = False


ONE = StudyVariant("m1", "M1: one expert")
_HIERARCHIES = (
    StudyVariant("m2", "M2: population and router"),
    StudyVariant("m3", "M3: + KL and MI", bonuses=True),
    StudyVariant("m3-mfpbt", "M3 + MF-PBT", bonuses=True, evolution=True),
)
WEIGHTED = tuple(variant._replace(responsibility=True) for variant in _HIERARCHIES)
UNWEIGHTED = tuple(
    variant._replace(name=f"{variant.name}-unweighted", title=f"{variant.title}, unweighted")
    for variant in _HIERARCHIES
)
VARIANTS = (ONE, *WEIGHTED, *UNWEIGHTED)


def changes_of(variant: StudyVariant, config: Config) -> tuple[str, ...]:
    """Overrides that make the configuration the variant's; without bonuses it gets the design's."""
    if variant == ONE:
        return flat_sac(config)
    changes = [
        f"experts.responsibility={str(variant.responsibility).lower()}",
        f"trainer.evolution.enabled={str(variant.evolution).lower()}",
    ]
    if variant.evolution and config.trainer.training_schedule.population.freq > EVOLVES_EVERY:
        # The schedule of design note 001, every 20 rounds, would let a study of 40 evolve twice,
        # and the first time when its best checkpoint is often behind it.
        changes.append(f"trainer.training_schedule.population.freq={EVOLVES_EVERY}")
    if not variant.bonuses:
        none = ("experts.mi_reward_weight=0", "meta_router.kl_lambda=0")
        return (*changes, *none, "meta_router.kl_lambda_max=0")
    if not config.experts.mi_reward_weight:
        changes.append(f"experts.mi_reward_weight={ExpertsConfig().mi_reward_weight:g}")
    if not (config.meta_router.kl_lambda and config.meta_router.kl_lambda_max):
        usual = MetaRouterConfig()
        changes += [f"meta_router.kl_lambda={usual.kl_lambda:g}"]
        changes += [f"meta_router.kl_lambda_max={usual.kl_lambda_max:g}"]
    return tuple(changes)


@dataclass(frozen=True)
class StudyPart(TrainingPart):
    """One variant with one seed; config: already the variant's."""

    KEY = "{0.variant}-{0.seed}"

    config: Config
    market: RegimeMarket
    draws: PairCounts
    seed: int
    variant: str

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """As the proof does it, and what the population left behind."""
        given = (self.config, self.market, self.draws, self.seed)
        if self.variant == ONE.name:
            return RegimeFlatPart(*given, "sac", shown=False).run(directory, report, should_stop)
        finding = RegimeHierarchyPart(*given).run(directory, report, should_stop)
        if finding is None:
            return None
        return {**finding, "population": population_facts(directory / "seeds" / str(self.seed))}


def population_facts(directory: Path) -> dict[str, Any]:
    """How different the experts of a training were; None where no check came.

    mapd: of each check of the population, by step; mapd_lowest: of these and of the training log,
    from where it first reached `HELD`; where it never did, the highest
    """
    history = PopulationHistory.find(directory)
    checks = [] if history is None else [r for r in history.rounds if math.isfinite(r.mapd)]
    if history is None or not checks:
        nothing = ("mapd_end", "mapd_lowest", "volume", "usage_entropy", "begun_anew")
        return {"mapd": [], **dict.fromkeys(nothing)}
    log = read_metrics(directory)
    every = {check.step: check.mapd for check in checks}
    for step, value in zip(log["step"].to_list(), log["population/mapd"].to_list(), strict=True):
        if value is not None:
            every.setdefault(step, value)
    seen = [every[step] for step in sorted(every)]
    reached = next((k for k, value in enumerate(seen) if value >= HELD), None)
    last = checks[-1]
    return {
        "mapd": [[check.step, check.mapd] for check in checks],
        "mapd_end": last.mapd,
        "mapd_lowest": max(seen) if reached is None else min(seen[reached:]),
        "volume": finite_or_none(last.volume),
        "usage_entropy": finite_or_none(last.usage_entropy / math.log(len(history.experts))),
        "begun_anew": sum(life.kind == "reseed" for life in history.lineage),
    }


def plan_study(config: Config, seeds: int) -> list[Part]:
    """All parts; the seeds of every variant side by side, so that early ones can be compared."""
    if ALGORITHMS[config.train.algo].family != "hierarchy":
        raise ConfigError(
            f"train.algo = {config.train.algo}: the study is of a hierarchy. Name a configuration "
            "with train.algo: HIERARCHY."
        )
    # Parts run side by side already; results do not depend on a hierarchy's own processes.
    base = override_config(proof_config(config), ["trainer.workers=1"])
    parts: list[Part] = [ReferencesPart(base, MARKET, DRAWS.test, DRAWS.names[2], "references")]
    for seed, variant in product(range(config.seed, config.seed + seeds), VARIANTS):
        own = override_config(base, changes_of(variant, base))
        parts.append(StudyPart(own, MARKET, DRAWS, seed, variant.name))
    return parts


@dataclass(frozen=True)
class StudyRow:
    """One variant; values: measure → one for each seed, None where it is not known."""

    variant: str
    title: str
    changes: tuple[str, ...]
    steps: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]

    def known_values(self, measure: str) -> list[float]:
        return [v for v in self.values.get(measure, ()) if v is not None]

    @property
    def held(self) -> int:
        return sum(value >= HELD for value in self.known_values("mapd lowest"))


@dataclass(frozen=True)
class StudyDifference:
    """Sharpe ratio of one thing minus another's, by seed; verdict: of the 95 % interval."""

    name: str
    of: str
    values: tuple[float, ...]
    estimate: float
    low: float | None
    high: float | None
    verdict: str

    @property
    def shown(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.estimate:+.2f}"
        return f"{self.estimate:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


@dataclass(frozen=True)
class StudyResult:
    """What was found. references: Sharpe ratios on the same pairs; notes: what to know of it."""

    rows: tuple[StudyRow, ...]
    differences: tuple[StudyDifference, ...]
    references: Mapping[str, float]
    seeds: tuple[int, ...]
    pairs: int
    about: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def assess_study(
    done: Mapping[str, Done], seeds: Sequence[int], config: Config, made: Mapping[str, Any]
) -> StudyResult:
    pairs: Mapping[str, list[float]] = done["references"].finding["sharpes"]
    references = {name: float(np.mean(sharpes)) for name, sharpes in pairs.items()}
    rows = []
    for variant in VARIANTS:
        findings = [done[f"{variant.name}-{seed}"].finding for seed in seeds]
        by_seed = [_measures(finding, references["regime filter"]) for finding in findings]
        values = {name: tuple(values[name] for values in by_seed) for name in by_seed[0]}
        steps = tuple(int(finding["steps"]) for finding in findings)
        changes = changes_of(variant, config)
        rows.append(StudyRow(variant.name, variant.title, changes, steps, values))
    notes = [
        f"Experts that are alike (MAPD under {config.trainer.diversity_threshold:g}) restart in "
        "every hierarchy, with bonuses or without: a collapse shows in the lowest MAPD and in how "
        "many restarted.",
    ]
    for row in rows:
        if lowest := row.known_values("mapd lowest"):
            restarted = sum(row.known_values("restarted"))
            notes.append(
                f"{row.title}: MAPD of at least {HELD:g} reached and held in {row.held} of "
                f"{len(lowest)} seeds (lowest {min(lowest):.2f}); {restarted:g} experts restarted."
            )
    return StudyResult(
        tuple(rows),
        tuple(_differences({row.variant: row for row in rows})),
        references,
        tuple(seeds),
        len(pairs["regime filter"]),
        made,
        tuple(notes),
    )


def _measures(finding: Finding, filtered: float) -> dict[str, float | None]:
    sharpes = finding["sharpes"]
    if isinstance(sharpes, list):
        ours = float(np.mean(sharpes))
        return {"sharpe": ours, "share": ours / filtered}
    means = {name: float(np.mean(values)) for name, values in sharpes.items()}
    ours, population = means["hierarchy"], finding["population"]
    experts = np.array(finding["usage"][:-1])
    evenness = None  # entropy of the experts' shares[K], as a share of log K
    if experts.sum() > 0.0:
        share = experts[experts > 0.0] / experts.sum()
        evenness = max(0.0, float(-(share * np.log(share)).sum())) / math.log(len(experts))
    return {
        "sharpe": ours,
        "share": ours / filtered,
        "best expert": max(v for name, v in means.items() if name.startswith("expert ")),
        "hedge": means["hedge"],
        "oracle": means["oracle"],
        "information": finding["information"]["information"],
        "information of": finding["information"]["of"],
        "mapd end": population["mapd_end"],
        "mapd lowest": population["mapd_lowest"],
        "volume": population["volume"],
        "restarted": population["begun_anew"],
        "usage entropy, training": population["usage_entropy"],
        "usage entropy, test": evenness,
        "cash, test": finding["usage"][-1],
    }


def _differences(rows: Mapping[str, StudyRow]) -> list[StudyDifference]:
    """What each component adds: means over pairs (more, less) of differences, seed by seed."""
    m2, m3, evolved = (variant.name for variant in WEIGHTED)
    plain = {on.name: off.name for on, off in zip(WEIGHTED, UNWEIGHTED, strict=True)}
    asked: list[tuple[str, str, list[tuple[str, str]]]] = []
    for name, more, less in (("the bonuses", m3, m2), ("MF-PBT", evolved, m3)):
        pairs = [(more, less), (plain[more], plain[less])]
        asked += [
            (name, "with responsibility weighting", pairs[:1]),
            (name, "without it", pairs[1:]),
            (name, "over both", pairs),
        ]
    weighting = [(name, plain[name]) for name in (m2, m3, evolved)]
    for on, off in weighting:
        asked.append(("responsibility weighting", f"in {rows[on].title}", [(on, off)]))
    asked.append(("responsibility weighting", "over all three", weighting))
    for variant in WEIGHTED:
        pair = [(variant.name, ONE.name)]
        asked.append(("the hierarchy", f"{variant.title}, over {ONE.title}", pair))
    sharpes = {name: np.array(row.known_values("sharpe")) for name, row in rows.items()}
    differences = []
    for name, of, pairs in asked:
        values = np.mean([sharpes[more] - sharpes[less] for more, less in pairs], axis=0).tolist()
        interval = seed_interval(values)
        low, high = finite_or_none(interval.low), finite_or_none(interval.high)
        verdict = "not resolved"
        if low is not None and low > 0.0:
            verdict = "helps"
        elif high is not None and high < 0.0:
            verdict = "hurts"
        differences.append(
            StudyDifference(name, of, tuple(values), interval.estimate, low, high, verdict)
        )
    return differences


def run_study(
    config: Config,
    directory: Path,
    *,
    seeds: int = 3,
    workers: int = 1,
    command: str = "",
    overwrite: bool = False,
    on_report: Callable[[Part, object], None] = lambda _part, _message: None,
) -> StudyResult:
    """Run what has no finding yet, so more seeds are added; write study.json and study.md.

    Raises `Stopped` after Ctrl-C; the same call goes on where it stopped.
    """
    began = time.perf_counter()
    parts = plan_study(config, seeds)
    if overwrite:
        clear_proof(directory, (_RESULT, _TABLE))
    done = run_all(parts, directory, workers=workers, on_report=on_report)
    made = proof_facts(config, command, done.values()) | {"seconds": time.perf_counter() - began}
    result = assess_study(done, range(config.seed, config.seed + seeds), config, made)
    write_atomic(directory / "config.yaml", to_yaml(config))
    write_json(directory / _RESULT, round_tree({"format": _FORMAT, **asdict(result)}))
    write_atomic(directory / _TABLE, study_markdown(result))
    return result


def study_markdown(study: StudyResult) -> str:
    steps = {step for row in study.rows for step in row.steps}
    shown = f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
    about = study.about
    on_pairs = ", ".join(f"{name} {value:.2f}" for name, value in study.references.items())
    lines = [
        "# Study of the hierarchy on the regime market",
        f"{len(study.seeds)} seeds ({', '.join(map(str, study.seeds))}), {shown} environment steps "
        f"each, {study.pairs} unseen mirrored pairs. Means over pairs, then over seeds with "
        f"Student's 95 % interval. On the same pairs: {on_pairs}.",
        "## Results",
        _table(study.rows, STUDY_COLUMNS),
        "Best expert, Fixed-Share (hedge) and oracle are of the variant's own experts: the best by "
        "itself on the test pairs, Fixed-Share over all, and the better one of each regime, "
        "knowing the regime.",
        "## How different the experts are",
        _table([row for row in study.rows if row.known_values("oracle")], _DIVERSITY),
        f"MAPD: at the last check of the population; lowest: since it first reached {HELD:g}, the "
        "training log between checks included (where it never did, the highest there was), for "
        "networks begin alike. Usage entropy: of the experts, as a share of its most; in training "
        "of the last 1,000 decisions.",
        "## What helps",
        _markdown(
            ["what", "where", "Sharpe ratio", "verdict"],
            [[d.name, d.of, d.shown, d.verdict] for d in study.differences],
        ),
        "Differences of Sharpe ratios, paired by seed. Each interval is a 95 % one by itself: of "
        f"{len(study.differences)}, one in twenty would miss 0 by chance.",
        "## Notes",
        "\n".join(f"- {note}" for note in study.notes),
        "## Variants",
        "\n".join(f"- {row.title}: `{' '.join(row.changes)}`" for row in study.rows),
        f"Configuration {about['config_hash'][:12]}, {about['cpu_seconds'] / 3600:.1f} hours of "
        f"processor time, finished {about['finished']}. `{about['command']}`",
    ]
    return "\n\n".join(lines) + "\n"


def study_cell(row: StudyRow, measure: str) -> str:
    known = row.known_values("mapd lowest" if measure == "held" else measure)
    if not known:
        return "–"
    if measure == "held":
        return f"{row.held} of {len(known)}"
    interval = seed_interval(known)
    if measure == "restarted":
        return f"{sum(known):g}"
    if measure == "mapd lowest":
        return f"{min(known):.2f}"

    def show(value: float) -> str:
        return f"{value:.0%}" if measure in _SHARES else f"{value:.2f}"

    if measure not in _WHOLE or interval.method == "none":
        return show(interval.estimate)
    return f"{show(interval.estimate)} [{show(interval.low)}, {show(interval.high)}]"


def _table(rows: Sequence[StudyRow], measures: Sequence[str]) -> str:
    heads = ["variant", *(_HEADS.get(name, name) for name in measures)]
    lines = [[row.title, *(study_cell(row, name) for name in measures)] for row in rows]
    return _markdown(heads, lines)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in heads[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rule, *lines))
