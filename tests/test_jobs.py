"""Jobs side by side: order, failures that stay apart, and workers whose parent is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from echelon import stopping, workers
from echelon.errors import DataError, TrainingError, WorkersLostError
from echelon.stopping import SIGNALS
from echelon.workers import Failure, Report, ShouldStop, job_counts, run_jobs, start_worker


def _odd_job(job: str, report: Report, _should_stop: ShouldStop) -> str:
    report(f"begun {job}")
    match job:
        case "data":
            raise DataError("planted in the data")
        case "disk":
            raise OSError(28, "No space left on device", "some/file")
        case "bug":
            raise ZeroDivisionError("planted")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return job.upper()


def test_processes_keep_the_order_and_failures_stay_apart() -> None:
    said: dict[int, object] = {}
    jobs, before, during = ["one", "data", "disk", "bug", "killed", "two"], job_counts(), []

    def hear(k: int, message: object) -> None:
        said[k] = message
        during.append(job_counts())

    done = run_jobs(_odd_job, jobs, workers=2, on_report=hear)
    assert not done.stopped
    assert during[0][:2] == (4, 2)
    after = [new - old for new, old in zip(job_counts(), before, strict=True)]
    assert after == [0, 0, 2, 4, 1]
    first, data, disk, bug, killed, last = done.results
    assert (first, last) == ("ONE", "TWO")
    errors = [result.error for result in (data, disk, bug, killed) if isinstance(result, Failure)]
    kinds = (DataError, OSError, RuntimeError, TrainingError)
    assert [type(error) for error in errors] == list(kinds)
    assert str(errors[0]) == "planted in the data"
    assert "ZeroDivisionError: planted" in str(errors[2])
    assert "killed by SIGKILL" in str(errors[3])
    assert said[0] == "begun one"
    assert said[5] == "begun two"
    with pytest.raises(DataError, match="planted in the data"):
        done.all_or_raise()


def test_failure_in_this_process_does_not_stop_the_next_job() -> None:
    done = run_jobs(_odd_job, ["data", "one"], workers=1)
    assert isinstance(done.results[0], Failure)
    assert done.results[1] == "ONE"


class _Again(workers.Engine):
    """Begins a job again, once since it last got on."""

    retries = 1


def _lonely_job(file: str, _report: Report, _should_stop: ShouldStop) -> str:
    """Loses its own workers as many times as the file says."""
    left = int(Path(file).read_text())
    Path(file).write_text(str(left - 1))
    if left:
        raise WorkersLostError("planted")
    return "done"


def test_job_that_lost_its_own_workers_is_begun_again(tmp_path: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    for times, file in enumerate((once, twice), 1):
        file.write_text(str(times))
    with workers.use_engine(_Again()):
        done = run_jobs(_lonely_job, [str(once), str(twice)], workers=2)
    assert done.results[0] == "done"
    assert isinstance(done.results[1], Failure)
    assert type(done.results[1].error) is WorkersLostError


def _wait(job: str, report: Report, should_stop: ShouldStop) -> str:
    Path(job).with_suffix(".begun").touch()
    while not should_stop():
        report("x" * 10_000)  # more than a pipe holds that nobody reads
        time.sleep(0.01)
    Path(job).with_suffix(".ended").touch()
    return job


def test_signal_while_workers_are_started_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(*args: Any, **kwargs: Any) -> workers.Worker:
        worker = start_worker(*args, **kwargs)
        started.append(worker)
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(stopping, "_ONE_REQUEST_SECONDS", 60.0)  # so that more are no harm
        return worker

    monkeypatch.setattr(workers, "start_worker", start)
    done = run_jobs(_wait, [str(tmp_path / f"{k}.job") for k in range(4)], workers=3)
    assert done.stopped
    assert len(started) == 1
    assert done.results == [str(tmp_path / "0.job"), None, None, None]


def _seen(directory: Path, pattern: str, count: int) -> bool:
    deadline = time.monotonic() + 60
    while len(list(directory.glob(pattern))) < count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_stop_in_order_when_their_parent_is_stopped_or_killed(
    number: signal.Signals, tmp_path: Path
) -> None:
    script = (
        "from test_jobs import _wait, run_jobs\n"
        "if __name__ == '__main__':\n"
        f"    done = run_jobs(_wait, ['{tmp_path}/a', '{tmp_path}/b', '{tmp_path}/c'], workers=2)\n"
        "    assert done.stopped and done.results[2] is None\n"
    )
    file = tmp_path / "run.py"
    file.write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths}
    with (tmp_path / "err.txt").open("w") as err:  # a killed parent's helper complains there
        process = subprocess.Popen(
            [sys.executable, str(file)], env=environment, stderr=err, start_new_session=True
        )
    assert _seen(tmp_path, "*.begun", 2)
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)  # as a terminal, systemd and docker do
    assert process.wait(60) == (-number if number == signal.SIGKILL else 0)
    assert _seen(tmp_path, "*.ended", 2)
    assert not (tmp_path / "c.begun").exists()


def _blocked(job: int, report: Report, should_stop: ShouldStop) -> bool:
    return signal.pthread_sigmask(signal.SIG_BLOCK, []) >= SIGNALS


def test_workers_are_born_deaf_to_signals_and_the_parent_is_not() -> None:
    """A terminal sends them to all of them; one that is still importing would die of it."""
    done = run_jobs(_blocked, [1, 2], workers=2)
    assert done.results == [True, True]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & SIGNALS


def _deaf(job: str, report: Report, should_stop: ShouldStop) -> None:
    Path(job).with_suffix(".begun").touch()
    time.sleep(600)


@pytest.mark.parametrize("workers", [1, 2])
def test_second_signal_does_not_wait_for_a_task_that_does_not_listen(
    workers: int, tmp_path: Path
) -> None:
    script = (
        "from test_jobs import _deaf, run_jobs\n"
        "if __name__ == '__main__':\n"
        f"    run_jobs(_deaf, ['{tmp_path}/a', '{tmp_path}/b'], workers={workers})\n"
    )
    file = tmp_path / "run.py"
    file.write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, str(file)],
        env=os.environ | {"PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert _seen(tmp_path, "*.begun", workers)
    os.killpg(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)  # `timeout` sends two: one request
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in err


def _process(job: int, report: Report, should_stop: ShouldStop) -> int:
    return os.getpid()


def test_a_worker_that_has_done_a_job_gets_the_next() -> None:
    done = run_jobs(_process, range(6), workers=2)
    assert len(set(done.all_or_raise())) <= 2
    assert os.getpid() not in done.results
