"""The null market has nothing to find, and claims are counted as they are made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from provings import NULL, SIZES, tiny_config

from echelon.envs.world import World
from echelon.errors import StoreError
from echelon.evaluation.statistics import judge
from echelon.evaluation.test_access import Look
from echelon.evaluation.trust import load_trust
from echelon.proving.certificate import Certificate
from echelon.proving.null import (
    CHEAP,
    ROTA,
    WIDE_WINDOWS,
    DrawVerdict,
    NoiseScores,
    NullAgentPart,
    NullCheapPart,
    NullMarket,
    NullWindows,
    PowerPart,
    assess_null,
    null_world,
)
from echelon.proving.parts import Done, Finding
from echelon.proving.pipeline import on_file, write_bars
from echelon.proving.planted import PlantedMarket, PlantedPart, claim_draws, rules_of_thumb
from echelon.proving.prove import plan
from echelon.proving.worlds import Draw, EqualWeight, proof_config, trade_draws, with_test_window
from echelon.runs.registry import TrialRegistry
from echelon.training.run import TrainedRun
from echelon.types import Floats

CONFIG = proof_config(tiny_config())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def long() -> tuple[Draw, Floats]:
    """(a very long draw, its simple returns[T,N])"""
    draw = NullMarket(windows=NullMarket.windows._replace(train=150_000)).draw(1, "long", 0)
    return draw, draw.close[1:] / draw.close[:-1] - 1.0


def test_volatility_is_that_of_the_planted_market(long: tuple[Draw, Floats]) -> None:
    _, returns = long
    assert returns.std(axis=0) == pytest.approx(PlantedMarket().noise, rel=0.06)


def test_returns_have_fat_tails_clusters_and_a_common_factor(long: tuple[Draw, Floats]) -> None:
    _, returns = long
    z = returns / returns.std(axis=0)
    assert (z**4).mean() > 5.0
    squares = z**2 - 1.0
    after = [np.corrcoef(squares[:-1, n], squares[1:, n])[0, 1] for n in range(8)]
    assert np.mean(after) > 0.05
    together = np.corrcoef(returns.T)[np.triu_indices(8, 1)]
    assert together == pytest.approx(0.44, abs=0.06)


def test_opens_carry_a_fifth_of_the_variance(long: tuple[Draw, Floats]) -> None:
    draw, returns = long
    gap = draw.open[1:] / draw.close[:-1] - 1.0
    assert gap.var() / returns.var() == pytest.approx(0.2, abs=0.01)


def test_equal_weight_earns_the_premium(long: tuple[Draw, Floats]) -> None:
    _, returns = long
    mean = returns.mean(axis=1)
    error = mean.std() / math.sqrt(len(mean))
    assert mean.mean() == pytest.approx(0.06 / 252, abs=3 * error)


def test_no_timing_by_volatility_beats_equal_weight(long: tuple[Draw, Floats]) -> None:
    """Premium over variance is the same in calm and in wild times, so leaving either costs."""
    draw, returns = long
    market = NullMarket()
    known = (draw.hidden[1:] ** 2).mean(axis=1)
    calm = known < np.median(known)
    mean = returns.mean(axis=1)
    for which in (calm, ~calm):
        found = mean[which]
        error = found.std() / math.sqrt(len(found))
        variance = market.common**2 + market.own**2 / market.n_assets
        wanted = market.premium / 252 / variance * found.var()
        assert found.mean() == pytest.approx(wanted, abs=3 * error)


def test_past_returns_say_nothing_of_the_next(long: tuple[Draw, Floats]) -> None:
    _, returns = long
    for lag in (1, 2, 5, 20):
        before, after = returns[:-lag].ravel(), returns[lag:].ravel()
        # Common moves and clusters leave about an eighth of the bars independent.
        assert abs(np.corrcoef(before, after)[0, 1]) < 4 / math.sqrt(before.size / 8)


def test_a_draw_depends_on_its_seed_and_its_name() -> None:
    first = NULL.draw(1, "a", 10).close
    assert np.array_equal(first, NULL.draw(1, "a", 10).close)
    assert not np.array_equal(first, NULL.draw(2, "a", 10).close)
    assert not np.array_equal(first, NULL.draw(1, "b", 10).close)


def test_windows_follow_one_another() -> None:
    world = null_world(NULL, 0, "x", CONFIG)
    train, valid, test = (world.splits[name] for name in ("train", "valid", "test"))
    assert (len(train), len(valid), len(test)) == (120, 80, 80)
    assert (train.stop, valid.stop, test.stop) == (valid.start, test.start, len(world.times))
    assert world.present[train.start - CONFIG.window + 1 :].all()


@dataclass(frozen=True)
class Changed(NullMarket):
    """The same market with another future after the train window."""

    def draw(self, seed: int, name: str, warmup: int) -> Draw:
        draw = super().draw(seed, name, warmup)
        known = warmup + self.windows.train
        later = np.linspace(1.0, 3.0, len(draw.close) - known)[:, None]
        for part in (draw.open, draw.close):
            part[known:] *= later
        return draw


def test_what_follows_the_train_window_changes_nothing_in_it() -> None:
    same = null_world(NULL, 3, "x", CONFIG)
    other = null_world(Changed(windows=NULL.windows), 3, "x", CONFIG)
    stop = same.splits["train"].stop
    assert np.array_equal(same.x[:stop], other.x[:stop])
    assert not np.array_equal(same.x[stop:], other.x[stop:])


def test_cheap_draws_are_judged_by_the_policy_of_their_number(tmp_path: Path) -> None:
    part = NullCheapPart(CONFIG, NULL, (1, 3, 4, 5, 6))
    found = part.run(tmp_path, lambda _: None, lambda: False)
    assert found is not None
    verdicts = [DrawVerdict(**v) for v in found["verdicts"]]
    assert [(v.draw, v.policy) for v in verdicts] == [(k, ROTA[k % 6]) for k in (1, 3, 4, 5, 6)]
    single = {"random": 1, "forecast": 1, "min_variance": 1}
    assert {v.policy: v.trials for v in verdicts} == {"rules": 12, **single}
    again = part.run(tmp_path, lambda _: None, lambda: False)
    assert again == found
    # A draw is judged the same in whatever company it is run.
    alone = NullCheapPart(CONFIG, NULL, (6,)).run(tmp_path, lambda _: None, lambda: False)
    assert alone is not None
    assert alone["verdicts"][0] == found["verdicts"][-1]


def test_the_rule_that_is_judged_is_the_best_on_validation(tmp_path: Path) -> None:
    found = NullCheapPart(CONFIG, NULL, (4, 8)).run(tmp_path, lambda _: None, lambda: False)
    assert found is not None
    world = null_world(NULL, 4, "null", CONFIG)

    def returns(policy: object, split: str, world: World = world) -> Floats:
        at = [with_test_window(world, world.splits[split])]
        return trade_draws(policy, at, CONFIG).returns[:, 0]  # type: ignore[arg-type]

    rules = rules_of_thumb((5, 20, 60))
    valid = [returns(rule, "valid") for rule in rules]
    best = int(np.argmax([r.mean() / r.std(ddof=1) for r in valid]))
    chosen, baseline = returns(rules[best], "test"), returns(EqualWeight(CONFIG), "test")
    wanted = judge(chosen[:, None], baseline, found["verdicts"][0]["deflated"], seed=4)
    assert len(rules) == 12
    assert found["verdicts"][0]["advantage"] == pytest.approx(
        math.sqrt(252) * wanted.sharpe.single.estimate
    )


WIDE = NullMarket(windows=NullWindows(130, 70, 80), n_assets=50)


def test_wide_market_has_fewer_years_and_is_traded_by_noise_most_of_all(tmp_path: Path) -> None:
    assert NullMarket().with_assets(120).windows == WIDE_WINDOWS
    assert NullMarket().with_assets(12) == NullMarket(n_assets=12)
    assert sum(kind == "noise" for kind in WIDE.rota) > len(WIDE.rota) / 2
    found = NullCheapPart(CONFIG, WIDE, (0, 1, 3)).run(tmp_path, lambda _: None, lambda: False)
    assert found is not None
    verdicts = [DrawVerdict(**v) for v in found["verdicts"]]
    assert [(v.policy, v.trials) for v in verdicts] == [
        ("noise", 4),
        ("rules", 12),
        ("forecast", 1),
    ]
    assert not any(v.made for v in verdicts)
    alone = NullCheapPart(CONFIG, WIDE, (0,)).run(tmp_path, lambda _: None, lambda: False)
    assert alone is not None
    assert alone["verdicts"][0] == found["verdicts"][0]


def test_noise_scores_last_and_know_nothing() -> None:
    world = null_world(WIDE, 1, "x", CONFIG)
    scores = np.stack([NoiseScores(7).at(world, row) for row in range(len(world.times))])
    lasting = np.corrcoef(scores[1:].ravel(), scores[:-1].ravel())[0, 1]
    assert lasting == pytest.approx(0.9, abs=0.02)
    rose = world.growth[1:] / world.growth[:-1] - 1.0
    alike = np.corrcoef(scores[:-1].ravel(), rose.ravel())[0, 1]
    assert abs(alike) < 4 / math.sqrt(rose.size / 19)  # the scores of 19 bars are worth one


def test_wide_proof_counts_false_claims_and_no_power() -> None:
    sizes = replace(SIZES, null_draws=7, null_agents=2, chunk=6).adjust(null_assets=60)
    planned = plan(tiny_config(), ["null"], sizes)
    assert planned.trend == []
    keys = [part.key for part in planned.parts["null"]]
    assert keys[:3] == ["null-agent-000", "null-agent-001", "null-cheap-002"]
    assert len(keys) == 7, "the draws of a wide market are not held side by side"
    parts = [done({"verdicts": [verdict(k, "noise", made=False)]}) for k in range(20)]
    result = assess_null(parts, sizes.null_market)
    assert [check.name for check in result.checks] == ["null_claims"]
    assert result.passed
    assert result.facts["assets"] == 60
    assert "null_wide" in result.notes
    certificate = Certificate("full", (result,), {})
    assert not any("trend" in key for key in result.rows)
    assert certificate.passed


def test_a_stop_leaves_no_verdict(tmp_path: Path) -> None:
    part = NullCheapPart(CONFIG, NULL, (3,))
    assert part.run(tmp_path, lambda _: None, lambda: True) is None


def test_agents_go_through_the_whole_pipeline_once_a_draw(tmp_path: Path) -> None:
    part = NullAgentPart(tiny_config("train.seeds=2"), NULL, 2)
    seen: list[object] = []
    found = part.run(tmp_path, seen.append, lambda: False)
    assert found is not None
    (verdict,) = found["verdicts"]
    assert (verdict["draw"], verdict["policy"], verdict["trials"]) == (2, "agent", 1)
    assert found["steps"] == 800 == part.steps
    assert [getattr(m, "step", None) for m in seen][-1] == 800
    run = TrainedRun.open(tmp_path / "run")
    assert run.seeds == (42, 43)
    assert len(run.prepared.names) == 30, "the configuration's own features"
    registry = TrialRegistry.for_run(run.path)
    assert len(registry.trials(Look.at(run, "valid").window)) == 1
    trust = load_trust(run.path, "test")
    assert trust is not None
    assert trust["registry"]["reads"] == 1
    assert verdict["made"] == trust["claim"]["made"]
    assert verdict["deflated"] == trust["claim"]["after_looks"]
    low = min(trust["differences"]["equal_weight"][b]["low"] for b in ("single", "double"))
    assert verdict["low"] == pytest.approx(math.sqrt(252) * low)


def test_a_file_of_bars_holds_the_draw_and_bars_around_it(tmp_path: Path) -> None:
    draw = NULL.draw(5, "x", 300)
    bars = pl.read_parquet(write_bars(tmp_path / "bars.parquet", draw, 5))
    first = bars.filter(pl.col("symbol") == "P0")
    assert np.array_equal(first["close"], draw.close[:, 0])
    assert np.array_equal(first["open"], draw.open[:, 0])
    assert (bars["high"] >= bars.select(pl.max_horizontal("open", "close")).to_series()).all()
    assert (bars["low"] <= bars.select(pl.min_horizontal("open", "close")).to_series()).all()
    assert bars["volume"].min() > 0
    assert first["date"].dt.weekday().max() == 5
    again = pl.read_parquet(write_bars(tmp_path / "again.parquet", draw, 5))
    assert again.equals(bars)


def test_the_reach_of_a_bar_is_that_of_a_random_walk(tmp_path: Path) -> None:
    """Highest point of a driftless walk: distributed as |its end|, so its square has mean v."""
    rng = np.random.default_rng(0)
    day = 0.01 * rng.standard_normal((200_000, 1))
    draw = Draw(day, np.full_like(day, 100.0), 100.0 * np.exp(day))
    bars = pl.read_parquet(write_bars(tmp_path / "bars.parquet", draw, 1))
    high, low = (np.log(bars[name].to_numpy() / 100.0) for name in ("high", "low"))
    assert (high**2).mean() == pytest.approx(1e-4, rel=0.02)
    assert (low**2).mean() == pytest.approx(1e-4, rel=0.02)


def test_a_configuration_of_own_factors_alone_gets_the_stationary_set(tmp_path: Path) -> None:
    config = tiny_config(
        "features={modules: [mine.py], stationary: {enabled: false}}", "data.freq=5min"
    )
    there = on_file(config, tmp_path, tmp_path / "bars.parquet", NULL.rows(300), 7)
    assert (there.features.modules, there.features.wants_stationary) == ((), True)
    assert (there.seed, there.data.freq, there.train) == (7, "1d", config.train)
    assert there.split.valid[0] > there.split.train[1]


def test_power_judges_the_seeds_of_the_trend(tmp_path: Path) -> None:
    market = PlantedMarket(n_bars=200, n_assets=3)
    sources = [
        PlantedPart(CONFIG, market, seed, 2, claim_draws=3, claim_bars=60) for seed in (1, 2)
    ]
    for part in sources:
        directory = tmp_path / part.key
        directory.mkdir()
        assert part.run(directory, lambda _: None, lambda: False) is not None
    power = PowerPart(CONFIG, market, tuple(p.key for p in sources), ("", ""), 3, 60)
    found = power.run(tmp_path / "power", lambda _: None, lambda: False)
    assert found is not None
    assert [v["draw"] for v in found["verdicts"]] == [0, 1, 2]
    # A seed that never moved on validation has no deflated ratio: nothing may be claimed.
    last = tmp_path / sources[1].key / "returns.npz"
    with np.load(last) as kept:
        np.savez(last, valid=np.zeros_like(kept["valid"]), claims=kept["claims"])
    found = power.run(tmp_path / "power", lambda _: None, lambda: False)
    assert found is not None
    assert [(v["made"], v["deflated"]) for v in found["verdicts"]] == [(False, 0.0)] * 3
    (tmp_path / sources[0].key / "returns.npz").unlink()
    with pytest.raises(StoreError, match=r"returns\.npz: missing"):
        power.run(tmp_path / "power", lambda _: None, lambda: False)


def test_draws_for_claims_are_nobodys_test_draws() -> None:
    market = PlantedMarket(n_bars=200, n_assets=3)
    (draw,) = claim_draws(market, CONFIG, 1, 60)
    assert len(draw.close) == 60 + CONFIG.window + 60
    assert not np.array_equal(draw.close[:100], market.draw(0, "proof").close[:100])


def verdict(draw: int, policy: str, *, made: bool) -> dict[str, object]:
    return DrawVerdict(draw, policy, made, 0.1, 0.05 if made else -0.3, 0.5, 1).__dict__


def done(finding: Finding) -> Done:
    return Done("x", finding, 1.0, 2.0, "code")


def test_claims_are_counted_by_hand() -> None:
    null = [
        done({"verdicts": [verdict(0, "agent", made=False)], "steps": 9}),
        done({"verdicts": [verdict(k, CHEAP[k % 4], made=k == 7) for k in range(1, 20)]}),
    ]
    power = done({"verdicts": [verdict(k, "agent", made=k > 0) for k in range(10)]})
    result = assess_null([*null, power], NULL)
    claims, strength = result.checks
    assert claims.count == (1, 20)
    assert claims.estimate == 0.05
    assert claims.passed
    assert strength.count == (9, 10)
    assert strength.passed
    assert result.facts["claims"] == {
        "agent": [0, 1],
        "rules": [0, 4],
        "random": [0, 5],
        "forecast": [0, 5],
        "min_variance": [1, 5],
    }
    assert (result.seconds, result.cpu_seconds) == (3.0, 6.0)
    assert "null_stand_ins" in result.notes


def test_intervals_of_counts_are_exact() -> None:
    """0 of 20: upper end 1 − 0.025^(1/20); 20 of 20: its mirror."""
    null = [done({"verdicts": [verdict(k, "rules", made=False) for k in range(20)]})]
    power = done({"verdicts": [verdict(k, "agent", made=True) for k in range(20)]})
    claims, strength = assess_null([*null, power], NULL).checks
    edge = 1.0 - 0.025 ** (1 / 20)
    assert (claims.low, claims.high) == (pytest.approx(0.0), pytest.approx(edge))
    assert (strength.low, strength.high) == (pytest.approx(1 - edge), pytest.approx(1.0))


def test_more_than_one_claim_in_twenty_fails() -> None:
    null = [done({"verdicts": [verdict(k, "rules", made=k < 2) for k in range(20)]})]
    power = done({"verdicts": [verdict(k, "agent", made=k > 2) for k in range(20)]})
    result = assess_null([*null, power], NULL)
    assert [check.passed for check in result.checks] == [False, False]
    assert not result.passed
    assert "null_cheap_only" in result.notes
