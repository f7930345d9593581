"""The metric log: never half a row, readable meanwhile, the same after a resumption."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from echelon.errors import StoreError
from echelon.runs.metrics import LOG, TABLE, MetricLog, is_timing, read_metrics


def _train(directory: Path, first: int, last: int, *, resume: int | None) -> None:
    """Steps 100, 200 …: losses always, a validation row of its own every third time."""
    with MetricLog(directory, resume_step=resume) as log:
        for step in range(first, last + 1, 100):
            log.write(step, {"losses/policy": math.sin(step), "time/steps_per_second": step})
            if step % 300 == 0:
                log.write(step, {"valid/sharpe_annual": math.cos(step)})


def without_clocks(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(name for name in frame.columns if not is_timing(name))


def test_rows_become_columns_with_null_for_what_a_row_has_not(tmp_path: Path) -> None:
    _train(tmp_path, 100, 300, resume=None)
    frame = read_metrics(tmp_path)
    assert frame.columns == [
        *("step", "seconds", "losses/policy", "time/steps_per_second", "valid/sharpe_annual")
    ]
    assert frame.dtypes == [pl.Int64, *[pl.Float64] * 4]
    assert frame["step"].to_list() == [100, 200, 300, 300]
    assert frame["valid/sharpe_annual"].to_list() == [None, None, None, math.cos(300)]
    assert (frame["seconds"].diff().drop_nulls() >= 0).all()
    assert_frame_equal(pl.read_parquet(tmp_path / TABLE), frame)


def test_log_is_readable_while_it_is_written(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, resume_step=None)
    for step in (1, 2, 3):
        log.write(step, {"losses/value": step})
        assert read_metrics(tmp_path)["step"].to_list() == list(range(1, step + 1))
    assert not (tmp_path / TABLE).exists()
    log.snapshot()
    assert_frame_equal(pl.read_parquet(tmp_path / TABLE), read_metrics(tmp_path))
    log.close()
    log.close()


def test_nan_and_infinity_are_values_and_the_lines_stay_json(tmp_path: Path) -> None:
    values = [math.nan, math.inf, -math.inf, -0.0, 0.1]
    with MetricLog(tmp_path, resume_step=None) as log:
        for step, value in enumerate(values):
            log.write(step, {"losses/value": value})

    def refuse(token: str) -> None:
        pytest.fail(f"{token} is not JSON")

    for line in (tmp_path / LOG).read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    for frame in (read_metrics(tmp_path), pl.read_parquet(tmp_path / TABLE)):
        np.testing.assert_array_equal(frame["losses/value"].to_numpy(), values)
        assert frame["losses/value"].null_count() == 0


def test_values_of_torch_and_numpy_are_taken_as_floats(tmp_path: Path) -> None:
    metrics = {"a/torch": torch.tensor(0.5), "a/numpy": np.float32(0.25), "a/int": 3}
    with MetricLog(tmp_path, resume_step=None) as log:
        log.write(1, metrics)
    assert read_metrics(tmp_path).row(0)[2:] == (0.5, 0.25, 3.0)


@given(values=st.lists(st.floats(width=64), max_size=6))
def test_any_float_returns_unchanged(
    values: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("log")
    with MetricLog(directory, resume_step=None) as log:
        for step, value in enumerate(values):
            log.write(step, {"m/x": value})
    frame = read_metrics(directory)
    got = frame["m/x"].to_list() if values else []
    np.testing.assert_array_equal(got, values)
    assert frame.height == len(values)


def test_resumed_log_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _train(whole, 100, 1200, resume=None)
    _train(parts, 100, 800, resume=None)  # its checkpoint is of step 600
    _train(parts, 700, 1200, resume=600)
    for read in (read_metrics, lambda path: pl.read_parquet(path / TABLE)):
        assert_frame_equal(without_clocks(read(parts)), without_clocks(read(whole)))
        assert (read(parts)["seconds"].diff().drop_nulls() >= 0).all()


def test_resuming_before_the_first_row_or_without_a_log_begins_empty(tmp_path: Path) -> None:
    _train(tmp_path, 100, 300, resume=None)
    MetricLog(tmp_path, resume_step=50).close()
    assert read_metrics(tmp_path).height == 0
    MetricLog(tmp_path / "new", resume_step=50).close()
    assert read_metrics(tmp_path / "new").columns == ["step", "seconds"]


def test_new_run_replaces_the_log_of_an_earlier_one(tmp_path: Path) -> None:
    _train(tmp_path, 100, 300, resume=None)
    _train(tmp_path, 100, 100, resume=None)
    assert read_metrics(tmp_path)["step"].to_list() == [100]


KILLED = """
import os, signal
from pathlib import Path
from echelon.runs.metrics import MetricLog
log = MetricLog(Path({root!r}), resume_step=None)
for step in (1, 2, 3):
    log.write(step, {{"losses/value": step / 3}})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_run_keeps_every_row_it_wrote(tmp_path: Path) -> None:
    script = KILLED.format(root=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_metrics(tmp_path)["losses/value"].to_list() == [1 / 3, 2 / 3, 1.0]


@pytest.mark.parametrize(
    "tail", [b'{"step": 4, "seco', b"\0\0\0\0", b'{"step": 4, "seconds": 1.0}']
)
def test_torn_last_line_is_dropped(tail: bytes, tmp_path: Path) -> None:
    _train(tmp_path, 100, 200, resume=None)
    with (tmp_path / LOG).open("ab") as handle:
        handle.write(tail)
    assert read_metrics(tmp_path)["step"].to_list() == [100, 200]
    _train(tmp_path, 300, 400, resume=200)
    assert read_metrics(tmp_path)["step"].to_list() == [100, 200, 300, 300, 400]


@pytest.mark.parametrize(
    "line",
    [
        *('{"step": 1', "[1]", "", "{}", '{"step": 1, "seconds": 0, "a/b": "x"}'),
        *('{"step": 1, "seconds": 0, "a/b": [1]}', '{"step": null, "seconds": 0}'),
    ],
)
def test_damaged_line_inside_is_an_error_that_names_it(line: str, tmp_path: Path) -> None:
    _train(tmp_path, 100, 200, resume=None)
    whole = (tmp_path / LOG).read_text()
    (tmp_path / LOG).write_text(f"{line}\n{whole}")
    for attempt in (read_metrics, lambda path: MetricLog(path, resume_step=200)):
        with pytest.raises(
            StoreError, match=rf"{LOG}: missing or damaged \(line 1: .*start the run again"
        ):
            attempt(tmp_path)


def test_run_without_a_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"{LOG}: no such file. Name the directory of a run"):
        read_metrics(tmp_path)


def test_table_alone_is_enough_unless_it_is_damaged(tmp_path: Path) -> None:
    _train(tmp_path, 100, 300, resume=None)
    frame = read_metrics(tmp_path)
    (tmp_path / LOG).unlink()
    assert_frame_equal(read_metrics(tmp_path), frame)
    (tmp_path / TABLE).write_bytes(b"PAR1")
    with pytest.raises(StoreError, match=rf"{TABLE}: missing or damaged"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("name", ["loss", "", "losses/", "/x", "losses/a b", "step"])
def test_metric_without_a_prefixed_name_is_refused(name: str, tmp_path: Path) -> None:
    with (
        MetricLog(tmp_path, resume_step=None) as log,
        pytest.raises(ValueError, match="expected a prefixed name such as losses/value"),
    ):
        log.write(1, {name: 1.0})
    assert read_metrics(tmp_path).height == 0


def test_step_that_goes_back_is_refused(tmp_path: Path) -> None:
    _train(tmp_path, 100, 300, resume=None)
    with MetricLog(tmp_path, resume_step=200) as log:
        with pytest.raises(ValueError, match="step 199 after step 200"):
            log.write(199, {"a/b": 1.0})
        log.write(200, {"a/b": 1.0})


class _FullDisk:
    """A file that takes half of what is written, then says the disk is full."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.closed = False

    def write(self, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.closed = True
        self._file.close()


def test_full_disk_leaves_no_half_row_and_the_log_goes_on_after(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, resume_step=None)
    log.write(1, {"a/b": 1.0})
    before = (tmp_path / LOG).read_bytes()
    real = log._file
    log._file = _FullDisk(real)  # type: ignore[assignment]
    with pytest.raises(StoreError, match=rf"{LOG}: .*No space left on device.*rows so far are int"):
        log.write(2, {"a/b": 2.0})
    assert (tmp_path / LOG).read_bytes() == before
    log._file = real
    log.write(2, {"a/b": 3.0})
    log.close()
    assert read_metrics(tmp_path)["a/b"].to_list() == [1.0, 3.0]


def test_table_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(tmp_path, 100, 200, resume=None)
    before = (tmp_path / TABLE).read_bytes()
    log = MetricLog(tmp_path, resume_step=200)
    log.write(300, {"a/b": 1.0})

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=rf"{TABLE}: cannot be written"):
        log.snapshot()
    monkeypatch.undo()
    assert (tmp_path / TABLE).read_bytes() == before
    log.close()
    assert pl.read_parquet(tmp_path / TABLE)["step"].to_list() == [100, 200, 300]
