"""Work on Ray clusters against local processes: `python -m reliability scale`.

**Matrix.** Each kind of work by 1 and 2 local processes, and by 1, 2 and 4 actors on one node and
on three: all that it wrote must have the same values.

**Kills.** A hierarchy's training and a walk-forward on nodes of which one is killed at a random
moment and replaced, and by a driver that is killed at a random moment and given again with
--resume: the values of local processes, and no actor left.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from echelon.errors import EchelonError
from reliability._clusters import Nodes, bare_world, cluster, results, run
from reliability._commands import COMMANDS, shrink_proof

Words = tuple[str, ...]
_LATE = ("-o", "train.validate_every_steps=320", "-o", "train.checkpoint_every_steps=128")
_HERE = ("--output-dir", "runs/a")
KINDS: dict[str, Words] = {
    "flat": ("train", "-c", "flat.yaml", "--seeds", "4", *_HERE),
    "expert": ("train", "-c", "expert.yaml", "--seeds", "4", *_HERE),
    "hierarchy": (
        *("train", "-c", "hierarchy.yaml", "-o", "experts.n_experts=4", *_HERE),
        *("-o", "train.total_env_steps=640", *_LATE),
    ),
    "walk-forward": ("walk-forward", "-c", "walk.yaml", *_HERE),
    "proof": tuple({"runs/prove": "runs/a"}.get(word, word) for word in COMMANDS["prove"].argv),
}
KILLED: dict[str, Words] = {
    "hierarchy": (
        *("train", "-c", "hierarchy.yaml", "-o", "trainer.workers=2", *_HERE),
        *("-o", "train.total_env_steps=1280", *_LATE),
    ),
    "walk-forward": ("walk-forward", "-c", "walk.yaml", "-o", "train.total_env_steps=1280", *_HERE),
}
LEAVE = ("config.yaml", "base.yaml")
LEAVE_HASHED = (*LEAVE, "run.json", "summary.json")
"""Files that have the hash of a configuration, of which trainer.workers is a part."""


def main(argv: Sequence[str]) -> int:
    """Run the matrix, or kill so many nodes and drivers; 1 where something differs."""
    parser = argparse.ArgumentParser(prog="reliability scale", description=__doc__)
    parser.add_argument("--matrix", action="store_true", help="all kinds on all clusters")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--node-kills", type=int, default=20, help="of each command")
    parser.add_argument("--driver-kills", type=int, default=10, help="of all commands")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True, help="directory for the cases")
    given = parser.parse_args(argv)
    work: Path = given.work
    bare = bare_world(work / "bare")
    if given.matrix:
        cases = matrix(bare, given.kinds)
    else:
        rng = random.Random(given.seed)
        drivers = given.driver_kills // len(KILLED)
        cases = kills(bare, {"node": given.node_kills, "driver": drivers}, rng)
    lines = []
    for line in cases:
        print(json.dumps(line), flush=True)
        lines.append(line)
    wrong = [line for line in lines if line["differ"] or line["left"]]
    print(f"{len(lines)} cases, {len(wrong)} failed")
    (work / "scale.json").write_text(json.dumps(lines, indent=1))
    return 1 if wrong else 0


def matrix(bare: Path, kinds: Sequence[str]) -> Iterator[dict[str, object]]:
    """Each kind of work in each place, against one local process."""
    shrink_proof()
    whole = {}
    for kind in kinds:
        whole[kind] = results(_done(bare, f"{kind}-local-1", _by(kind, 1)), LEAVE_HASHED)
        case = _done(bare, f"{kind}-local-2", _by(kind, 2))
        yield _compare(kind, "local, 2 workers", case, whole[kind], LEAVE_HASHED)
    for cpus in ((4,), (1, 2, 2)):
        with cluster(*cpus) as nodes:
            for kind in kinds:
                for actors in (1, 2, 4):
                    words = (*_by(kind, actors), "--on", f"ray:{nodes.address}")
                    case = _done(bare, f"{kind}-{len(cpus)}-{actors}", words)
                    place = f"Ray, {actors} actors, {len(cpus)} nodes"
                    yield _compare(kind, place, case, whole[kind], LEAVE_HASHED, nodes)


def _by(kind: str, workers: int) -> Words:
    if kind == "hierarchy":
        return (*KINDS[kind], "-o", f"trainer.workers={workers}")
    return (*KINDS[kind], "--workers", str(workers))


def _done(bare: Path, name: str, words: Words) -> Path:
    case = _copy(bare, name)
    run(case, *words)
    return case


def kills(bare: Path, wanted: dict[str, int], rng: random.Random) -> Iterator[dict[str, object]]:
    """Of each command so many by kind; one that came to its end before is no case."""
    with cluster(0, 2, 2) as nodes:  # the work is on nodes that can be killed
        for name, words in KILLED.items():
            whole = results(_done(bare, f"{name}-local", (*words, "--workers", "2")), LEAVE)
            began = time.monotonic()
            quiet = _done(bare, f"{name}-quiet", (*words, "--on", f"ray:{nodes.address}"))
            took = time.monotonic() - began
            yield _compare(name, "nothing killed", quiet, whole, LEAVE, nodes)
            for kind, kill in _KILLS.items():
                tries = killed = 0
                while killed < wanted[kind]:
                    case, moment = _copy(bare, f"{name}-{kind}-{tries}"), rng.uniform(0.5, took)
                    tries += 1
                    try:
                        done, error = kill(nodes, case, words, moment, rng), ""
                    except EchelonError as caught:
                        done, error = True, f": {caught}"
                    killed += done
                    what = f"{kind} at {moment:.1f} s{'' if done else ' (ended before)'}{error}"
                    yield _compare(name, what, case, whole, LEAVE, nodes)
                    shutil.rmtree(case)


def _copy(bare: Path, name: str) -> Path:
    return Path(shutil.copytree(bare, bare.parent / name))


def _kill_node(nodes: Nodes, case: Path, words: Words, moment: float, rng: random.Random) -> bool:
    """Run, and have a node killed at the moment; whether it came to that."""
    with nodes.losing([moment], rng) as done:
        run(case, *words, "--on", f"ray:{nodes.address}")
    return bool(done)


def _kill_driver(nodes: Nodes, case: Path, words: Words, moment: float, rng: random.Random) -> bool:
    """Run as a process, kill it at the moment, and go on; whether it came to that."""
    del rng
    on = ("--on", f"ray:{nodes.address}")
    command = (sys.executable, "-m", "echelon", *words, *on)
    with (case / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, cwd=case, env=os.environ, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(moment + _START_SECONDS)
            return False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    begun = any((case / "runs/a" / name).exists() for name in LEAVE)
    run(case, *((words[0], "--resume", "runs/a") if begun else words), *on)
    return True


_KILLS: dict[str, Callable[[Nodes, Path, Words, float, random.Random], bool]] = {
    "node": _kill_node,
    "driver": _kill_driver,
}
_START_SECONDS = 2.0
"""That a process needs to begin."""


def _compare(
    kind: str,
    what: str,
    case: Path,
    whole: dict[str, str],
    leave: Sequence[str],
    nodes: Nodes | None = None,
) -> dict[str, object]:
    left = [] if nodes is None else nodes.left()
    mine = results(case, leave) if (case / "runs").exists() else {}
    differ = sorted(n for n in {*mine, *whole} if mine.get(n) != whole.get(n))
    return {"kind": kind, "what": what, "files": len(whole), "differ": differ, "left": left}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
