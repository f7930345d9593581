"""Features streamed bar by bar are those that `prepare` writes, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import date, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markets import FrameSource, make_bars
from scipy.stats import rankdata
from streams import MARKETS, StoredMarket, a_shares, configured, same_state

from echelon.config import FeaturesConfig, load_config
from echelon.config.data import ExogenousConfig
from echelon.config.features import CrossSectionConfig, IndicatorsConfig, StationaryConfig
from echelon.data.build import PanelRequest, build_panel, read_bar_sets, stream_facts
from echelon.data.exogenous import Exogenous, ExogenousStream, join_all
from echelon.data.importing import import_source
from echelon.data.panel import Panel
from echelon.data.store import Store
from echelon.data.stream import PanelStream, StreamState
from echelon.errors import DataError, FeatureError, StoreError
from echelon.features import Bars, FeatureStream, factor, prepare
from echelon.features.base import CrossSection, Feature
from echelon.features.engine import FeaturePlan, compute
from echelon.features.indicators import INDICATORS, shipped_features
from echelon.features.prepare import panel_request
from echelon.features.registry import column_names, load_modules, select
from echelon.features.scaler import Scaler
from echelon.types import Bools, Floats32

ROOT = Path(__file__).parents[1]
INDICATORS_ON = IndicatorsConfig(
    sma=(3, 10),
    ema=(3, 12),
    rsi=(2, 14),
    macd=(3, 7, 4),
    atr=(5,),
    bbands=(6, 2.0),
    ichimoku=(3, 5, 9),
    heikin_ashi=True,
    supertrend=(4, 1.5),
)
EVERYTHING = FeaturesConfig(
    ohlcv=True,
    indicators=INDICATORS_ON,
    stationary=StationaryConfig(
        enabled=True, returns=(1, 3, 10), volatility=(2, 8), volume_ratio=(2, 5)
    ),
    alpha158=(2, 5),
    calendar=True,
)


def plan_of(panel: Panel, config: FeaturesConfig, series: tuple[str, ...] = ()) -> FeaturePlan:
    return FeaturePlan.from_specs(select(config, panel.fields).specs, series)


def batch(
    panel: Panel, plan: FeaturePlan, path: Path, exogenous: Exogenous | None = None
) -> tuple[Floats32, Bools, Scaler]:
    """X [T,N,F] and present [T,N] as `prepare` makes them, with a scaler of the first half."""
    half = range(len(panel.times) // 2)
    present, moments = compute(panel, plan, path, train=half, exogenous=exogenous)
    scaled = np.array([group != "calendar" for group in plan.groups])
    scaler = Scaler.fit(plan.names, moments, scaled, (date(2000, 1, 1), date(2001, 1, 1)))
    x = scaler.transform(np.load(path))
    x[~present] = 0.0
    return x, present, scaler


def assert_streams_alike(
    market: StoredMarket,
    plan: FeaturePlan,
    path: Path,
    cut: int,
    exogenous: Exogenous | None = None,
) -> int:
    """From `cut` on every row of the stream is the batch's; returns how many are present."""
    panel = market.panel()
    x, present, scaler = batch(panel, plan, path, exogenous)
    history = market.panel(panel.times[cut - 1].item())
    rows = market.stream(history)
    stream = FeatureStream.from_panel(history, plan, scaler)
    for t, bars in enumerate(market.bar_sets(history.times[-1].item()), cut):
        known = None if exogenous is None else exogenous.values[t]
        row = stream.push(rows.push(bars), known)
        assert row.x.dtype == np.float32
        np.testing.assert_array_equal(row.present, present[t], err_msg=f"present at {t}")
        if row.x.tobytes() != x[t].tobytes():
            wrong = np.argwhere(row.x != x[t])
            names = sorted({plan.names[k] for _, k in wrong})
            raise AssertionError(f"row {t}: {names}")
    assert t == len(panel.times) - 1
    return int(present[cut:].sum())


def test_configuration_of_these_tests_has_every_shipped_feature() -> None:
    assert set(IndicatorsConfig.model_fields) == set(INDICATORS)
    off = IndicatorsConfig()
    for name in INDICATORS:
        assert getattr(INDICATORS_ON, name) != getattr(off, name), f"{name} is not streamed here"
    for name in ("ohlcv", "alpha158", "calendar"):
        assert getattr(EVERYTHING, name)
    stationary = EVERYTHING.stationary
    assert all(getattr(stationary, name) for name in type(stationary).model_fields)


def test_every_shipped_feature_has_a_kernel() -> None:
    for spec in shipped_features(EVERYTHING):
        assert isinstance(spec, CrossSection) or spec.kernel is not None


@pytest.mark.parametrize("name", MARKETS)
def test_rows_equal_those_that_are_prepared(name: str, tmp_path: Path) -> None:
    market = MARKETS[name](tmp_path)
    panel = market.panel()
    plan = plan_of(panel, EVERYTHING)
    limits = "limit_up_distance" in plan.names
    assert limits == (name == "a_shares")
    assert ("time_of_day_sin" in plan.names) == name.endswith("min")
    assert len(plan.names) == len({*plan.names}) > (20 if name == "sample" else 40)
    for share in (0.02, 0.6):
        cut = max(1, int(share * len(panel.times)))
        assert assert_streams_alike(market, plan, tmp_path / "x.npy", cut) > 20


DAILY = [s for s in shipped_features(EVERYTHING) if "time" not in getattr(s, "needs", ())]


@pytest.mark.parametrize("spec", DAILY, ids=lambda s: column_names(s)[0])
def test_each_feature_alone_streams_as_it_is_prepared(
    spec: Feature | CrossSection, shares: StoredMarket, tmp_path: Path
) -> None:
    specs = (spec,)
    if isinstance(spec, CrossSection):
        bases = [s for s in shipped_features(EVERYTHING) if isinstance(s, Feature)]
        specs = (*(b for b in bases if spec.base in b.names), spec)
    plan = FeaturePlan.from_specs(specs)
    assert assert_streams_alike(shares, plan, tmp_path / "x.npy", 40) > 100


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> StoredMarket:
    return a_shares(tmp_path_factory.mktemp("shares"))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    gaps=st.sampled_from([0.0, 0.05, 0.3, 0.6]),
    splits=st.sampled_from([0.0, 0.02, 0.3]),
    cut=st.integers(1, 54),
)
def test_any_market_streams_as_it_is_prepared(
    seed: int, gaps: float, splits: float, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("any")
    market = a_shares(root, 55, seed, gaps=gaps, splits=splits)
    plan = plan_of(market.panel(), EVERYTHING)
    assert_streams_alike(market, plan, root / "x.npy", min(cut, len(market.panel().times) - 1))


def test_prepared_set_of_a_configuration_equals_the_stream(tmp_path: Path) -> None:
    window = "split={train: [2015-02-02, 2015-08-31], valid: [2015-09-01, 2015-10-30], "
    config = load_config(
        None,
        [
            *("data.source=synthetic", f"data.store={tmp_path}/store", "window=5"),
            *("data.synthetic.n_symbols=8", "data.synthetic.n_days=260", "data.delist_after=20"),
            *(f"data.cache.dir={tmp_path}/cache", window + "test: [2015-11-02, 2015-12-31]}"),
            "features.stationary={enabled: true, returns: [1, 5], volatility: [10]}",
        ],
    )
    made = prepare(config, tmp_path / "run")
    store, request = Store(config.data.store), panel_request(config)
    end = datetime(2015, 10, 30)
    history = build_panel(store, made.dataset.name, request._replace(end=end.date()))
    facts = stream_facts(store, made.dataset.name, request, end)
    rows, plan = PanelStream.from_panel(history, facts), plan_of(history, config.features)
    stream = FeatureStream.from_panel(history, plan, made.prepared.scaler)
    test = made.prepared.splits["test"].rows
    for t, bars in zip(test, read_bar_sets(store, made.dataset.name, request, end), strict=True):
        row = stream.push(rows.push(bars))
        assert made.prepared.times[t] == bars.time
        assert row.x.tobytes() == np.ascontiguousarray(made.prepared.x[t]).tobytes()
        np.testing.assert_array_equal(row.present, made.prepared.present[t])


def test_adjusted_prices_are_told_in_units_of_their_first_bars(tmp_path: Path) -> None:
    bars = make_bars(last=date(2015, 6, 30), gaps=0.1, late={"BBB": 40})
    source = FrameSource(bars, price_basis="adjusted")
    import_source(source, Store(tmp_path), "m")
    market = StoredMarket(Store(tmp_path), "m", PanelRequest())
    plan = plan_of(market.panel(), EVERYTHING)
    for cut in (5, 50):  # in the first twenty bars, of one and of another symbol
        assert assert_streams_alike(market, plan, tmp_path / "x.npy", cut) > 100


def test_ties_rank_alike(tmp_path: Path, shares: StoredMarket) -> None:
    panel = shares.panel()
    twins = replace(panel, close=np.where(np.isnan(panel.close), np.nan, 2.0), factor=None)
    flat = dict.fromkeys(("open", "high", "low"), twins.close)
    twins = replace(twins, anchor=np.full(7, 2.0), **flat)
    plan = plan_of(twins, EVERYTHING)
    x, present, scaler = batch(twins, plan, tmp_path / "x.npy")
    stream = FeatureStream(twins.symbols, plan, scaler)
    for t in range(len(twins.times)):
        row = stream.push(row_of(twins, t))
        assert row.x.tobytes() == x[t].tobytes()
    assert present.any()


def row_of(panel: Panel, t: int) -> Panel:
    """Row t as a panel of its own."""
    grids = {f.name: getattr(panel, f.name) for f in fields(panel) if f.name != "anchor"}
    part = {k: v[t : t + 1] for k, v in grids.items() if isinstance(v, np.ndarray)}
    return replace(panel, **part)


def write_series(path: Path, times: np.ndarray, symbols: tuple[str, ...]) -> Path:
    """A market-wide series with revisions, and one of each of three symbols."""
    rng = np.random.default_rng(0)
    days = [t.astype("datetime64[s]").item() for t in times[:: max(1, len(times) // 25)]]
    rows = []
    for k, day in enumerate(days):
        hour = timedelta(hours=int(rng.integers(1, 23)), minutes=30)
        for name, symbol in (("cpi", None), *(("mood", s) for s in symbols[:3])):
            published = day + hour
            rows.append((name, day.date() - timedelta(days=40), published, rng.normal(), symbol))
            if k % 3 == 0:  # revised later
                late = published + timedelta(days=int(rng.integers(1, 9)))
                rows.append((name, day.date() - timedelta(days=40), late, rng.normal(), symbol))
    columns = ["series", "period", "published", "value", "symbol"]
    frame = pl.DataFrame(rows, columns, orient="row").unique([*columns[:3], "symbol"])
    frame.write_parquet(path)
    return path


@pytest.mark.parametrize("name", ["a_shares", "5min"])
@pytest.mark.parametrize("max_age", [None, 3])
def test_exogenous_series_stream_as_published(
    name: str, max_age: int | None, tmp_path: Path
) -> None:
    market = MARKETS[name](tmp_path)
    panel = market.panel()
    path = write_series(tmp_path / "series.parquet", panel.times, panel.symbols)
    configs = [ExogenousConfig(path=path, max_age_days=max_age)]
    joined = join_all(configs, panel.times, panel.symbols, panel.calendar, panel.timezone)
    place = panel.symbols, panel.freq, panel.calendar, panel.timezone
    known = ExogenousStream(configs, *place)
    assert known.names == joined.names == ("cpi", "mood")
    for t, time in enumerate(panel.times):
        np.testing.assert_array_equal(known.at(time), joined.values[t])
    assert np.isfinite(joined.values).any()
    assert np.isnan(joined.values).any()
    plan = plan_of(panel, FeaturesConfig(ohlcv=True), joined.names)
    cut = len(panel.times) // 3
    assert assert_streams_alike(market, plan, tmp_path / "x.npy", cut, joined) > 100


def test_shipped_example_of_user_factors_streams_as_it_is_prepared(tmp_path: Path) -> None:
    bars = make_bars(("AAA", "BBB", "CCC", "DDD"), gaps=0.02, late={"BBB": 60})
    import_source(FrameSource(bars), Store(tmp_path / "own"), "m")
    market = StoredMarket(Store(tmp_path / "own"), "m", PanelRequest())
    factors = load_modules([ROOT / "examples" / "factors.py"])
    assert len(factors) == 3
    plan = FeaturePlan.from_specs((*factors, INDICATORS["ema"](5)))
    for cut in (100, 400):
        assert assert_streams_alike(market, plan, tmp_path / "x.npy", cut) > 100


@cache
def recursive_factor() -> Feature:
    @factor(lookback=3, needs=("close",))
    def since_listing(bars: Bars) -> np.ndarray:
        return np.cumsum(bars.close)

    return since_listing


def test_factor_with_a_longer_memory_than_it_declares_is_refused_by_name(
    shares: StoredMarket, tmp_path: Path
) -> None:
    panel, plan = shares.panel(), FeaturePlan.from_specs((recursive_factor(),))
    _, _, scaler = batch(panel, plan, tmp_path / "x.npy")
    with pytest.raises(FeatureError, match=r"'since_listing' cannot be streamed.*lookback"):
        FeatureStream.from_panel(panel, plan, scaler)


def test_levels_relative_to_the_close_stream_as_they_are_prepared(
    shares: StoredMarket, tmp_path: Path
) -> None:
    plan = plan_of(shares.panel(), EVERYTHING.model_copy(update={"relative": True}))
    for cut in (1, 70):
        assert assert_streams_alike(shares, plan, tmp_path / "x.npy", cut) > 100


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("method", ["rank", "zscore"])
def test_features_compared_across_symbols_stream_as_they_are_prepared(
    method: Literal["rank", "zscore"], keep: bool, shares: StoredMarket, tmp_path: Path
) -> None:
    factors = tmp_path / "range.py"
    factors.write_text(
        "from echelon.features import Bars, factor\n\n"
        "@factor(lookback=1, needs=('high', 'low', 'vwap'))\n"
        "def reach(bars: Bars):\n    return (bars.high - bars.low) / bars.vwap\n"
    )
    across = CrossSectionConfig(method=method, keep=keep)
    config = EVERYTHING.model_copy(update={"modules": (str(factors),), "cross_section": across})
    panel = shares.panel()
    plan, plain = plan_of(panel, config), plan_of(panel, config.model_copy(update=RAW))
    names = set(plan.names)
    calendar = {n for n, g in zip(plan.names, plan.groups, strict=True) if g == "calendar"}
    assert {f"{method}_reach", f"{method}_ret_1", f"{method}_VWAP0", f"{method}_ema_3"} <= names
    assert ("reach" in names) is keep
    own = {n for n in plain.names if not n.startswith("rank_")}
    assert {n.removeprefix(f"{method}_") for n in names if n.startswith(method)} == own - calendar
    for cut in (1, 70):
        assert assert_streams_alike(shares, plan, tmp_path / "x.npy", cut) > 100


RAW = {"cross_section": CrossSectionConfig()}


def test_comparison_that_replaces_its_base_is_that_of_the_base_itself(
    shares: StoredMarket, tmp_path: Path
) -> None:
    """Against the raw column, by scipy and numpy, over the present members of each bar."""
    panel, of = shares.panel(), ("CORR5", "ret_3")
    values: dict[str, Floats32] = {}
    for method in ("none", "rank", "zscore"):
        across = CrossSectionConfig(method=method, of=of)
        config = EVERYTHING.model_copy(update={"cross_section": across})
        plan = plan_of(panel, config)
        present, _ = compute(panel, plan, tmp_path / "x.npy", train=range(50))
        x = np.load(tmp_path / "x.npy")
        values |= {name: x[:, :, k] for k, name in enumerate(plan.names)}
        assert (set(of) <= set(plan.names)) is (method == "none")
    mask, compared = present & panel.member, 0
    for name in of:
        for t in range(len(panel.times)):
            base = values[name][t, mask[t]].astype(np.float64)
            if len(base) < 2:
                continue
            ranks = 2 * (rankdata(base) - 1) / (len(base) - 1) - 1
            np.testing.assert_allclose(values[f"rank_{name}"][t, mask[t]], ranks, atol=1e-6)
            scores = (base - base.mean()) / base.std()
            np.testing.assert_allclose(values[f"zscore_{name}"][t, mask[t]], scores, atol=1e-5)
            compared += 1
        for method in ("rank", "zscore"):
            assert not values[f"{method}_{name}"][~mask].any()
    assert compared > 100


def test_factor_that_fails_on_a_bar_changes_nothing(shares: StoredMarket, tmp_path: Path) -> None:
    armed = False

    @factor(lookback=2, needs=("close",))
    def touchy(bars: Bars) -> np.ndarray:
        if armed:
            raise RuntimeError("no")
        return bars.close * 2

    panel = shares.panel()
    plan = FeaturePlan.from_specs((touchy, INDICATORS["ema"](3)))
    x, _, scaler = batch(panel, plan, tmp_path / "x.npy")
    stream = FeatureStream.from_panel(shares.panel(panel.times[59].item()), plan, scaler)
    before, armed = stream.state(), True
    with pytest.raises(FeatureError, match="touchy"):
        stream.push(row_of(panel, 60))
    armed = False
    assert same_state(stream.state(), before)
    assert stream.push(row_of(panel, 60)).x.tobytes() == x[60].tobytes()


def test_stop_and_restore_at_every_bar_gives_the_same_rows(
    shares: StoredMarket, tmp_path: Path
) -> None:
    panel = shares.panel()

    @factor(lookback=4, needs=("high", "limits", "volume"))
    def of_window(bars: Bars) -> np.ndarray:
        out = np.full(len(bars), np.nan)
        out[3:] = bars.high[3:] + bars.high[:-3] + bars.value[1:-2]
        return out

    plan = FeaturePlan.from_specs((*select(EVERYTHING, panel.fields).specs, of_window))
    x, _, scaler = batch(panel, plan, tmp_path / "x.npy")
    stream = FeatureStream.from_panel(shares.panel(panel.times[49].item()), plan, scaler)
    for t in range(50, 130):
        saved = stream.state()
        facts = json.loads(json.dumps(saved.facts, allow_nan=False))
        assert {a.dtype.kind for a in saved.arrays.values()} <= set("fi")
        fresh = FeatureStream(panel.symbols, plan, scaler)
        fresh.restore(StreamState(saved.arrays, facts))
        stream.push(row_of(panel, t))
        assert not same_state(stream.state(), saved)  # what was saved is a copy
        assert fresh.push(row_of(panel, t)).x.tobytes() == x[t].tobytes()
        stream = fresh


def test_another_future_changes_no_earlier_row(shares: StoredMarket, tmp_path: Path) -> None:
    panel = shares.panel()
    plan = plan_of(panel, EVERYTHING)
    x, _, scaler = batch(panel, plan, tmp_path / "x.npy")
    stream = FeatureStream(panel.symbols, plan, scaler)
    rows = [stream.push(row_of(panel, t)).x for t in range(80)]
    other = replace(panel, close=panel.close * 2, high=panel.high * 2, present=~panel.present)
    for t in range(80, 100):
        stream.push(row_of(other, t))
    for t, row in enumerate(rows):
        assert row.tobytes() == x[t].tobytes()


REFUSED: dict[str, tuple[Callable[[Panel], Panel], str]] = {
    "repeated": (lambda p: replace(p, times=p.times - np.timedelta64(9, "D")), "not after"),
    "two rows": (lambda p: replace(p, **{}), "expected one row"),
    "symbols": (lambda p: replace(p, symbols=p.symbols[::-1]), "expected one row"),
    "no high": (lambda p: replace(p, high=None), "has no high"),
    "no limits": (lambda p: replace(p, band=None), "has no limits"),
    "negative": (lambda p: replace(p, low=-p.low), "low is -"),
    "not a number": (lambda p: replace(p, open=p.open * np.nan), "open is nan"),
    "absurd": (lambda p: replace(p, high=p.high * 1e40), "high is"),
    "value": (lambda p: replace(p, amount=p.amount - 1e9), "value is -"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_rows_are_refused_and_change_nothing(
    what: str, shares: StoredMarket, tmp_path: Path
) -> None:
    change, message = REFUSED[what]
    panel = shares.panel()
    plan = plan_of(panel, EVERYTHING)
    x, _, scaler = batch(panel, plan, tmp_path / "x.npy")
    stream = FeatureStream.from_panel(shares.panel(panel.times[89].item()), plan, scaler)
    before = stream.state()
    row = panel if what == "two rows" else row_of(panel, 90)
    with pytest.raises((DataError, FeatureError), match=message):
        stream.push(change(row))
    assert same_state(stream.state(), before)
    assert stream.push(row_of(panel, 90)).x.tobytes() == x[90].tobytes()


def test_missing_exogenous_values_and_foreign_states_are_refused(
    shares: StoredMarket, tmp_path: Path
) -> None:
    panel = shares.panel()
    plan = plan_of(panel, FeaturesConfig(ohlcv=True), ("cpi",))
    values = Exogenous(("cpi",), np.ones((*panel.shape, 1)))
    _, _, scaler = batch(panel, plan, tmp_path / "x.npy", values)
    stream = FeatureStream(panel.symbols, plan, scaler)
    for wrong in (None, np.ones((2, 1))):
        with pytest.raises(DataError, match="exogenous values"):
            stream.push(row_of(panel, 0), wrong)
    saved = stream.state()
    with pytest.raises(StoreError, match="other symbols"):
        stream.restore(saved._replace(facts=saved.facts | {"symbols": ["A"]}))
    with pytest.raises(StoreError, match="other features"):
        stream.restore(saved._replace(facts=saved.facts | {"features": []}))
    with pytest.raises(FeatureError, match="scaler"):
        FeatureStream(panel.symbols, plan_of(panel, FeaturesConfig(ohlcv=True)), scaler)


def test_real_a_shares_stream_as_they_are_prepared(tmp_path: Path, shared_data: Path) -> None:
    path = shared_data / "cn_daily_2010_2020.parquet"
    market = configured(tmp_path, "data.source=parquet", f"data.path={path}")
    request = market.request._replace(end=date(2013, 12, 31))
    market = StoredMarket(market.store, market.name, request)
    plan = plan_of(market.panel(), EVERYTHING)
    assert assert_streams_alike(market, plan, tmp_path / "x.npy", 700) > 1000
