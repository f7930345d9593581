"""Worker processes are born as if this one had started them by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from echelon.workers import IMPORTED, start_worker


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
        worker = start_worker(_tell, "ECHELON_PLANTED")
        process, pipe = worker.process, worker.pipe
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


def _multiply(pipe: Connection) -> None:
    import numpy as np
    import torch

    torch.set_num_threads(2)
    x = np.ones((700, 700), dtype=np.float32)
    pipe.send((float((x @ x)[0, 0]), float((torch.from_numpy(x) @ torch.from_numpy(x))[0, 0])))


def test_workers_may_use_threads_though_the_helper_multiplied_with_threads(tmp_path: Path) -> None:
    """A copy of a process whose OpenMP has threads hangs in its first parallel loop."""
    (tmp_path / "planted.py").write_text(
        "import numpy as np, torch\n"
        "x = np.ones((700, 700), dtype=np.float32)\n"
        "for _ in range(3):\n"
        "    x @ x\n"
        "    torch.from_numpy(x) @ torch.from_numpy(x)\n"
        "torch.ones(1_000_000).sum()\n"
    )
    (tmp_path / "run.py").write_text(
        "from echelon import workers as module\n"
        "from test_processes import _multiply\n"
        "if __name__ == '__main__':\n"
        "    module.IMPORTED = (*module.IMPORTED, 'planted')\n"
        "    workers = [module.start_worker(_multiply) for _ in range(3)]\n"
        "    for worker in workers:\n"
        "        if not worker.pipe.poll(90):\n"
        "            for hanging in workers: hanging.process.kill()\n"
        "            raise SystemExit('a worker hangs')\n"
        "        assert worker.pipe.recv() == (700.0, 700.0)\n"
        "        worker.process.join()\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path])
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py")],
        env=os.environ | threads | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
