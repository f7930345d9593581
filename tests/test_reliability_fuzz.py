"""The fuzzing harness: it catches what it is there to catch, and finds nothing in Echelon."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import ConfigError, InvalidDataError
from reliability import targets, worlds
from reliability.cases import Case, Outcome, load_case
from reliability.fuzz import Fuzz
from reliability.mutate import CODE
from reliability.watched import Finished, Job, Limits, Pool, Runner, Settings

LIMITS = Limits(seconds=2.0, memory=200 << 20)
CHEAP = (
    *("config", "override", "argv", "csv", "parquet", "ticks", "qlib", "side", "exogenous"),
    *("vendor", "store", "prepared", "prepare", "cache", "redis", "execution", "live"),
)
"""Targets of the short session: those whose worlds are made in seconds."""


# --- planted failures, run in a worker


def _result(_: Case) -> None:
    Path("inside").write_text("a case may write here")


def _our_error(_: Case) -> None:
    raise ConfigError("seed: expected a number, found 'x'. Write a number.")


def _exception(_: Case) -> None:
    raise KeyError("x")


def _compiled_loop(_: Case) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter: no signal handler of Python's runs


def _sleep(_: Case) -> None:
    time.sleep(1000)


def _eat_memory(_: Case) -> None:
    eaten = [bytearray(b"x" * (20 << 20)) for _ in range(40)]
    time.sleep(len(eaten))


def _eat_and_give_back(_: Case) -> None:
    bytearray(b"x" * (300 << 20))  # gone before anybody looks


def _write_outside(_: Case) -> None:
    Path("../../stray").write_text("x")


def _change_sentinel(_: Case) -> None:
    Path("../keep").write_text("y")


def _run_code(_: Case) -> None:
    exec(CODE)


def _abort(_: Case) -> None:
    os.abort()


def _long_message(_: Case) -> None:
    sys.stderr.write("x" * 30_000)  # errors of ours are bounded by themselves
    raise ConfigError("too long to be read")


def _control_character(_: Case) -> None:
    sys.stdout.write("symbol \x1b[31mAAA\n")


PLANTED: dict[str, tuple[Callable[[Case], None], str]] = {
    "result": (_result, "result"),
    "our_error": (_our_error, "ConfigError"),
    "exception": (_exception, "KeyError"),
    "compiled_loop": (_compiled_loop, "time over limit"),
    "sleep": (_sleep, "hangs"),
    "memory": (_eat_memory, "memory over limit"),
    "peak": (_eat_and_give_back, "memory over limit"),
    "outside": (_write_outside, "wrote outside"),
    "sentinel": (_change_sentinel, "wrote outside"),
    "code": (_run_code, "ran code of the input"),
    "abort": (_abort, "died (SIGABRT)"),
    "message": (_long_message, "message unbounded (ConfigError)"),
    "control": (_control_character, "control character (result)"),
    "result again": (_result, "result"),
}


def lookup_planted(name: str, seed: int, worlds: Path) -> Runner:
    return (lambda _: Case()), PLANTED[name][0], False


def test_planted_failures_are_caught_and_the_worker_is_replaced(tmp_path: Path) -> None:
    settings = Settings(0, tmp_path, tmp_path / "scratch", lookup_planted)
    jobs = [Job(k, name, LIMITS) for k, name in enumerate(PLANTED)]
    with Pool(settings, 2, preload=()) as pool:
        ended = {job.target: outcome for job, outcome in pool.run(iter(jobs))}
    assert {name: outcome.name for name, outcome in ended.items()} == {
        name: expected for name, (_, expected) in PLANTED.items()
    }
    kinds = {name: outcome.kind for name, outcome in ended.items() if outcome.kind != "failure"}
    assert kinds == {"result": "result", "our_error": "error", "result again": "result"}


# --- cases, counts and files


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.ensure(tmp_path_factory.mktemp("fuzz"), ["files"])


def test_cases_follow_from_seed_and_number_alone(place: Path) -> None:
    names = ("argv", "csv", "parquet", "ticks", "qlib", "side", "exogenous", "vendor", "wide")

    def cases(seed: int) -> list[tuple[Job, Case]]:
        jobs = Fuzz(names, seed, place, place).jobs(150, None)
        return [(job, targets.make_case(job.target, seed, job.number, place)) for job in jobs]

    first = cases(3)
    assert [job.number for job, _ in first] == list(range(150))
    assert len({job.target for job, _ in first}) > 5
    assert first == cases(3)
    assert first != cases(4)


def test_a_failure_is_saved_once_with_what_replays_it(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Fuzz(["csv"], 1, tmp_path, place)
    failure = Outcome("failure", "KeyError", "echelon/x.py:1 f", "'x'", 0.5)
    job = next(session.jobs(1, None))
    session.take(Finished(job, failure))
    session.take(Finished(job._replace(number=7), failure))
    session.take(Finished(job, Outcome("error", "SourceError", seconds=0.5)))
    session.take(Finished(job, Outcome("result", "result")))
    summary = session.summary(2.0, 1)
    assert summary["targets"]["csv"] == {
        "cases": 4,
        "results": 1,
        "errors": {"SourceError": 1},
        "failures": 2,
        "seconds": 1.5,
        "cases_per_second": 2.7,
    }
    (saved,) = summary["failures"]
    assert (saved["count"], saved["first"]) == (2, 0)
    name, case = load_case(Path(saved["file"]))
    assert (name, case) == ("csv", targets.make_case("csv", 1, 0, place))
    assert f"--replay {saved['file']}" in capsys.readouterr().err


def _fuzz(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reliability", "fuzz", *words]
    return subprocess.run(command, cwd=worlds.ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_session_finds_nothing(tmp_path: Path) -> None:
    only = [word for name in CHEAP for word in ("--only", name)]
    done = _fuzz("--cases", "400", "--seed", "18", "--output", str(tmp_path), *only)
    summary: dict[str, Any] = json.loads((tmp_path / "fuzz.json").read_text())
    assert summary["cases"] == 400
    assert not summary["failures"], done.stdout
    assert done.returncode == 0, done.stderr
    reached = [name for name, tally in summary["targets"].items() if tally["cases"]]
    assert len(reached) >= len(CHEAP) - 2  # the dearest have a case in a thousand
    assert sum(tally["results"] for tally in summary["targets"].values()) > 20


def test_panic_of_polars_on_broken_bars_stays_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case that `make fuzz` found: bars whose columns polars keeps in several pieces."""
    monkeypatch.chdir(tmp_path)
    extra = {"vendor": "eastmoney", "function": "stock_zh_a_daily", "seed": 3042317085}
    with pytest.raises(InvalidDataError, match="factor is infinite"):
        targets.run_vendor(Case((), extra=extra))
