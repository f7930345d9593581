"""scripts/compare_proofs.py: paired differences of two certificates, by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.proving.certificate import Certificate, MarketResult, over_seeds

ROOT = Path(__file__).parents[1]


def certificate(
    directory: Path,
    agent: list[float],
    seeds: list[int],
    name: str = "planted",
    signal: str = "trend",
) -> str:
    market = MarketResult(
        name=name,
        checks=(over_seeds("trend_share", "share", [a / 4 for a in agent]),),
        seconds=1.0,
        cpu_seconds=1.0,
        facts={"seeds": seeds},
        rows={f"{signal}/agent": agent, f"{signal}/bayes": [4.0] * len(agent)},
    )
    about = {"command": "", "finished": "", "seconds": 1.0}
    return str(Certificate("full", (market,), about).write(directory))


def compare(*paths: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/compare_proofs.py"), *paths],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_difference_is_that_of_pairs_with_students_interval(tmp_path: Path) -> None:
    first = certificate(tmp_path / "a", [3.0, 3.2, 3.6], [1, 2, 3])
    second = certificate(tmp_path / "b", [3.2, 3.4, 3.7], [1, 2, 3])
    done = compare(first, second)
    assert done.returncode == 0, done.stderr
    # Differences in shares: .05, .05, .025; mean .041667, deviation .0144338, t(2) = 4.30265.
    half = 4.30265 * 0.0144338 / math.sqrt(3)
    low, high = 100 * (0.0416667 - half), 100 * (0.0416667 + half)
    assert done.stdout.strip().endswith(f"difference 4.2 % ({low:.1f} % to {high:.1f} %)")
    assert done.stdout.startswith("trend, 3 seeds: 81.7 %")


@pytest.mark.parametrize("fault", ["seeds", "market", "file", "signal"])
def test_what_cannot_be_paired_is_refused(fault: str, tmp_path: Path) -> None:
    first = certificate(tmp_path / "a", [3.0, 3.2], [1, 2])
    other = [1, 3] if fault == "seeds" else [1, 2]
    name = "null" if fault == "market" else "planted"
    signal = "reversion" if fault == "signal" else "trend"
    second = certificate(tmp_path / "b", [3.0, 3.2], other, name, signal)
    if fault == "file":
        Path(second).write_text(json.dumps({"format": 1}))
    done = compare(first, second)
    assert done.returncode == 1
    expected = {
        "seeds": "same seeds",
        "market": "no planted market",
        "file": "damaged",
        "signal": "no signal in common",
    }
    assert expected[fault] in done.stderr
    assert str(tmp_path / "b") in done.stderr
