"""The agent learns where the answer is known: a market with planted momentum.

The whole proof (five seeds, 800,000 steps each) is `echelon prove momentum --config
configs/qtmrl-fast.yaml`; docs/results.md has its numbers. Here fewer seeds and steps show that
learning still works.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from markets import CONFIGS
from typer.testing import CliRunner

from echelon.backtest.run import run_backtest, run_values
from echelon.cli import app
from echelon.config import load_config
from echelon.proving.momentum import SeedScore, Verdict, proof_config, prove_momentum
from echelon.proving.planted import BayesFilter, PlantedMarket, joined, planted_worlds


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qtmrl_fast_captures_most_of_what_the_bayes_filter_earns(tmp_path: Path) -> None:
    config = load_config(
        CONFIGS / "qtmrl-fast.yaml",
        ["train.total_env_steps=320000", "train.validate_every_steps=64000"],
    )
    done = prove_momentum(config, tmp_path, seeds=[0, 1], n_draws=16, workers=2)
    scores = done.all_or_raise()
    for score in scores:
        shown = {name: round(score.share(name), 3) for name in score.sharpes}
        print(f"seed {score.seed}, best at {score.best_step:,}: {shown}")  # noqa: T201
        assert score.share() > 0.80
        assert 0.95 < score.share("momentum 10") < 1.15
    assert Verdict.of([score.share() for score in scores]).mean >= 0.85


def test_draws_traded_together_give_what_each_gives_alone() -> None:
    config = proof_config(load_config(CONFIGS / "qtmrl-fast.yaml"))
    market = PlantedMarket(n_bars=150, n_assets=3)
    worlds = planted_worlds([market.draw(k, "test") for k in range(3)], config)
    together, starts = joined(worlds)
    n_steps = len(worlds[0].span("test")) - 1
    values = run_values(BayesFilter(market), together, starts, n_steps, config)
    for k, world in enumerate(worlds):
        alone = run_backtest(BayesFilter(market), world, world.span("test"), config)
        assert np.array_equal(values[:, k], alone.value)


def test_verdict_is_students_interval_over_seeds() -> None:
    # mean 0.9, standard deviation 0.1 over 4 seeds: 0.9 ± 3.18245 · 0.1 / 2
    shares = [0.9 - 0.1 * np.sqrt(1.5), 0.9, 0.9, 0.9 + 0.1 * np.sqrt(1.5)]
    verdict = Verdict.of(shares)
    assert verdict.mean == pytest.approx(0.9)
    assert verdict.low == pytest.approx(0.9 - 3.182446 * 0.05, abs=1e-6)
    assert verdict.high == pytest.approx(0.9 + 3.182446 * 0.05, abs=1e-6)
    assert np.isnan(Verdict.of([0.9]).low)


def test_share_is_the_ratio_of_mean_sharpe_ratios() -> None:
    score = SeedScore(1, 0, {"agent": np.array([1.0, 2.0]), "bayes": np.array([2.0, 4.0])})
    assert score.share() == 0.5


def test_prove_prints_shares_and_an_interval(tmp_path: Path) -> None:
    small = ["train.total_env_steps=3200", "train.books=4", "train.offset_groups=2"]
    small += ["train.validate_every_steps=1600", "train.log_interval_steps=800"]
    overrides = [word for item in small for word in ("-o", item)]
    sizes = ["--seeds", "2", "--draws", "2", "--bars", "1000", "--workers", "1"]
    command = ["prove", "momentum", "--config", str(CONFIGS / "qtmrl-fast.yaml")]
    result = CliRunner().invoke(app, [*command, *overrides, *sizes, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "95 % t-interval" in result.output
    assert "momentum 20" in result.output
