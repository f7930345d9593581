"""Worker processes are born as if this one had started them by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from echelon.agents.processes import IMPORTED, hire


def _tell(pipe: Connection, name: str) -> None:
    pipe.send((os.environ.get(name), os.getcwd()))  # noqa: PTH109 (as text)


def test_a_worker_has_the_environment_and_directory_of_the_time_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("first", "second", None):
        if value is None:
            monkeypatch.delenv("ECHELON_PLANTED")
        else:
            monkeypatch.setenv("ECHELON_PLANTED", value)
        here = tmp_path / str(value)
        here.mkdir()
        monkeypatch.chdir(here)
        process, pipe = hire(_tell, "ECHELON_PLANTED")
        assert pipe.poll(60)
        assert pipe.recv() == (value, str(here))
        process.join()
        assert process.exitcode == 0
        pipe.close()


def test_the_helper_has_one_thread_when_it_forks() -> None:
    script = (
        f"import os, sys, {', '.join(IMPORTED)}; "
        "sys.exit(' '.join(os.listdir('/proc/self/task')[1:]) "
        "+ ' '.join({'polars', 'pandas', 'pyarrow'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
