"""Agents that say target weights on the proving ground: every market, with references of theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markets import CONFIGS
from provings import SIZES, TINY, shrink_leaky, shrink_quick, tiny_config
from typer.testing import CliRunner

from echelon.cli import app
from echelon.config import Config, load_config
from echelon.envs.act import Holdings
from echelon.errors import EchelonError
from echelon.proving import regime
from echelon.proving.planted import (
    BayesFilter,
    CostlyPart,
    PlantedMarket,
    ThresholdFilter,
    best_thresholds,
    own_draws,
)
from echelon.proving.prove import FULL, PROOF_MARKETS, plan
from echelon.proving.regime import RegimeAgentPart, RegimeMarket
from echelon.proving.worlds import (
    Trained,
    at_fee,
    planted_worlds,
    proof_config,
    trade_draws,
    train_agent,
)
from echelon.report.texts import Words
from echelon.training.run import Worlds

SMALL = (
    *("expert.hidden=8", "expert.batch_size=16", "expert.buffer_size=400"),
    *("expert.learning_starts=40", "pretrain.epochs=1", "pretrain.horizons=[1]"),
)
EXPERT = ("train.algo=SAC", *SMALL)
MARKET = PlantedMarket(n_bars=500, n_assets=4, flip=0.04)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regime, "EXPERT_PAIRS", (1, 1))


def test_an_expert_is_proved_on_all_five_markets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_leaky(monkeypatch)
    shrink_quick(monkeypatch, replace(SIZES, planted_seeds=1, own_draws=(2, 2)))
    settings = [word for item in (*TINY, *SMALL) for word in ("-o", item)]
    where = ("--config", str(CONFIGS / "sac.yaml"), "-o", "model.encoder=TimeCNN")
    command = ("prove", "--quick", "--workers", "1", "--output-dir", str(tmp_path))
    result = CliRunner().invoke(app, [*command, *where, *settings])
    assert isinstance(result.exception, EchelonError), result.output
    assert "not passed" in str(result.exception)
    tree = json.loads((tmp_path / "certificate.json").read_text(encoding="utf-8"))
    found = {market["name"]: market for market in tree["markets"]}
    assert tuple(found) == PROOF_MARKETS
    assert found["planted"]["notes"] == ["planted_weights"]
    assert found["costly"]["notes"] == ["costly_weights"]
    assert found["regime"]["notes"] == ["regime_information", "regime_agents"]
    assert {"flat agent", "shown agent"} < set(found["regime"]["rows"])
    assert found["null"]["facts"]["claims"]["agent"][1] == 1
    assert found["leaky"]["facts"]["steps"] == 200
    assert {check["name"] for check in found["leaky"]["checks"] if check["passed"]} == {
        "leaky_refused"
    }
    page = (tmp_path / "certificate.html").read_text(encoding="utf-8")
    assert Words("en")("proof_note_regime_agents") in page
    assert "20/50" not in page
    assert "85 %" not in page


def test_costly_compares_weights_with_filters_that_say_weights(tmp_path: Path) -> None:
    config = proof_config(tiny_config(*EXPERT))
    market = PlantedMarket(n_bars=200, n_assets=3, flip=0.04)
    part = CostlyPart(config, market, 500.0, 1, 2, 150, own=(2, 2))
    finding = part.run(tmp_path, lambda _: None, lambda: False)
    assert finding is not None
    assert finding["kind"] == "weights"
    draws = [market.draw(1000 + k, "trains") for k in range(2)]
    unseen = [market.draw(k, "proof") for k in range(2)]
    costs = at_fee(config, 500.0)
    worlds = planted_worlds([*draws, *unseen], costs)[2:]
    traded = trade_draws(BayesFilter(market, "weights"), worlds, costs)
    assert finding["sharpes"]["bayes"] == traded.sharpes.tolist()
    assert max(finding["turnover"]["thresholds"]) < 0.5 * min(finding["turnover"]["bayes"])


def test_whoever_says_weights_has_several_draws_and_a2c_one() -> None:
    market = PlantedMarket(n_bars=100, n_assets=2)
    expert = own_draws(market, tiny_config(*EXPERT), 3, (2, 2), valid_bars=60)
    assert ([len(d.close) for d in expert.train], [len(d.close) for d in expert.valid]) == (
        [100, 100],
        [60, 60],
    )
    assert not np.array_equal(expert.train[0].close, expert.train[1].close)
    peer = own_draws(market, tiny_config("train.algo=SB3-PPO"), 3, (2, 2), valid_bars=60)
    for theirs, ours in zip(peer.train + peer.valid, expert.train + expert.valid, strict=True):
        assert np.array_equal(theirs.close, ours.close)
    flat = own_draws(market, tiny_config("train.algo=A2C"), 3, (2, 2))
    assert len(flat.train) == len(flat.valid) == 1
    assert np.array_equal(flat.valid[0].close, market.draw(3, "valid").close)


def held(*weights: float) -> Holdings:
    array = np.array([weights], dtype=np.float32)
    cash = np.array([1.0 - sum(weights)], dtype=np.float32)
    return Holdings(array, cash, np.ones((1, len(weights), 3), dtype=bool), np.ones(1))


def test_thresholds_buy_and_sell_whole_parts_and_leave_the_rest_alone() -> None:
    policy = ThresholdFilter(replace(MARKET, n_assets=4), np.array([[0.7, 0.3]]), "weights")
    policy._up = np.array([[0.8, 0.8, 0.5, 0.2]])
    row = np.array([0])
    # Bought; held already, though it drifted; in between; sold.
    found = policy.decide(row, held(0.0, 0.2, 0.3, 0.3))
    np.testing.assert_array_equal(found, [[0.25, np.nan, np.nan, 0.0]])


def test_the_best_thresholds_of_weights_trade_less_where_trading_costs_more() -> None:
    turnover = []
    for fee in (5.0, 500.0):
        config = at_fee(proof_config(tiny_config()), fee)
        worlds = planted_worlds([MARKET.draw(k, "x") for k in range(2)], config)
        pair = best_thresholds(MARKET, worlds, config, "weights")
        assert pair[0] >= pair[1]
        traded = trade_draws(ThresholdFilter(MARKET, np.array([pair]), "weights"), worlds, config)
        turnover.append(float(traded.turnover.mean()))
    assert turnover[1] < 0.4 * turnover[0]


def test_thresholds_are_those_that_earn_most_over_all_the_worlds() -> None:
    config = at_fee(proof_config(tiny_config()), 100.0)
    worlds = planted_worlds([MARKET.draw(k, "x") for k in range(2)], config)
    pair = best_thresholds(MARKET, worlds, config, "weights")

    def growth(pair: tuple[float, float]) -> float:
        policy = ThresholdFilter(MARKET, np.array([pair]), "weights")
        return float(np.log1p(trade_draws(policy, worlds, config).returns).sum())

    others = [(0.5, 0.5), (0.9, 0.1), (0.7, 0.3), (0.5, 0.1)]
    assert all(growth(pair) >= growth(other) - 1e-9 for other in others)


def test_experts_are_flat_agents_of_the_regime_market_and_see_no_holdings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []

    def watched(config: Config, worlds: Worlds, *rest: Any) -> Trained | None:
        seen.append(config)
        spans = [
            len(world.spans(name))
            for name, world in zip(("train", "valid"), worlds[:2], strict=True)
        ]
        assert spans == [2, 2], "a draw and its mirror"
        return train_agent(config, worlds, *rest)

    monkeypatch.setattr("echelon.proving.worlds.train_agent", watched)
    market = RegimeMarket(n_bars=150, n_assets=3)
    for shown in (False, True):
        part = RegimeAgentPart(proof_config(tiny_config(*EXPERT)), market, 1, 5, shown)
        finding = part.run(tmp_path / part.key, lambda _: None, lambda: False)
        assert finding is not None
        assert len(finding["sharpes"]) == 1
        assert np.isfinite(finding["sharpes"]).all()
        assert finding["steps"] == 400
    assert [c.state.include_pos or c.state.include_cash for c in seen] == [False, False]


@pytest.mark.parametrize("algo", ["SAC", "TD3", "APG"])
def test_the_full_proof_of_experts_has_them_as_flat_agents_of_the_regime_market(algo: str) -> None:
    config = load_config(CONFIGS / "sac.yaml", [f"train.algo={algo}"])
    keys = [part.key for part in plan(config, ["regime"], FULL).parts["regime"]]
    assert keys[:3] == ["regime-references", "regime-flat-42", "regime-shown-42"]
    assert len(keys) == 1 + 2 * FULL.regime_seeds


def test_agents_whose_holdings_can_be_hidden_stay_part_of_the_regime_market() -> None:
    config = tiny_config("train.algo=SB3-PPO")
    assert len(plan(config, ["regime"], FULL).parts["regime"]) == 1 + 2 * FULL.regime_seeds
