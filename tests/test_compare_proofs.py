"""scripts/compare_proofs.py: paired differences of two certificates, by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from echelon.errors import EchelonError, UsageError
from echelon.proving.certificate import Certificate, MarketResult, seed_check
from scripts.compare_proofs import compared, main


def certificate(
    directory: Path,
    agent: list[float],
    seeds: list[int],
    name: str = "planted",
    signal: str = "trend",
    bars: int = 6000,
    **facts: object,
) -> str:
    market = MarketResult(
        name=name,
        checks=(seed_check("trend_share", "share", [a / 4 for a in agent]),),
        seconds=1.0,
        cpu_seconds=1.0,
        facts={"seeds": seeds, "draws": 16, "kind": "weights", **facts},
        rows={f"{signal}/agent": agent, f"{signal}/bayes": [4.0] * len(agent)},
    )
    about = {"command": "", "finished": "", "seconds": 1.0, "sizes": {"bars": bars}}
    Certificate("full", (market,), about).write(directory)
    return str(directory / "certificate.json")


class Said(NamedTuple):
    """What the script answered."""

    code: int
    out: str
    err: str


Compare = Callable[..., Said]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    """The script's `main`, here: a process of its own would mostly import."""

    def run(*paths: str) -> Said:
        code = main(paths)
        return Said(code, *capsys.readouterr())

    return run


def test_the_difference_is_that_of_pairs_with_students_interval(tmp_path: Path) -> None:
    first = certificate(tmp_path / "a", [3.0, 3.2, 3.6], [1, 2, 3])
    second = certificate(tmp_path / "b", [3.2, 3.4, 3.7], [1, 2, 3])
    script = Path(__file__).parents[1] / "scripts" / "compare_proofs.py"
    done = subprocess.run(
        [sys.executable, str(script), first, second], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Differences in shares: .05, .05, .025; mean .041667, deviation .0144338, t(2) = 4.30265.
    half = 4.30265 * 0.0144338 / math.sqrt(3)
    low, high = 100 * (0.0416667 - half), 100 * (0.0416667 + half)
    assert done.stdout.strip().endswith(f"difference 4.2 % ({low:.1f} % to {high:.1f} %)")
    assert done.stdout.startswith("trend, 3 seeds: 81.7 %")


@pytest.mark.parametrize("fault", ["seeds", "market", "file", "signal"])
def test_what_cannot_be_paired_is_refused(fault: str, compare: Compare, tmp_path: Path) -> None:
    first = certificate(tmp_path / "a", [3.0, 3.2], [1, 2])
    other = [1, 3] if fault == "seeds" else [1, 2]
    name = "null" if fault == "market" else "planted"
    signal = "reversion" if fault == "signal" else "trend"
    second = certificate(tmp_path / "b", [3.0, 3.2], other, name, signal)
    if fault == "file":
        Path(second).write_text(json.dumps({"format": 1}))
    done = compare(first, second)
    assert done.code == 1
    expected = {
        "seeds": "same seeds",
        "market": "no planted market",
        "file": "damaged",
        "signal": "no signal in common",
    }
    assert expected[fault] in done.err
    assert str(tmp_path / "b") in done.err


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"draws": 8}, "the test draws are others"),
        ({"bars": 3000}, "another length"),
        ({"kind": "discrete"}, "buy, sell and hold"),
    ],
)
def test_what_was_made_on_other_draws_or_in_another_way_is_refused(
    facts: dict[str, Any], said: str, compare: Compare, tmp_path: Path
) -> None:
    first = certificate(tmp_path / "a", [3.0, 3.2], [1, 2])
    second = certificate(tmp_path / "b", [3.0, 3.2], [1, 2], **facts)
    done = compare(first, second)
    assert done.code == 1
    assert said in done.err
    assert "--bars" in done.err


def odd(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    tree = json.loads(path.read_text(encoding="utf-8"))
    change(tree["markets"][0])
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["rows"].pop("trend/bayes"), "no trend/bayes"),
        (
            lambda m: m["rows"]["trend/agent"].__setitem__(1, None),
            "should be a valid number",
        ),
        (lambda m: m["rows"]["trend/bayes"].__setitem__(0, 0.0), "seed 1 has no number"),
        (lambda m: m["rows"]["trend/bayes"].pop(), "trend/agent has 2 values, trend/bayes 1"),
        (lambda m: m["rows"]["trend/agent"].append(3.0), "trend/agent has 3 values"),
        (lambda m: m.pop("rows"), "no signal in common"),
        (lambda m: m["facts"].pop("seeds"), "says no seeds"),
    ],
)
def test_odd_certificates_are_named_and_not_a_traceback(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    first = Path(certificate(tmp_path / "a", [3.0, 3.2], [1, 2]))
    second = odd(Path(certificate(tmp_path / "b", [3.0, 3.2], [1, 2])), change)
    with pytest.raises(EchelonError, match=said) as caught:
        compared(first, second)
    assert str(second) in str(caught.value)


def test_fewer_seeds_of_one_signal_are_refused(tmp_path: Path) -> None:
    first = Path(certificate(tmp_path / "a", [3.0, 3.2], [1, 2]))
    second = Path(certificate(tmp_path / "b", [3.0], [1, 2]))
    with pytest.raises(UsageError, match="2 seeds of trend"):
        compared(first, second)


def test_an_older_certificate_is_compared_by_what_it_says(tmp_path: Path) -> None:
    first = Path(certificate(tmp_path / "a", [3.0, 3.2], [1, 2], kind="discrete"))
    odd(first, lambda m: m["facts"].pop("kind"))
    tree = json.loads(first.read_text(encoding="utf-8"))
    del tree["about"]["sizes"]
    first.write_text(json.dumps(tree), encoding="utf-8")
    second = Path(certificate(tmp_path / "b", [3.0, 3.2], [1, 2], kind="discrete"))
    (row,) = compared(first, second)
    assert row.difference.estimate == 0.0
