"""Planted, costly, leaky and regime: their parts on tiny sizes, their verdicts by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from provings import shrink_leaky, tiny_config

from echelon.features import Prepared
from echelon.market import resolve_rules
from echelon.proving.certificate import MarketResult
from echelon.proving.leaky import FACTOR, LeakyAgentPart, LeakyCheckPart, assess_leaky
from echelon.proving.parts import Done, Finding
from echelon.proving.planted import (
    PLANTED,
    BayesFilter,
    CostlyPart,
    PlantedMarket,
    PlantedPart,
    ThresholdFilter,
    assess_costly,
    assess_planted,
    best_thresholds,
)
from echelon.proving.regime import (
    BLIND,
    CHOOSING,
    ReferencesPart,
    RegimeAgentPart,
    RegimeMarket,
    assess_regime,
    by_pair,
)
from echelon.proving.worlds import at_fee, planted_worlds, proof_config, trade_draws
from echelon.runs.registry import TrialRegistry

CONFIG = proof_config(tiny_config())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def found(part: Any, directory: Path) -> Finding:
    made = part.run(directory, lambda _: None, lambda: False)
    assert made is not None
    return dict(made)


def done(key: str, finding: Finding) -> Done:
    return Done(key, finding, 1.0, 2.0, "code")


def passed(result: MarketResult) -> dict[str, bool | None]:
    return {check.name: check.passed for check in result.checks}


@pytest.mark.parametrize("signal", list(PLANTED))
def test_every_signal_is_trained_on_and_tested_against_its_filter(
    signal: str, tmp_path: Path
) -> None:
    market = PLANTED[signal](n_bars=200, n_assets=4)
    finding = found(PlantedPart(CONFIG, market, 3, 2), tmp_path)
    assert {"agent", "bayes"} < set(finding["sharpes"])
    assert all(len(values) == 2 for values in finding["sharpes"].values())
    assert finding["steps"] == 400
    assert not (tmp_path / "returns.npz").exists()


def test_a_stopped_training_has_no_finding(tmp_path: Path) -> None:
    part = PlantedPart(CONFIG, PlantedMarket(n_bars=200, n_assets=3), 3, 2)
    assert part.run(tmp_path, lambda _: None, lambda: True) is None


def planted(signal: str, shares: list[float]) -> list[Done]:
    return [
        done(
            f"planted-{signal}-{seed}",
            {
                "seed": seed,
                "steps": 100,
                "best_step": 50,
                "sharpes": {"agent": [3.0 * share, 5.0 * share], "bayes": [3.0, 5.0]},
            },
        )
        for seed, share in enumerate(shares)
    ]


def test_share_is_the_ratio_of_mean_sharpe_ratios() -> None:
    sharpes = {"agent": [1.0, 3.0], "bayes": [4.0, 4.0]}
    finding = {"seed": 1, "steps": 5, "best_step": 0, "sharpes": sharpes}
    result = assess_planted([done("planted-trend-1", finding)])
    assert result.checks[0].estimate == 0.5


def test_trend_needs_the_mean_and_the_lower_end() -> None:
    """Mean 0.90 and standard deviation 0.02 over four: 0.90 ± 3.18245 · 0.01."""
    result = assess_planted(
        planted("trend", [0.90 - 0.02 * np.sqrt(1.5), 0.9, 0.9, 0.90 + 0.02 * np.sqrt(1.5)])
    )
    (check,) = result.checks
    assert check.estimate == pytest.approx(0.90)
    assert check.low == pytest.approx(0.90 - 3.182446 * 0.01, abs=1e-6)
    assert (check.method, check.n, check.passed) == ("t", 4, True)
    assert result.rows["trend/agent"][1] == pytest.approx(3.6)
    assert result.facts["seeds"] == [0, 1, 2, 3]
    wide = assess_planted(planted("trend", [0.80, 1.0, 0.9]))
    assert passed(wide) == {"trend_share": False}
    low = assess_planted(planted("trend", [0.84, 0.841, 0.842]))
    assert passed(low) == {"trend_share": False}
    single = assess_planted(planted("trend", [0.95]))
    assert passed(single) == {"trend_share": False}, "one seed has no interval"


def test_other_signals_are_held_to_finding_anything() -> None:
    parts = [*planted("trend", [0.9, 0.91]), *planted("reversion", [0.2, 0.21])]
    result = assess_planted(parts)
    assert passed(result) == {"trend_share": True, "reversion_share": True}
    assert result.notes == ("planted_others",)
    nothing = [*planted("trend", [0.9, 0.91]), *planted("reversion", [0.2, -0.3])]
    assert passed(assess_planted(nothing)) == {"trend_share": True, "reversion_share": False}


def test_a_fee_is_the_only_cost() -> None:
    config = at_fee(tiny_config("market.preset=cn", "market.slippage_bps=30"), 500.0)
    rules = resolve_rules(config, calendar=None)
    assert rules.rules.commission == pytest.approx(0.05)
    assert rules.rules.min_commission == 0.0
    assert rules.rules.slippage_model == 0
    assert not rules.stamp_duty


def test_thresholds_of_one_half_are_the_bayes_filter() -> None:
    market = PlantedMarket(n_bars=300, n_assets=4, flip=0.04)
    worlds = planted_worlds([market.draw(k, "x") for k in range(2)], CONFIG)
    plain = trade_draws(BayesFilter(market), worlds, CONFIG)
    same = trade_draws(ThresholdFilter(market, np.array([[0.5, 0.5]])), worlds, CONFIG)
    assert np.array_equal(plain.returns, same.returns)


def test_the_best_thresholds_trade_less_where_trading_costs_more() -> None:
    market = PlantedMarket(n_bars=800, n_assets=4, flip=0.04)
    turnover = []
    for fee in (5.0, 500.0):
        config = at_fee(CONFIG, fee)
        (world,) = planted_worlds([market.draw(0, "x")], config)
        pair = best_thresholds(market, [world], config)
        assert pair[0] >= pair[1]
        traded = trade_draws(ThresholdFilter(market, np.array([pair])), [world], config)
        turnover.append(float(traded.turnover[0]))
    assert turnover[1] < 0.2 * turnover[0]


def test_costly_trains_and_tests_at_its_fee(tmp_path: Path) -> None:
    market = PlantedMarket(n_bars=200, n_assets=3, flip=0.04)
    finding = found(CostlyPart(CONFIG, market, 500.0, 1, 2, 150), tmp_path)
    assert set(finding["sharpes"]) == set(finding["turnover"]) == {"agent", "bayes", "thresholds"}
    assert np.mean(finding["sharpes"]["bayes"]) < -2, "the filter ignores what trading costs"


def costly(fee: float, seed: int, sharpe: float, turnover: float) -> Done:
    values = {"agent": [sharpe] * 2, "bayes": [2.0] * 2, "thresholds": [2.1] * 2}
    traded = {"agent": [turnover] * 2, "bayes": [25.0] * 2, "thresholds": [20.0] * 2}
    finding = {"seed": seed, "fee_bps": fee, "steps": 10, "thresholds": [0.5, 0.5]}
    return done(f"costly-{fee:g}bp-{seed}", finding | {"sharpes": values, "turnover": traded})


def test_costly_needs_half_the_filter_and_a_twentieth_of_the_turnover() -> None:
    good = [
        costly(5, 1, 1.2, 20),
        costly(5, 2, 1.0, 10),
        costly(500, 1, 0, 0.6),
        costly(500, 2, 0, 0.1),
    ]
    result = assess_costly(good)
    share, turnover = result.checks
    assert share.estimate == pytest.approx(0.55)
    assert turnover.estimate == pytest.approx((0.03 + 0.01) / 2)
    assert passed(result) == {"costly_share": True, "costly_turnover": True}
    bad = [costly(5, 1, 0.9, 20), costly(500, 1, 0, 1.2)]
    assert passed(assess_costly(bad)) == {"costly_share": False, "costly_turnover": False}
    still = [costly(5, 1, 1.2, 0.0), costly(500, 1, 0, 0.1)]
    assert passed(assess_costly(still))["costly_turnover"] is False


def test_the_leakage_check_refuses_the_peeking_factor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_leaky(monkeypatch)
    finding = found(LeakyCheckPart(tiny_config()), tmp_path)
    assert finding["refused"] == [FACTOR]
    assert finding["checked"] == 3
    assert "without later bars" in finding["detail"]


def test_leaky_runs_the_whole_line_with_the_file_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_leaky(monkeypatch)
    for peeks in (True, False):
        directory = tmp_path / str(peeks)
        finding = found(LeakyAgentPart(tiny_config(), 7, peeks), directory)
        assert (finding["peeks"], finding["seed"], finding["steps"]) == (peeks, 7, 400)
        assert np.isfinite(finding["sharpe"])
        assert (FACTOR in Prepared.open(directory / "run").names) is peeks
        assert TrialRegistry.for_run(directory / "run").path == directory.resolve() / "registry"


def leaky(refused: list[str], peeking: float, honest: float) -> MarketResult:
    check = done("leaky-check", {"refused": refused, "checked": 3, "where": "", "detail": ""})
    agents = [
        done("x", {"seed": 1, "peeks": peeks, "steps": 5, "sharpe": sharpe, "equal_weight": 0.1})
        for peeks, sharpe in ((True, peeking), (False, honest))
    ]
    return assess_leaky([check, *agents])


def test_leaky_needs_the_refusal_and_the_absurd_sharpe() -> None:
    good = leaky([FACTOR], 9.0, 0.2)
    assert passed(good) == {"leaky_refused": True, "leaky_sharpe": True, "leaky_gap": True}
    assert passed(leaky([], 9.0, 0.2))["leaky_refused"] is False
    assert passed(leaky([FACTOR, "ret_1"], 9.0, 0.2))["leaky_refused"] is False
    assert passed(leaky([FACTOR], 4.9, 0.2))["leaky_sharpe"] is False
    assert passed(leaky([FACTOR], 9.0, 7.0))["leaky_gap"] is False


def test_regime_references_are_measured_by_pair(tmp_path: Path) -> None:
    market = RegimeMarket(n_bars=300, n_assets=3)
    finding = found(ReferencesPart(CONFIG, market, 2), tmp_path)
    assert {*BLIND, *CHOOSING, "regime-aware"} == set(finding["sharpes"])
    assert all(len(values) == 2 for values in finding["sharpes"].values())


def test_a_pair_is_the_mean_of_a_draw_and_its_mirror() -> None:
    returns = np.array([[0.02, -0.02, 0.01, 0.01], [0.0, 0.0, 0.03, 0.03]])
    single = np.sqrt(252) * 0.02 / np.sqrt(2e-4)
    assert by_pair(returns) == pytest.approx([0.0, single])


@pytest.mark.parametrize("shown", [False, True])
def test_flat_agents_see_the_signal_and_no_holdings(shown: bool, tmp_path: Path) -> None:
    market = RegimeMarket(n_bars=300, n_assets=3)
    finding = found(RegimeAgentPart(CONFIG, market, 1, 5, shown), tmp_path)
    assert len(finding["sharpes"]) == 1
    assert finding["steps"] == 400


def test_those_that_choose_must_beat_the_best_of_the_blind_in_every_pair() -> None:
    sharpes = {
        **{"equal weight": [0.1, 0.0, 0.1], "follow": [0.5, -0.4, 0.0], "oppose": [-0.5, 0.4, 0.0]},
        **{"trailing 40": [2.5, 2.3, 2.1], "fixed-share hedge": [2.6, 2.4, 2.2]},
        **{"regime filter": [0.6, 0.5, -0.4], "regime-aware": [3.0, 2.9, 3.1]},
    }
    result = assess_regime([done("regime-references", {"sharpes": sharpes})])
    assert passed(result) == {
        "regime_trailing 40": True,
        "regime_fixed-share hedge": True,
        "regime_regime filter": False,
    }
    assert result.checks[0].estimate == pytest.approx((2.0 + 1.9 + 2.0) / 3)
    assert "regime_references_only" in result.notes
    agents = [
        done(f"regime-{kind}-1", {"seed": 1, "steps": 5, "sharpes": [0.0, 0.1, 0.2]})
        for kind in ("flat", "shown")
    ]
    more = assess_regime([done("regime-references", {"sharpes": sharpes}), *agents])
    assert passed(more)["regime_flat_agent"] is None
    assert more.rows["shown agent"] == [0.0, 0.1, 0.2]
    assert "regime_agents" in more.notes


def test_an_agent_part_is_named_by_what_it_is() -> None:
    part = RegimeAgentPart(CONFIG, RegimeMarket(), 1, 5, shown=True)
    assert part.key == "regime-shown-5"
    assert replace(part, shown=False).key == "regime-flat-5"
