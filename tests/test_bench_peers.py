"""Peers of the benchmarks: kept outside the repository, and missed loudly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import _peers


def test_peers_live_outside_the_repository_and_can_be_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ECHELON_BENCH_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert _peers.home() == tmp_path / "user" / ".cache" / "echelon-bench"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert _peers.home() == tmp_path / "cache" / "echelon-bench"
    monkeypatch.setenv("ECHELON_BENCH_DIR", str(tmp_path / "chosen"))
    assert _peers.home() == tmp_path / "chosen"


def test_peer_that_cannot_be_had_fails_and_leaves_nothing(tmp_path: Path) -> None:
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    code = "from bench import _peers; _peers.unpacked('Nobody', 'nobody-has-this==1.0')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **nowhere, "ECHELON_BENCH_DIR": str(tmp_path / "peers")},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Nobody is not in" in done.stderr
    assert "nothing is compared" in done.stderr
    assert list((tmp_path / "peers").iterdir()) == []
