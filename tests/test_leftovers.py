"""What a killed process leaves behind goes with the next one; what a living one uses stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon import files
from echelon.config.data import CacheConfig
from echelon.features.cache import open_caches
from echelon.files import UNPROVEN_SECONDS, scratch_directory, staging_directory, sweep
from echelon.runs import RunDirectory
from echelon.runs.registry import TrialRegistry

STAGING = (
    "with staging_directory(place / 'cache') as one, scratch_directory('ticks') as two, "
    "staging_directory(place / 'run' / 'seeds' / '1', '.best-') as three, "
    "atomic_file(place / 'run' / 'seeds' / '1' / 'result.json') as half:\n"
    "    for directory in (one, two, three):\n"
    "        (directory / 'X.npy').write_bytes(bytes(1000))\n"
    "    half.write(b'{'); half.flush()\n"
    "    print('ready', flush=True); time.sleep(600)\n"
)
WORKER = (
    "def work(pipe):\n"
    "    import tempfile\n"
    "    tempfile.mkdtemp()\n"
    "    print('ready', flush=True); time.sleep(600)\n"
    "if __name__ == '__main__':\n"
    "    import tempfile\n"
    "    from echelon.workers import start_worker\n"
    "    worker = start_worker(work); print(worker.process.pid, flush=True); time.sleep(600)\n"
)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's directory of temporary files, as a short name: sockets go into it."""
    del tmp_path
    with tempfile.TemporaryDirectory(prefix="left", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(files, "_swept", set())
        yield Path(name)


@contextmanager
def process(script: str, place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to work in `place`; killed with its workers at the end."""
    file = place / "work.py"
    head = (
        "import time\nfrom pathlib import Path\n"
        "from echelon.files import atomic_file, scratch_directory, staging_directory\n"
        f"place = Path({str(place)!r})\n"
    )
    file.write_text(head + script)
    done = subprocess.Popen(
        [sys.executable, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a killed parent's helper complains there
        text=True,
        start_new_session=True,
    )
    assert done.stdout is not None
    try:
        while (line := done.stdout.readline()) and line != "ready\n":
            pass
        assert line == "ready\n"
        yield done
    finally:
        os.killpg(done.pid, signal.SIGKILL)
        done.wait()
        done.stdout.close()


def begin(place: Path) -> None:
    """What commands do where they begin to write."""
    open_caches(CacheConfig(dir=place / "cache"))
    RunDirectory.claim(place / "run")


def leftovers(place: Path) -> set[str]:
    return {p.name for p in place.rglob("*") if "-" in p.name or p.suffix == ".tmp"}


def test_leftovers_of_a_killed_process_go_and_those_of_a_living_one_stay(
    tmp_path: Path, scratch: Path
) -> None:
    with process(STAGING, tmp_path):
        made = leftovers(tmp_path) | leftovers(scratch)
        assert len(made) == 4
        begin(tmp_path)
        assert leftovers(tmp_path) | leftovers(scratch) == made
    assert leftovers(tmp_path) | leftovers(scratch) == made
    files._swept.clear()  # as in a new process
    begin(tmp_path)
    assert leftovers(tmp_path) | leftovers(scratch) == set()


WRITING = """
with atomic_file(place / "trials.json") as handle:
    handle.write(b"half")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_half_written_file_of_the_registry_goes_with_the_next_look(tmp_path: Path) -> None:
    with process(WRITING, tmp_path):
        assert len(leftovers(tmp_path)) == 1
    assert len(leftovers(tmp_path)) == 1
    TrialRegistry(tmp_path).begin()
    assert leftovers(tmp_path) == set()
    assert (tmp_path / "trials.json").is_file()


def test_only_names_of_ours_go_from_the_system_s_directory(scratch: Path) -> None:
    others = ("pymp-0a1b2c3d", "tmpabc", ".pip-0123456789abcdef", "echelon-notes")
    for name in (*others, "echelon-ticks-own"):
        (scratch / name).mkdir()
        os.utime(scratch / name, (0, 0))
    with scratch_directory("check"):
        pass
    assert {p.name for p in scratch.iterdir()} == {*others, "echelon-ticks-own"}


def test_workers_and_their_helper_leave_nothing_in_the_system_s_directory(
    tmp_path: Path, scratch: Path
) -> None:
    with process(WORKER, tmp_path) as parent:
        (ours,) = scratch.iterdir()
        assert ours.name.startswith("echelon-mp-")
        inside = {p.name[:4] for p in ours.iterdir()}
        assert {"pymp"} < inside  # the helper's, and what the worker made
        parent.kill()
        parent.wait()
        with scratch_directory("check"):
            pass
        assert ours.exists()  # the worker, which goes on, still uses it
    deadline = time.monotonic() + 60
    while ours.exists() and time.monotonic() < deadline:
        files._swept.clear()
        with scratch_directory("check"):
            pass
        time.sleep(0.1)
    assert list(scratch.iterdir()) == []


def aged(path: Path, seconds: float) -> Path:
    for inside in (path, *path.rglob("*")):
        os.utime(inside, (time.time() - seconds,) * 2)
    return path


@pytest.mark.parametrize(
    "name",
    [
        ".staging-0123456789ab",  # of an earlier version
        ".result.json.01234567.tmp",
        ".staging-0123456789abcdef",  # of another machine, or of this one before it was restarted
        ".result.json.0123456789abcdef.tmp",
    ],
)
def test_what_cannot_be_proven_dead_goes_a_day_after_its_last_change(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if name.endswith(".tmp"):
        path.write_text("{")
    else:
        path.mkdir()
        (path / "X.npy").write_bytes(bytes(10))
    aged(path, UNPROVEN_SECONDS - 600)
    sweep(tmp_path)
    assert path.exists()
    aged(path, UNPROVEN_SECONDS + 600)
    if path.is_dir():
        os.utime(path / "X.npy")  # somebody still writes there
        sweep(tmp_path)
        assert path.exists()
        aged(path, UNPROVEN_SECONDS + 600)
    sweep(tmp_path)
    assert not path.exists()


def dead(directory: Path) -> Path:
    """A leftover whose owner is proven to have ended."""
    path = directory / f".staging-{files._token(directory)}"
    path.mkdir()
    return path


def test_what_belongs_to_another_user_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dead(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        sweep(tmp_path)
    assert path.exists()
    sweep(tmp_path)
    assert not path.exists()


def test_files_and_links_that_only_look_alike_stay(tmp_path: Path) -> None:
    aside = tmp_path / f".prepared-{files._token(tmp_path)}.old"  # what a swap set aside
    target = tmp_path / "target"
    for directory in (aside, target):
        directory.mkdir()
        (directory / "kept").touch()
    link = tmp_path / f".staging-{files._token(tmp_path)}"
    link.symlink_to(target)
    notes = tmp_path / "notes.0123456789abcdef.tmp"
    notes.touch()
    os.utime(notes, (0, 0))
    sweep(tmp_path)
    assert (aside / "kept").exists()
    assert (target / "kept").exists()
    assert link.is_symlink()
    assert notes.exists()


def test_staging_ends_with_its_block_and_leaves_a_renamed_directory_alone(tmp_path: Path) -> None:
    with staging_directory(tmp_path) as first, staging_directory(tmp_path) as second:
        (first / "X.npy").touch()
        first.rename(tmp_path / "entry")
        sweep(tmp_path)
        assert second.exists()
    assert [p.name for p in tmp_path.rglob("*")] == ["entry", "X.npy"]
