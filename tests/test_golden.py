"""No change moves a backtest unnoticed: see golden.py for what to do when one is meant to."""

from __future__ import annotations

from pathlib import Path

import golden
import numpy as np
import pytest

from echelon.backtest.run import Backtest

HOW = "a result moved; if that is meant, see tests/golden.py and say so in the changelog"
CLOSE = 1e-9
"""Relative: the last digits differ between processors."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> dict[str, Backtest]:
    return golden.backtests(tmp_path_factory.mktemp("golden"), bars_file)


@pytest.mark.parametrize("name", golden.CASES)
def test_trades_and_values_are_those_written_down(name: str, found: dict[str, Backtest]) -> None:
    trades, values = golden.read(name)
    mine = found[name].blotter()
    assert mine.height == trades.height > 10, HOW
    for column in ("time", "symbol", "side", "not_filled"):
        assert mine[column].to_list() == trades[column].to_list(), f"{column}: {HOW}"
    for column in ("shares", "price", "amount", "commission", "stamp", "slippage"):
        np.testing.assert_allclose(
            mine[column].to_numpy(), trades[column].to_numpy(), CLOSE, 1e-9, err_msg=HOW
        )
    np.testing.assert_allclose(found[name].value, values, CLOSE, err_msg=HOW)
    assert found[name].value.std() > 0.0


def test_written_cases_are_the_cases_that_are_run() -> None:
    assert {path.stem for path in golden.HERE.glob("*.csv")} == golden.CASES.keys()


def test_a_changed_fee_is_noticed(
    found: dict[str, Backtest], tmp_path: Path, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dearer = golden.Case("momentum", ("fee_rate=0.000501",))
    monkeypatch.setattr(golden, "CASES", {"momentum-paper": dearer})
    moved = golden.backtests(tmp_path, bars_file)
    _, values = golden.read("momentum-paper")
    assert not np.allclose(moved["momentum-paper"].value, values, CLOSE, 0.0)
