"""The study: which part of the hierarchy helps? M1 to M3 with MF-PBT, on the regime market.

    m1          one expert: flat SAC, for as many environment steps
    m2          population and router, without information bonuses
    m3          with them: KL for the router, mutual information for the experts
    m3-mfpbt    and hyperparameters that evolve

each hierarchy with and without responsibility weighting (`…-unweighted`). All have the same seeds,
the same draws, which are neither the proof's nor anyone else's, and the same number of steps; what
a variant changes of the configuration is told with its results. Differences are paired by seed.

    DIR/study.json     everything, by seed
    DIR/study.md       the same as tables (see `study_table`)
    DIR/parts/…        findings and trainings (see `parts`)

Experts that have become alike begin anew in every hierarchy, with bonuses or without
(`trainer.diversity_threshold`): a collapse shows in the lowest MAPD and in how often that was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from echelon.config import Config, to_yaml
from echelon.files import write_atomic
from echelon.proving.parts import Part, about, begin_anew, run_all
from echelon.proving.study_parts import SIZES, Sizes, plan_study
from echelon.proving.study_results import FILE, Study, assess
from echelon.proving.study_table import TABLE, markdown

SEEDS = 3


def study(
    config: Config,
    directory: Path,
    *,
    seeds: int = SEEDS,
    sizes: Sizes | None = None,
    workers: int = 1,
    command: str = "",
    overwrite: bool = False,
    on_report: Callable[[Part, object], None] = lambda _part, _message: None,
) -> Study:
    """Run what has no finding yet and write study.json and study.md into `directory`.

    Raises `Stopped` after Ctrl-C; the same call goes on where it stopped, and one with more seeds
    adds them.
    """
    began = time.perf_counter()
    sizes = SIZES if sizes is None else sizes
    parts = plan_study(config, seeds, sizes)
    if overwrite:
        begin_anew(directory, (FILE, TABLE))
    done = run_all(parts, directory, workers=workers, on_report=on_report)
    made = about(config, command, done.values()) | {"seconds": time.perf_counter() - began}
    names = range(config.seed, config.seed + seeds)
    found = assess(done, names, config, made)
    write_atomic(directory / "config.yaml", to_yaml(config))
    found.write(directory)
    write_atomic(directory / TABLE, markdown(found))
    return found
