"""Nodes and drivers killed while work is on a Ray cluster: `python -m reliability scale`.

1. Each command runs once by local processes: the reference.
2. It runs on three nodes, and one that is not the head is killed at a random moment and replaced.
3. It runs as a process of its own, which is killed at a random moment and given again with
   --resume.

What it wrote must have the values of the reference, and no actor may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reliability._clusters import Nodes, actors_left, bare_world, cluster, results, run

CASES: dict[str, tuple[str, ...]] = {
    "hierarchy": (
        *("train", "-c", "hierarchy.yaml", "-o", "experts.n_experts=4"),
        *("-o", "trainer.workers=4", "-o", "train.total_env_steps=1280"),
        *("-o", "train.validate_every_steps=320", "-o", "train.checkpoint_every_steps=128"),
    ),
    "walk-forward": ("walk-forward", "-c", "walk.yaml", "-o", "train.total_env_steps=2560"),
}
LEAVE = ("config.yaml", "base.yaml")
PATIENCE_SECONDS = 30.0


def main(argv: Sequence[str]) -> int:
    """Kill so many nodes and drivers; 1 where something differs."""
    parser = argparse.ArgumentParser(prog="reliability scale", description=__doc__)
    parser.add_argument("--node-kills", type=int, default=20, help="of each command")
    parser.add_argument("--driver-kills", type=int, default=10, help="of all commands")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True, help="directory for the cases")
    given = parser.parse_args(argv)
    rng = random.Random(given.seed)
    work: Path = given.work
    bare = bare_world(work / "bare")
    lines = []
    with cluster(1, 2, 2) as nodes:
        for name, words in CASES.items():
            reference = _copy(bare, work / f"{name}-reference")
            run(reference, *words, "--output-dir", "runs/a", "--workers", "2")
            whole = results(reference, LEAVE)
            began = time.monotonic()
            case = _copy(bare, work / f"{name}-quiet")
            run(case, *words, "--output-dir", "runs/a", "--on", f"ray:{nodes.address}")
            took = time.monotonic() - began
            lines.append(_compare(name, "quiet", 0.0, case, whole))
            for k in range(given.node_kills):
                case, moment = _copy(bare, work / f"{name}-node-{k}"), rng.uniform(0.5, took)
                with nodes.losing([moment], rng) as done:
                    run(case, *words, "--output-dir", "runs/a", "--on", f"ray:{nodes.address}")
                kind = "node" if done else "node (ended before it)"
                lines.append(_compare(name, kind, moment, case, whole))
            for k in range(given.driver_kills // len(CASES)):
                case, moment = _copy(bare, work / f"{name}-driver-{k}"), rng.uniform(2.0, took + 4)
                kind = _kill_driver(nodes, case, words, moment)
                lines.append(_compare(name, kind, moment, case, whole))
    for line in lines:
        print(json.dumps(line))
    wrong = [line for line in lines if line["differ"] or line["left"]]
    print(f"{len(lines)} cases, {len(wrong)} failed")
    (work / "scale.json").write_text(json.dumps(lines, indent=1))
    return 1 if wrong else 0


def _copy(bare: Path, place: Path) -> Path:
    return Path(shutil.copytree(bare, place))


def _kill_driver(nodes: Nodes, case: Path, words: Sequence[str], moment: float) -> str:
    """Run as a process, kill it at the moment, and go on."""
    on = ("--on", f"ray:{nodes.address}")
    command = (sys.executable, "-m", "echelon", *words, "--output-dir", "runs/a", *on)
    with (case / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, cwd=case, env=os.environ, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(moment)
            kind = "driver (ended before it)"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kind = "driver"
    begun = any((case / "runs/a" / name).exists() for name in ("config.yaml", "base.yaml"))
    if kind == "driver" and begun:
        run(case, words[0], "--resume", "runs/a", *on)
    elif kind == "driver":
        run(case, *words, "--output-dir", "runs/a", *on)
    return kind


def _compare(
    name: str, kind: str, moment: float, case: Path, whole: dict[str, str]
) -> dict[str, object]:
    until = time.monotonic() + PATIENCE_SECONDS
    while (left := actors_left()) and time.monotonic() < until:
        time.sleep(0.5)
    mine = results(case, LEAVE)
    differ = sorted(n for n in {*mine, *whole} if mine.get(n) != whole.get(n))
    line = {"case": name, "killed": kind, "at": round(moment, 1), "differ": differ, "left": left}
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
