"""What the kernel trades on: rows made of a price history, and rules made of presets."""

from __future__ import annotations

from datetime import date

import numpy as np
import pytest

from echelon.config import load_config
from echelon.data.calendars import sessions
from echelon.envs.act import rules_for
from echelon.market import PriceHistory, Rules, market_rows, resolve_rules
from echelon.market.presets import PRESETS
from echelon.market.rows import corporate_actions, trailing_median

PAPER = Rules(0.0005, 0.0, 0, 0.0, np.inf, False, False, False, True, 0.0)


def _history(**parts: object) -> PriceHistory:
    times = sessions("XSHG", date(2023, 8, 21), date(2023, 9, 8))
    shape = (len(times), 2)
    close = np.full(shape, 10.0)
    plain = {
        "times": times,
        "symbols": ("600000.SH", "688981.SH"),
        "price_basis": "raw",
        "close": close,
        "tradable": np.ones(shape, dtype=bool),
        "delisted": np.zeros(shape, dtype=bool),
    }
    return PriceHistory(**(plain | parts))  # type: ignore[arg-type]


def test_stamp_duty_halves_on_its_day_and_lots_follow_the_board() -> None:
    market = market_rows(_history(), lots=True, stamp_duty=True)
    assert market.stamp.tolist() == [0.001] * 5 + [0.0005] * 10
    assert market.lot.tolist() == [100.0, 100.0]
    assert market.min_lot.tolist() == [100.0, 200.0]
    assert market_rows(_history(), lots=False, stamp_duty=False).lot.tolist() == [0.0, 0.0]


def test_factor_steps_are_shares_for_raw_and_cash_for_split_adjusted_prices() -> None:
    factor = np.ones((15, 2))
    factor[7:, 0] = 2.0
    factor[7:, 1] = 10 / 9.5
    step, dividend = corporate_actions(_history(factor=factor))
    assert step[7].tolist() == pytest.approx([2.0, 10 / 9.5])
    assert (dividend == 0).all()
    step, dividend = corporate_actions(_history(factor=factor, price_basis="split_adjusted"))
    assert (step == 1).all()
    assert dividend[7].tolist() == pytest.approx([5.0, 0.5])
    step, dividend = corporate_actions(_history(factor=factor, price_basis="adjusted"))
    assert (step == 1).all()
    assert (dividend == 0).all()


@pytest.mark.parametrize("basis", ["raw", "split_adjusted"])
def test_rounding_of_the_factor_is_no_corporate_action(basis: str) -> None:
    factor = np.ones((15, 2))
    factor[7:, 0] = 10 / 9.99  # one thousandth of the price is a dividend
    noisy = factor * (1 + np.random.default_rng(0).uniform(-2e-6, 2e-6, factor.shape))
    step, dividend = corporate_actions(_history(factor=noisy, price_basis=basis))
    acts = (step != 1) | (dividend != 0)
    assert np.argwhere(acts).tolist() == [[7, 0]]


def test_volume_before_a_split_counts_in_the_shares_after_it() -> None:
    factor = np.ones((15, 2))
    factor[7:, 0] = 2.0
    volume = np.where(factor == 2.0, 200.0, 100.0)
    market = market_rows(_history(factor=factor, volume=volume), lots=False, stamp_duty=False)
    assert market.volume_open[1:, 0].tolist() == [100.0] * 6 + [200.0] * 8
    assert market.volume_open[1:, 1].tolist() == [100.0] * 14


def test_trailing_median_never_sees_its_own_bar() -> None:
    volume = np.arange(1.0, 31.0)[:, None]
    median = trailing_median(volume, 20)
    assert median[0, 0] == 0
    assert median[1, 0] == 1.0
    assert median[25, 0] == np.median(volume[5:25])
    changed = volume.copy()
    changed[25:] = 1e9
    assert np.array_equal(trailing_median(changed, 20)[:26], median[:26])


def test_rows_are_finite_where_an_asset_is_not_listed_yet_or_any_more() -> None:
    close, factor = np.full((15, 2), 10.0), np.ones((15, 2))
    close[:4, 0] = factor[:4, 0] = np.nan
    factor[9:, 1] = np.nan
    for basis in ("raw", "split_adjusted", "adjusted"):
        history = _history(close=close, factor=factor, price_basis=basis)
        market = market_rows(history, lots=False, stamp_duty=False)
        for part in (market.close, market.dividend, market.share_step):
            assert np.isfinite(part).all()


def test_rows_of_read_only_arrays_can_be_written_like_any_others() -> None:
    mask, close = np.ones((15, 2), dtype=bool), np.full((15, 2), 10.0)
    for part in (mask, close):
        part.flags.writeable = False
    history = _history(
        close=close, open=close, volume=close, tradable=mask, delisted=mask, limit_up=close
    )
    for part in market_rows(history, lots=False, stamp_duty=False):
        assert part.flags.writeable
        assert part.flags.c_contiguous


def test_delisting_haircut_follows_the_reason() -> None:
    market = market_rows(_history(reasons=("merger", None)), lots=False, stamp_duty=False)
    assert market.haircut.tolist() == [0.0, 0.30]


def test_presets_resolve_and_can_be_overridden() -> None:
    for name in PRESETS:
        resolve_rules(load_config(None, [f"market.preset={name}"]), calendar=None)
    named = load_config(None, ["market.preset=paper", "fee_rate=0.0005"])
    paper = resolve_rules(named, calendar=None).rules
    assert rules_for(paper, "discrete") == PAPER
    cn = resolve_rules(load_config(None, ["market.preset=cn"]), calendar=None)
    assert cn.lots
    assert cn.stamp_duty
    assert cn.rules.t_plus_one
    assert cn.rules.price_limits
    changed = load_config(None, ["market.preset=cn", "market.lots=false", "market.no_cap=true"])
    rules = resolve_rules(changed, calendar=None)
    assert not rules.lots
    assert np.isinf(rules.rules.participation)
    three = resolve_rules(load_config(None, ["market.preset=hierarchical"]), calendar=None).rules
    assert three.commission == pytest.approx(0.0003)
