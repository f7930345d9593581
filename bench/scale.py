"""What Ray costs, and what more nodes would bring: `python -m bench.scale`.

1. **Overhead.** Two trainings of about a minute side by side, by local processes and by actors of
   a cluster on this machine, in turns. The cluster is there already.
2. **Model.** A hierarchy's round, measured in one process: processor seconds that a member collects
   and learns, that the router learns, and that the coordinator takes for the rest; and by actors:
   bytes between them, and the wall's seconds, which need a quiet machine. From these, the time of
   a round on more nodes:

       T = max(k·c, r, (M·c + r) / P) + k·l + s + (D + U)·M / B + (N − 1)·C·M / B

   M members by W actors on N nodes, P processors in all, k = ceil(M / W) members one after the
   other. c: collecting, which goes on while the router learns for r; l: learning; s: the rest of
   the coordinator; D and U: bytes to and from a member; C: bytes of what a member collected, which
   goes to every node once; B: bytes a second of the network. It assumes nodes like this machine
   with as many actors as processors, members that take equally long, and a network that is nobody
   else's. What can be checked here is one node: 2 actors against what one process foretells.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from echelon.cluster import ray_engine
from echelon.config import load_config, override_config
from echelon.features import prepare
from echelon.training.loop import CHECKPOINTS
from echelon.training.run import SeedJob, Training, load_worlds, ready, seed_directory, train_seeds
from echelon.workers import Engine, use_engine
from reliability._clusters import bare_world

NETWORK = 1.25e9
"""Bytes a second: 10 Gbit."""
_MEMORY = 500_000_000


@dataclass(frozen=True)
class Round:
    """Of a hierarchy, measured: seconds and bytes of one round, on average.

    seconds: of the processor with one actor, which is this process; of the wall with more
    """

    members: int
    actors: int
    seconds: float
    collect: float
    experts: float
    router: float
    down: float
    up: float
    collected: float
    shared: int


def overhead(bare: Path, steps: int, repeats: int) -> list[dict[str, float | str]]:
    """Seconds of two trainings side by side, by engine, the engines taking turns."""
    lines: list[dict[str, float | str]] = []
    with ray_engine("local", 1, _MEMORY) as ray:
        for turn in range(repeats):
            for name, engine in (("local", Engine()), ("ray", ray)):
                with use_engine(engine):
                    seconds = _two_trainings(bare, bare.parent / f"{name}-{turn}", steps)
                lines.append({"engine": name, "seconds": seconds})
                print(json.dumps(lines[-1]), flush=True)
    return lines


def _two_trainings(bare: Path, place: Path, steps: int) -> float:
    shutil.copytree(bare, place)
    os.chdir(place)
    config = override_config(
        load_config(Path("flat.yaml"), []),
        [
            *(f"train.{key}_steps={steps}" for key in ("total_env", "checkpoint_every")),
            f"train.validate_every_steps={steps // 4}",
        ],
    )
    run = place / "run"
    prepare(config, run)
    jobs = [SeedJob(config, run, seed) for seed in (1, 2)]
    begun = time.perf_counter()
    train_seeds(jobs, workers=2, on_progress=lambda _: None).all_or_raise()
    return round(time.perf_counter() - begun, 2)


def slower(lines: Sequence[dict[str, float | str]]) -> float:
    """Median over turns of Ray's seconds over local processes', less one."""
    of = {
        name: [float(line["seconds"]) for line in lines if line["engine"] == name]
        for name in ("local", "ray")
    }
    return (
        statistics.median(away / here for here, away in zip(of["local"], of["ray"], strict=True))
        - 1.0
    )


def rounds(bare: Path, members: int, actors: int, n: int) -> Round:
    """Measure rounds of a hierarchy whose members are actors; 1: they are here."""
    place = bare.parent / f"hierarchy-{members}-{actors}"
    shutil.copytree(bare, place)
    os.chdir(place)
    config = override_config(
        load_config(Path("hierarchy.yaml"), []),
        [
            *(f"experts.n_experts={members}", f"trainer.workers={actors}"),
            *("trainer.round_steps=400", "train.total_env_steps=1000000"),
            "experts.sharing.buffer_size=60000",
            "trainer.training_schedule.experts={freq: 1, steps: 400}",
            "trainer.training_schedule.router={freq: 1, steps: 400}",
        ],
    )
    run = place / "run"
    prepare(config, run)
    job = SeedJob(config, run, 1)
    worlds, directory = load_worlds(job), seed_directory(run, 1)
    clock = time.perf_counter if actors > 1 else time.process_time
    with (
        ray_engine("local", 1, _MEMORY) if actors > 1 else nullcontext() as engine,
        patch("echelon.population.learner.time", SimpleNamespace(perf_counter=clock)),
    ):
        assert ready(config, worlds, directory, lambda: False)
        (directory / CHECKPOINTS).mkdir(parents=True)
        learner = Training(config, worlds, directory, 1).learner
        learner.train_once()
        counts = (0, 0) if engine is None else (engine.sent + engine.store.bytes_put, engine.heard)
        begun, phases = clock(), dict.fromkeys(("collect", "experts", "router"), 0.0)
        for _ in range(n):
            metrics = learner.train_once()
            phases = {name: sum_ + metrics[f"time/{name}"] / n for name, sum_ in phases.items()}
        seconds = (clock() - begun) / n
        after = (0, 0) if engine is None else (engine.sent + engine.store.bytes_put, engine.heard)
        down, up = ((b - a) / n / members for a, b in zip(counts, after, strict=True))
        news = 400 * learner.replay._rings[0].bytes_per_transition  # type: ignore[attr-defined]
        shared = 0 if engine is None else engine.store.bytes_put
        learner.close()
    return Round(members, actors, seconds, *phases.values(), down, up, float(news), shared)


def predict(alone: Round, away: Round, members: int, nodes: int, cpus: int) -> float:
    """Seconds of a round. alone: all members here; away: for the bytes"""
    collect, learn = alone.collect / alone.members, alone.experts / alone.members
    rest = alone.seconds - alone.collect - alone.experts - alone.router
    in_a_row = math.ceil(members / min(members, nodes * cpus))
    work = (members * collect + alone.router) / (nodes * cpus)
    ahead = max(in_a_row * collect, alone.router, work)
    wire = (away.down + away.up + (nodes - 1) * away.collected) * members / NETWORK
    return ahead + in_a_row * learn + rest + wire


def main(argv: Sequence[str] = ()) -> int:
    """Measure, and write what was measured."""
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__)
    parser.add_argument("--steps", type=int, default=700_000, help="of a training")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("overhead", "rounds"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(".bench/scale.json"))
    given = parser.parse_args(argv)
    output = given.output.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        bare = bare_world(Path(scratch, "bare"))
        lines, measured = [], []
        if given.only != "rounds":
            lines = overhead(bare, given.steps, given.repeats)
        if given.only != "overhead":
            measured = [rounds(bare, members, actors, given.rounds) for members, actors in SIZES]
    tree = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "overhead": lines,
        "Ray slower by": round(slower(lines), 3) if lines else None,
        "rounds": [asdict(own) for own in measured],
        "checked": [
            {
                "members": away.members,
                "measured": round(away.seconds, 2),
                "predicted": round(predict(alone, away, away.members, 1, 2), 2),
            }
            for alone, away in zip(measured[::2], measured[1::2], strict=True)
        ],
        "predicted": {
            f"{members} members, {nodes} nodes of 2 CPUs": round(
                predict(measured[-2], measured[-1], members, nodes, 2), 2
            )
            for members in (5, 32)
            for nodes in (1, 2, 4, 8, 16, 32, 64)
            if measured
        },
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(tree, indent=1))
    print(json.dumps(tree, indent=1))
    return 0


SIZES = ((4, 1), (4, 2), (8, 1), (8, 2))
"""Members and actors of what is measured."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
