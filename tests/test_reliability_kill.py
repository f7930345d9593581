"""`make kill` in short: ten kills go well, and a writer that is not atomic is found.

The harness forks, and a test process has threads by now: it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from reliability import kill
from reliability._results import count_looks, fingerprint, leftovers, plain
from reliability.killpoints.sitecustomize import name_of

ROOT = Path(__file__).resolve().parent.parent


def harness(work: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and what was written, of one session of the harness."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "reliability", "kill", "--work", str(work), *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (work / "kill.json").is_file(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads((work / "kill.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills_lose_nothing_and_change_no_bit(tmp_path: Path) -> None:
    commands = "import,prepare,train-flat,evaluate"
    code, out, tree = harness(tmp_path, "--kills", "10", "--seed", "1", "--commands", commands)
    assert code == 0, out
    assert tree["kills"] >= 10
    assert tree["failures"] == 0
    assert tree["points_covered"] >= 3
    for name in commands.split(","):
        assert tree["commands"][name]["cases"] >= 2, out  # a control, and a kill
        assert tree["commands"][name]["points_known"] > 10


def test_a_writer_that_is_not_atomic_is_found_and_kept(tmp_path: Path) -> None:
    half = kill.Kill("SIGKILL", "main", point="main:fsync:CURRENT.json", side="after", nth=1)
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"case": asdict(kill.Case(1, "import", (half,)))}))
    code, out, tree = harness(tmp_path / "work", "--replay", str(file), "--plant")
    assert code == 1, out
    assert tree["failures"] == tree["kills"] == 1
    assert "CURRENT.json: half written: JSONDecodeError" in out
    kept = tmp_path / "work" / "failures" / "1"
    failure = json.loads((kept / "failure.json").read_text())
    assert failure["case"] == json.loads(file.read_text())["case"]
    assert failure["replay"].endswith(f"--replay {kept / 'failure.json'}")
    assert (kept / "run" / "store" / "market" / "CURRENT.json").is_file()


def references() -> dict[str, kill.Reference]:
    points = {"main:replace:CURRENT.json": 1, "main:fsync:.CURRENT.json.*.tmp": 2}
    return {name: kill.Reference(name, 1.0, {}, {}, points) for name in ("import", "train-seeds")}


def test_plan_is_that_of_its_seed_and_walks_through_all_points() -> None:
    plans = [list(islice(kill.plan(references(), seed), 60)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert [case.kills for case in plans[0][:2]] == [(), ()]
    for name in references():
        kills = [k for case in plans[0] if case.command == name for k in case.kills]
        assert {(k.point, k.side) for k in kills if k.point} == {
            (point, side) for point in references()[name].points for side in ("before", "after")
        }
        assert {k.signal for k in kills} == {"SIGKILL", "SIGTERM"}
        assert len([k for k in kills if not k.point]) >= len(kills) // 3
        assert any(k.victim == "worker" for k in kills) == (name == "train-seeds")
    assert max(len(case.kills) for case in plans[0]) > 1


def test_names_of_points_leave_out_what_differs_from_run_to_run() -> None:
    assert name_of("/x/.state.json.0a1b2c3d.tmp") == ".state.json.*.tmp"
    assert name_of("/x/step-000000080") == "step-*"
    assert name_of("/x/.best-00ff00ff00ff.old") == ".best-*.old"
    assert name_of("/x/seed-42.weights.parquet") == "seed-#.weights.parquet"
    assert name_of("/x/features.npy") == "features.npy"


def test_clocks_and_lost_workers_are_no_values() -> None:
    tree = {
        "finished": "now",
        "time/rollout": 1.0,
        "sharpe": 2.0,
        "where": "/case/7/runs/a",
        "events": [{"kind": "worker_lost"}, {"kind": "copied"}],
    }
    kept = {"sharpe": 2.0, "where": "<root>/runs/a", "events": [{"kind": "copied"}]}
    assert plain(tree, "/case/7") == kept


def test_killed_looks_are_counted_and_are_no_values(tmp_path: Path) -> None:
    assert count_looks(tmp_path) == 0
    line = {"run": "a", "config_hash": "b", "window": {"first": "2016-07-01"}}
    reads = tmp_path / "runs" / "registry" / "reads.json"
    reads.parent.mkdir(parents=True)
    digests = set()
    for number in (1, 2):
        reads.write_text(json.dumps({"lines": [line | {"key": str(k)} for k in range(number)]}))
        assert count_looks(tmp_path) == number
        digests.add(fingerprint(tmp_path)["runs/registry/reads.json"])
    assert len(digests) == 1
    reads.write_text(json.dumps({"lines": [line | {"run": "other", "key": "0"}]}))
    assert fingerprint(tmp_path)["runs/registry/reads.json"] not in digests


def test_leftovers_of_killed_processes_are_told_from_finished_files(tmp_path: Path) -> None:
    kept = ("store/market/.lock", "runs/a/result.json", "tmp/numba.lock", "runs/a/.best-notes")
    left = (
        *("cache/.staging-0a1b2c/x.npy", "runs/a/.run.json.0a1b2c3d.tmp"),
        *("runs/a/.best-00ff00ff00ff.old/state.json", "tmp/pymp-x/y"),
    )
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert leftovers(tmp_path) == [
        *("cache/.staging-0a1b2c", "runs/a/.best-00ff00ff00ff.old"),
        *("runs/a/.run.json.0a1b2c3d.tmp", "tmp/pymp-x"),
    ]


def test_a_forked_process_leaves_its_parent_s_temporary_directories_alone(tmp_path: Path) -> None:
    program = (
        "import os, sys, tempfile\n"
        "from pathlib import Path\n"
        "from reliability._processes import fork\n"
        "with tempfile.TemporaryDirectory() as room:\n"
        "    child = fork(lambda: 0, Path(sys.argv[1]))\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    print(Path(room).is_dir())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "log")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr
