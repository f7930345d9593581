"""SIGTERM ends a command as Ctrl-C does, with workers that outlive the signal long enough."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hierarchies import SMALL
from shells import Shell, tiny

from echelon import stopping
from echelon.runs.checkpoint import latest_checkpoint
from echelon.training.run import seed_directory


def test_hierarchy_with_workers_is_checkpointed_when_its_whole_group_gets_sigterm(
    bars_file: Path, tmp_path: Path
) -> None:
    more = (
        *("train.total_env_steps=1000000", "train.checkpoint_every_steps=200", "trainer.workers=2"),
        *("train.books=4", "pretrain.enabled=false", "train.validate_every_steps=100000"),
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "echelon", "train", *tiny(bars_file, *SMALL, *more)),
            *("--output-dir", "run", "--seeds", "1"),
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    place = seed_directory(tmp_path / "run", 42)
    deadline = time.monotonic() + 240
    while not list(place.glob("checkpoints/step-000000[2-9]*")) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "stopped: seed 42 at step" in err
    assert "ended unexpectedly" not in err
    assert "Traceback" not in err
    result = json.loads((place / "result.json").read_text())
    last = latest_checkpoint(place / "checkpoints")
    assert last is not None
    assert (result["ending"], last.name) == ("stopped", f"step-{result['step']:09d}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_command_that_cannot_stop_half_way_is_interrupted(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    def raise_signal(*_: object, **__: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("echelon.cli.evaluate.evaluate_run", raise_signal)
    before = signal.getsignal(signal.SIGTERM)
    left, _, err = shell("evaluate", "run")
    assert left == code
    assert "interrupted: nothing half-done was kept" in err
    assert signal.getsignal(signal.SIGTERM) == before


def test_signals_that_come_together_are_one_request_and_a_later_one_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stopping.stop_requests() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop()
        monkeypatch.setattr(stopping, "_ONE_REQUEST_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
