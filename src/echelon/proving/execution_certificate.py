"""All proofs of execution, seed by seed, and what they came to.

    DIR/execution.json    every claim with its numbers by seed
    DIR/parts/…           the finding of each proof and seed (see `parts`)

Ctrl-C keeps what is done; the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from echelon.agents.execution.learner import ExecutionLearner
from echelon.agents.jobs import Report, ShouldStop
from echelon.config import Config
from echelon.errors import Stopped
from echelon.evaluation.statistics.seeds import seed_interval
from echelon.files import write_json
from echelon.proving.execution_proofs import PROOFS, Found, ProofSizes
from echelon.proving.parts import Done, Finding, Part, about, begin_anew, run_all

FORMAT = 1
FILE = "execution.json"


@dataclass(frozen=True)
class ExecutionPart:
    """One proof with one seed; draw: name of the days it is made on."""

    proof: str
    sizes: ProofSizes
    seed: int
    draw: str = "test"

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"{self.proof}-{self.seed}"

    @property
    def steps(self) -> int:
        """One: parts are short, and counted by number."""
        return 1

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """On one core: parts run side by side."""
        torch.set_num_threads(1)

        def train(learner: ExecutionLearner, steps: int) -> None:
            while learner.steps < steps:
                learner.train_once()
                if should_stop():
                    raise Stopped("in the middle of a training")

        try:
            found = PROOFS[self.proof].run(self.sizes, self.seed, self.draw, train)
        except Stopped:
            return None
        return {"value": found.value, "facts": dict(found.facts)}


class Proved(NamedTuple):
    """One claim and what was measured.

    values: by seed; low, high: of the mean over seeds, 95 %; holds: None where nothing is claimed
    facts: what else is worth knowing, by seed
    """

    name: str
    unit: str
    claim: str
    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    holds: bool | None
    facts: Mapping[str, tuple[float, ...]]


class ExecutionCertificate(NamedTuple):
    """All of them, and what they were made with."""

    proofs: tuple[Proved, ...]
    about: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether no claim failed."""
        return all(proved.holds is not False for proved in self.proofs)

    def write(self, directory: Path) -> Path:
        """Write execution.json."""
        tree = {
            "format": FORMAT,
            "passed": self.passed,
            "proofs": [proved._asdict() for proved in self.proofs],
            "about": dict(self.about),
        }
        path = directory / FILE
        write_json(path, tree)
        return path


def plan_execution(names: Sequence[str], sizes: ProofSizes) -> list[Part]:
    """Parts of the proofs named, a seed of each after the other."""
    return [ExecutionPart(name, sizes, seed) for seed in range(sizes.seeds) for name in names]


def prove_execution(
    directory: Path,
    names: Sequence[str],
    sizes: ProofSizes,
    *,
    workers: int = 1,
    command: str = "",
    overwrite: bool = False,
    on_report: Callable[[Part, object], None] = lambda _part, _message: None,
) -> ExecutionCertificate:
    """Run what has no finding yet and write execution.json; raises `Stopped` after Ctrl-C."""
    began = time.perf_counter()
    if overwrite:
        begin_anew(directory, (FILE,))
    parts = plan_execution(names, sizes)
    done = run_all(parts, directory, workers=workers, on_report=on_report)
    made = about(Config(), command, done.values())
    # The proofs have settings of their own: the configuration plays no part.
    made = {k: v for k, v in made.items() if k not in ("config_hash", "rules", "seed")}
    made |= {"seconds": time.perf_counter() - began, "sizes": asdict(sizes)}
    certificate = ExecutionCertificate(
        tuple(judge(name, _findings(name, sizes, done)) for name in names), made
    )
    certificate.write(directory)
    return certificate


def judge(name: str, found: Sequence[Found]) -> Proved:
    """What all seeds of a proof say."""
    proof = PROOFS[name]
    values = tuple(one.value for one in found)
    interval = seed_interval(values)
    low, high = (None, None) if len(values) < 2 else (interval.low, interval.high)
    facts = {fact: tuple(one.facts[fact] for one in found) for fact in found[0].facts}
    holds = None if proof.holds is None else proof.holds(found)
    return Proved(name, proof.unit, proof.claim, values, interval.estimate, low, high, holds, facts)


def _findings(name: str, sizes: ProofSizes, done: Mapping[str, Done]) -> list[Found]:
    kept = [done[f"{name}-{seed}"].finding for seed in range(sizes.seeds)]
    return [Found(one["value"], one["facts"]) for one in kept]
