"""The report of a run: made from real evaluations, self-contained, exact, honest in words."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest
from browsers import draw_page, drawn_charts
from plotly.offline import get_plotlyjs
from worlds import make_config, make_world

import echelon.evaluation.test_access as looks_module
from echelon.backtest.baselines import Momentum
from echelon.backtest.ensemble import ENSEMBLE
from echelon.backtest.files import AGENT
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.agents import EvalConfig
from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.errors import StoreError, UsageError
from echelon.evaluation.evaluate import evaluate, load_evaluation
from echelon.features.prepared import Split
from echelon.market import Reason, TradedData, rules_in_force
from echelon.ops.measures import LABELS, MeanStd
from echelon.report.charts.books import MOST_POINTS
from echelon.report.charts.chart import BASELINES, DARK, LIGHT
from echelon.report.run import page as page_module
from echelon.report.run.facts import encoder_lines, learner_lines
from echelon.report.run.gather import RunData, gather
from echelon.report.run.page import command_for, render, write_report
from echelon.report.run.tables import best_of, lead, rivals, verdict
from echelon.report.series import (
    choice_shares,
    largest_weights,
    last_rows,
    mean_monthly,
    monthly_returns,
    period_starts,
    rejections,
    rows_to_show,
    shortest_period,
)
from echelon.report.texts import Words, catalogue
from echelon.runs import RunDirectory
from echelon.runs.metrics import MetricLog

PICTURES = ("equity", "monthly", "holdings", "training")
BASES = "eval.baselines=[benchmark,buy_and_hold,equal_weight,momentum,random,cash]"


def days(n: int, first: str = "2017-01-02") -> np.ndarray:
    """Weekdays, as a world has them."""
    every = np.datetime64(first) + np.arange(2 * n)
    return every[np.is_busday(every)][:n].astype("datetime64[us]")


class StandIn:
    """What `evaluate` takes of a trained run, with momentum rules in the place of agents."""

    def __init__(
        self, path: Path, config: Config, world: World, seeds: tuple[int, ...], policy: Any
    ) -> None:
        self.path, self.config, self.seeds = path, config, seeds
        self.prepared = SimpleNamespace(
            world=world,
            splits={name: self._days(world, rows) for name, rows in world.splits.items()},
            manifest={"dataset": {"name": "made-up", "content_hash": "d" * 64}},
        )
        self._policy = policy
        self.executor, self.home = None, path

    @staticmethod
    def _days(world: World, rows: range) -> Split:
        first, last = (
            world.times[row].astype("datetime64[D]").item() for row in (rows[0], rows[-1])
        )
        return Split(rows, first, last)

    @property
    def facts(self) -> dict[str, Any]:
        return RunDirectory(self.path).facts()

    def policy(self, seed: int) -> Policy:
        policy: Policy = self._policy(seed)
        return policy

    def best_step(self, seed: int) -> int:
        return 4000 + 1000 * (seed % 2)


def priced_world(prepared: Any, _config: Config, *, costs: float, read: object) -> World:
    """The world of a stand-in at other costs."""
    rules = prepared.world.rules
    return replace(prepared.world, rules=rules._replace(commission=rules.commission * costs))


class Targets:
    """Wants half of everything in the first asset, and the rest left alone."""

    kind: ActionKind = "weights"
    name = "targets"

    def start(self, world: World, span: range) -> None:
        """Nothing to make ready."""

    def decide(self, row: np.ndarray, held: Holdings) -> np.ndarray:
        target = np.full(held.weights.shape, np.nan)
        target[:, 0] = 0.5
        return target


def make_run(
    path: Path,
    *,
    world: World | None = None,
    seeds: tuple[int, ...] = (42, 43, 44),
    splits: tuple[str, ...] = ("valid", "test"),
    policy: Callable[[int], Any] = lambda seed: Momentum(3 + seed % 5),
    overrides: tuple[str, ...] = (),
    times_evaluated: int = 1,
    ensemble: bool = False,
) -> Path:
    """A run directory as training and evaluation leave it, through their own writers."""
    if world is None:
        world = make_world(n_rows=400, n_assets=4, times=days(400), splits=three_splits(400))
    config = make_config(BASES, *overrides)
    data = {"name": "made-up", "content_hash": "d" * 64}
    RunDirectory(path).record(config, "echelon train --seeds 3", data=data, prepared="e" * 64)
    run: Any = StandIn(path, config, world, seeds, policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looks_module, "world_of", priced_world)
        for split in splits * times_evaluated:
            evaluate(run, split, ensemble=ensemble)  # type: ignore[arg-type]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        with MetricLog(path / "seeds" / str(seed), resume_step=None) as log:
            for step in range(100, 6001, 100):
                log.write(step, training_row(step, rng))
                if step % 1000 == 0:
                    log.write(step, {"valid/sharpe_annual": step / 6000 + rng.normal(0, 0.1)})
    return path


def training_row(step: int, rng: np.random.Generator) -> dict[str, float]:
    return {
        "losses/total": 1.0,
        "losses/policy": rng.normal(0, 0.01),
        "losses/value": float(np.exp(-step / 1000)),
        "charts/explained_variance": 1.0 - float(np.exp(-step / 3000)),
        "losses/entropy": 1.0 - step / 10_000,
        "losses/gradient_norm": 0.5,
        "charts/reward": step / 6000,
        "time/steps_per_second": 1000.0,
    }


def three_splits(n: int) -> dict[str, range]:
    return {"train": range(60), "valid": range(60, 140), "test": range(140, n)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def html_of(path: Path, splits: list[str] | None = None, lang: str = "en") -> str:
    """The page alone, without the pictures."""
    return render(gather(path, splits), Words(lang), command_for(path, splits, lang))


def own_part(page: str) -> str:
    """The page without plotly.js."""
    assert page.count('<script id="plotly">') == 1
    return page.replace(get_plotlyjs(), "")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page)
    assert found
    tree: dict[str, Any] = json.loads(found[1])
    return tree


def resolved(node: Any, palette: Any, arrays: Any) -> Any:
    """What script.js does with a chart's tree."""
    if isinstance(node, list):
        return [resolved(one, palette, arrays) for one in node]
    if not isinstance(node, dict):
        return node
    if "$" in node:
        return palette[node["$"]]
    if "#" in node:
        return arrays[node["#"]]
    return {name: resolved(one, palette, arrays) for name, one in node.items()}


def figures(page: str) -> dict[str, Any]:
    """Every chart and variant of a page, resolved."""
    data = data_of(page)
    found = {}
    for key, chart in data["charts"].items():
        for variant, tree in chart.get("variants", {"": chart}).items():
            arrays = tree.pop("arrays")
            found[f"{key} {variant}".strip()] = resolved(tree, data["palette"]["light"], arrays)
    return found


def equity_arrays(page: str, key: str, seeds: tuple[int, ...]) -> dict[str, list[Any]]:
    """What an equity chart shows: times, and growth and drawdown by book."""
    arrays = {}
    for axis, name in (("y", "growth"), ("y2", "drawdown")):
        order = iter(seeds)
        for trace in figures(page)[key]["data"]:
            if trace["yaxis"] == axis:
                group = trace["legendgroup"]
                book = f"seed-{next(order)}" if group == "seeds" else group
                arrays[f"{name} {book}"] = trace["y"]
                arrays["times"] = trace["x"]
    return arrays


# What is written


def test_report_is_one_page_and_four_pictures_of_slide_size(run: Path, page: str) -> None:
    assert page.startswith("<!doctype html>")
    files = sorted(path.name for path in (run / "report").iterdir())
    assert files == sorted(["report.html", *(f"{name}.png" for name in PICTURES)])
    for name in PICTURES:
        head = (run / "report" / f"{name}.png").read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (1920, 1080)


def test_page_reaches_for_nothing_outside_itself(page: str) -> None:
    own = own_part(page)
    assert not re.findall(r"https?:|//[a-z]+\.|url\(|@import|\bsrc=|\bhref=|<link|<iframe", own)
    assert not re.findall(r"\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|import\(", own)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', own)
    assert policy
    assert policy[1].startswith("default-src 'none'")
    assert "connect-src" not in policy[1]
    assert "http" not in policy[1]
    assert "showSendToCloud: false" in own


def test_same_results_give_the_same_page(run: Path, page: str) -> None:
    assert html_of(run) == page


def test_charts_are_what_plotly_accepts(page: str) -> None:
    found = figures(page)
    assert {"test/equity", "valid/equity", "training", "test/costs-by-book"} <= found.keys()
    assert {"test/holdings seed-42", "test/holdings mean", "test/actions mean"} <= found.keys()
    for name, tree in found.items():
        figure = go.Figure(tree)  # refuses unknown properties and values
        assert len(figure.data) > 0, name


def test_split_that_counts_most_comes_first(page: str) -> None:
    tabs = re.findall(r'data-tab="split-(\w+)"', page)
    assert tabs == ["test", "valid"]


def test_only_the_asked_split_is_shown(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    html = html_of(copy, ["valid"])
    assert re.findall(r'data-tab="split-(\w+)"', html) == ["valid"]
    assert f"echelon report {copy} --split valid" in html


# Numbers


def test_equity_chart_shows_the_saved_values(run: Path, page: str) -> None:
    arrays = equity_arrays(page, "test/equity", (42, 43, 44))
    saved = load_evaluation(run, "test").tables(43).equity
    growth = saved["value"].to_numpy() / saved["value"][0]
    np.testing.assert_allclose(arrays["growth seed-43"], growth, rtol=1e-5)
    np.testing.assert_allclose(arrays["drawdown seed-43"], -saved["drawdown"].to_numpy(), rtol=1e-5)
    assert arrays["times"][0] == str(saved["time"][0].date())
    for curve in ("growth", "drawdown"):
        seeds = np.array([arrays[f"{curve} seed-{seed}"] for seed in (42, 43, 44)])
        mean = seeds.mean(axis=0)
        np.testing.assert_allclose(arrays[f"{curve} mean"], mean, rtol=1e-5, atol=1e-9)


def test_holdings_and_cash_fill_the_book(page: str) -> None:
    for variant in ("seed-42", "mean"):
        stack = figures(page)[f"test/holdings {variant}"]["data"]
        assert stack[-1]["name"] == "Cash"
        total = np.sum([trace["y"] for trace in stack], axis=0)
        np.testing.assert_allclose(total, 1.0, atol=2e-3)


def test_costs_over_time_end_at_the_saved_costs(run: Path, page: str) -> None:
    measures = gather(run, ["test"]).main.evaluation.seeds[42]
    found = {t["name"]: t["y"][-1] for t in figures(page)["test/costs seed-42"]["data"]}
    assert found["Commission"] == pytest.approx(measures["cost_share"] * 100, rel=1e-4)


def test_chosen_checkpoints_are_marked_on_the_validation_curve(page: str) -> None:
    traces = figures(page)["training"]["data"]
    marks = [t for t in traces if t["mode"] == "markers"]
    assert len(marks) == 1
    texts = [text.split("<br>")[:2] for text in marks[0]["hovertext"]]
    assert texts == [["Seed 42", "4,000"], ["Seed 43", "5,000"], ["Seed 44", "4,000"]]
    assert marks[0]["x"] == [4000, 5000, 4000]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_explained_variance_is_shown_beside_the_value_loss(run: Path, lang: str) -> None:
    words = Words(lang)
    chart = figures(html_of(run, ["test"], lang))["training"]
    titles = [note["text"] for note in chart["layout"]["annotations"]]
    assert titles[1:3] == [words("value_loss"), words("explained_variance")]
    assert len(titles) == 7
    curve = next(t for t in chart["data"] if t["xaxis"] == "x3" and len(t["x"]) == 60)
    assert curve["y"][-1] == pytest.approx(1.0 - np.exp(-2.0), rel=1e-3)


def test_monthly_returns_worked_out_by_hand() -> None:
    times = np.array(["2019-12-30", "2019-12-31", "2020-01-02", "2020-01-31", "2020-03-02"])
    value = np.array([100.0, 110.0, 121.0, 99.0, 198.0])
    found = monthly_returns(times.astype("datetime64[us]"), value)
    assert found.years == (2019, 2020)
    assert found.months[0, 11] == pytest.approx(0.10)
    assert found.months[1, 0] == pytest.approx(-0.10)
    assert np.isnan(found.months[1, 1])
    assert found.months[1, 2] == pytest.approx(1.0)
    np.testing.assert_allclose(found.totals, [0.10, 0.80])


def test_month_in_which_the_span_only_begins_has_no_return() -> None:
    times = np.array(["2020-01-31", "2020-02-03"]).astype("datetime64[us]")
    found = monthly_returns(times, np.array([1.0, 1.1]))
    assert np.isnan(found.months[0, 0])
    assert found.months[0, 1] == pytest.approx(0.1)


def test_ruined_book_returns_nothing_after_its_end() -> None:
    times = np.array(["2020-01-02", "2020-01-31", "2020-02-28"]).astype("datetime64[us]")
    dead = monthly_returns(times, np.array([1.0, 0.0, 0.0]))
    alive = monthly_returns(times, np.array([1.0, 1.0, 1.2]))
    assert dead.months[0, :2].tolist() == [-1.0, 0.0]
    # The dead one stays in the mean: leaving it out would flatter the rest.
    assert mean_monthly([dead, alive]).months[0, 1] == pytest.approx(0.1)


def test_long_series_are_thinned_to_exact_period_ends() -> None:
    minutes = np.datetime64("2020-01-06T09:30", "us") + np.arange(78) * np.timedelta64(5, "m")
    session = days(100, "2020-01-06")[:, None] + (minutes - minutes[0].astype("datetime64[D]"))
    times = session.ravel().astype("datetime64[us]")
    rows = rows_to_show(times, 3000, also=[1234])
    assert shortest_period(times, 3000) == "day"
    assert 1234 in rows
    assert rows[0] == 0
    assert set(range(77, 7800, 78)) <= set(rows.tolist())
    assert len(rows) == 102


def test_short_series_are_shown_whole() -> None:
    assert rows_to_show(days(500), 3000).tolist() == list(range(500))


def test_periods_end_and_begin_by_the_calendar() -> None:
    times = days(10, "2020-01-30")  # Thursday, Friday, then Monday 3 February …
    assert last_rows(times, "week").tolist() == [1, 6, 9]
    assert last_rows(times, "month").tolist() == [1, 9]
    assert [str(t) for t in np.unique(period_starts(times, "week"))] == [
        "2020-01-27",
        "2020-02-03",
        "2020-02-10",
    ]
    assert [str(t) for t in np.unique(period_starts(times, "quarter"))] == ["2020-01-01"]


def test_shares_of_actions_worked_out_by_hand() -> None:
    times = days(4, "2020-01-30")
    chosen = np.array([[1, 1], [0, 2], [0, 0], [2, 0]])
    found = choice_shares(times, chosen, 3, "month")
    np.testing.assert_allclose(found.shares, [[0.25, 0.5, 0.25], [0.75, 0.0, 0.25]])
    assert [str(t) for t in found.starts] == ["2020-01-01", "2020-02-01"]


def test_many_assets_leave_room_for_the_rest() -> None:
    weights = np.tile([0.1, 0.4, 0.0, 0.2, 0.3], (3, 1))
    shown, rest = largest_weights(weights, 3)
    assert shown.tolist() == [1, 4]
    assert rest.tolist() == [3, 0]
    shown, rest = largest_weights(weights, 4)
    assert shown.tolist() == [1, 4, 3, 0]
    assert len(rest) == 0


def test_rejected_orders_are_counted_by_reason() -> None:
    blotter = pl.DataFrame(
        {"shares": [0.0, 2.0, 1.0, 0.0, 3.0], "not_filled": ["cash", None, "lot", "cash", None]}
    )
    found = rejections(blotter)
    assert (found.orders, found.whole) == (5, 2)
    assert found.by_reason == {"cash": 2, "lot": 1}


def test_buys_scaled_to_the_cash_there_is_count_as_filled(run: Path) -> None:
    split = gather(run, ["test"]).main
    blotter = next(r for r in split.baselines if r.key == "buy_and_hold").tables.blotter
    assert (blotter["not_filled"] == "cash").any()  # fees have the first buys scaled
    assert rejections(blotter).whole == len(blotter) > 0


# Words


def test_verdict_claims_no_more_than_the_spread_of_seeds() -> None:
    assert verdict(MeanStd(0.81, 0.12), 0.95) == "below"
    assert verdict(MeanStd(0.81, 0.20), 0.95) == "level"
    assert verdict(MeanStd(1.10, 0.12), 0.95) == "above"
    assert verdict(MeanStd(0.96, float("nan")), 0.95) == "above"


def test_lead_names_best_baseline_and_benchmark_with_their_values(run: Path) -> None:
    split = gather(run, ["test"]).main
    sharpe = {r.key: r.measures["sharpe_annual"] for r in split.baselines}
    best = max(sharpe, key=lambda key: sharpe[key])
    assert next(iter(rivals(split))) == best
    said = lead(split, Words("en"), "sharpe_annual")
    agent = split.evaluation.over_seeds("sharpe_annual")
    label = LABELS["sharpe_annual"]
    assert said.startswith(f"Sharpe (annual) {label.format(*agent)} over 3 seeds; ")
    assert f"{Words('en').in_text(best)} (best baseline) {label.format(sharpe[best])}" in said
    assert label.format(sharpe["benchmark"]) in said
    word = {"above": "above", "below": "below", "level": "within one standard deviation of"}
    assert word[verdict(agent, sharpe[best])] in said


def test_lead_compares_nothing_with_what_is_not_known(run: Path) -> None:
    split = gather(run, ["test"]).main
    unknown = {seed: {**m, "calmar": math.nan} for seed, m in split.evaluation.seeds.items()}
    silent = replace(split, evaluation=replace(split.evaluation, seeds=unknown))
    said = lead(silent, Words("en"), "calmar")
    assert "below" not in said
    assert "above" not in said


def test_best_value_leaves_out_cash_where_less_is_better() -> None:
    values = {"agent": 0.2, "hrp": 0.1, "cash": 0.0}
    assert best_of("max_drawdown", values) == {"hrp"}
    assert best_of("total_return", values) == {"agent"}
    assert best_of("total_return", {"agent": -0.2, "cash": 0.0}) == {"cash"}
    assert best_of("cost_total", values) == frozenset()
    assert best_of("turnover_annual", values) == frozenset()
    assert best_of("hit_rate", {"agent": float("nan")}) == frozenset()
    assert best_of("sharpe_annual", {"agent": 0.501, "hrp": 0.499}) == {"agent", "hrp"}


def test_measures_table_has_mean_and_spread_of_every_measure(run: Path, page: str) -> None:
    evaluation = gather(run, ["test"]).main.evaluation
    for name, label in LABELS.items():
        found = evaluation.over_seeds(name)
        assert label.format(found.mean, found.std) in page, name


def test_facts_say_where_the_results_come_from(run: Path, page: str) -> None:
    facts = RunDirectory(run).facts()
    for text in (
        "made-up · " + "d" * 20,
        "e" * 20,
        facts["config_hash"][:20],
        facts["code"],
        "echelon train --seeds 3",
        f"echelon evaluate {run} --split test",
        f"echelon report {run}",
        "the next bar&#39;s open",
        "adjusted for splits and dividends; lots and price limits are off",
        "paper: commission 5 bp a side, no stamp duty, no slippage, no volume cap, fractional "
        "shares, no T+1, no price limits; fills at the next bar&#39;s open",
        "the most probable one (deterministic)",
        "This split was evaluated once.",
        "buy_pct: 0.2",
    ):
        assert text in page, text


def test_repeated_looks_at_a_split_are_told(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", splits=("test",), seeds=(1,), times_evaluated=3)
    assert "was evaluated 3 times" in html_of(path)


def test_run_changed_after_its_evaluation_is_told(run: Path, tmp_path: Path, page: str) -> None:
    assert "Evaluate it again" not in page
    copy = shutil.copytree(run, tmp_path / "copy")
    data = {"name": "other", "content_hash": "f" * 64}
    RunDirectory(copy).record(make_config("seed=7"), "echelon train", data=data, prepared="0")
    assert "Evaluate it again" in html_of(copy)


def test_both_catalogues_have_the_same_keys_and_fields() -> None:
    english, chinese = catalogue("en"), catalogue("zh")
    assert chinese.keys() == english.keys()
    for label in LABELS.values():
        assert label.text_zh
        assert (label.meaning[-1], label.meaning_zh[-1]) == (".", "。")
    for key, text in english.items():
        fields = [set(re.findall(r"{(\w+)}", found)) for found in (text, chinese[key])]
        assert fields[0] == fields[1], key
        assert all((text, chinese[key])), key


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_catalogue_names_each_key_once(lang: str) -> None:
    file = files("echelon.report").joinpath("catalogue", f"{lang}.yaml")
    keys = [
        line.split(":")[0] for line in file.read_text("utf-8").splitlines() if line[:1] not in "# "
    ]
    assert len(keys) == len(set(keys)) == len(catalogue(lang))


def test_every_baseline_and_every_reason_has_a_name() -> None:
    keys = catalogue("en").keys()
    reasons = {r.name.lower() for r in Reason if r is not Reason.NONE}
    assert {k.removeprefix("reason_") for k in keys if k.startswith("reason_")} == reasons
    names = get_args(get_args(EvalConfig.model_fields["baselines"].annotation)[0])
    for kind, others in (("book_", {AGENT, ENSEMBLE, "live", "backtest"}), ("in_text_", set())):
        books = {k.removeprefix(kind) for k in keys if k.startswith(kind)}
        assert books == {*names, *others}
    assert set(names) == set(BASELINES)


def test_chinese_report_is_chinese(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    html = html_of(copy, lang="zh")
    own = own_part(html)
    assert '<html lang="zh-CN">' in own
    words = Words("zh")
    for key in ("equity", "monthly", "holdings", "actions", "costs", "measures", "facts"):
        assert f"<h2>{words(key)}</h2>" in own
        assert f"<h2>{Words('en')(key)}</h2>" not in own
    assert "夏普比率（年化）" in own
    assert f"echelon report {copy} --lang zh" in own


def test_a_page_in_one_language_leaves_the_other_alone(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    english = write_report(copy)
    before = {file.name: file.read_bytes() for file in (copy / "report").iterdir()}
    assert "report.zh.html" not in english.read_text(encoding="utf-8")
    chinese = write_report(copy, lang="zh")
    assert chinese.name == "report.zh.html"
    after = {file.name: file.read_bytes() for file in (copy / "report").iterdir()}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {
        "report.zh.html",
        *(f"{name}.zh.png" for name in PICTURES),
    }
    assert '<a href="report.html" hreflang="en" lang="en">English</a>' in own_part(
        after["report.zh.html"].decode()
    )
    again = write_report(copy).read_text(encoding="utf-8")
    assert '<a href="report.zh.html" hreflang="zh-CN" lang="zh-CN">中文</a>' in own_part(again)
    assert (copy / "report" / "report.zh.html").read_bytes() == after["report.zh.html"]


def test_a_measure_without_a_translation_is_shown_as_in_english(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = replace(LABELS["calmar"], text_zh="", meaning_zh="")
    monkeypatch.setattr("echelon.report.texts.LABELS", {**LABELS, "calmar": bare})
    words = Words("zh")
    assert words.measure("calmar") == LABELS["calmar"].text
    assert words.meaning("calmar") == LABELS["calmar"].meaning
    assert words.measure("of_my_own") == words.meaning("of_my_own") == "of my own"
    assert words.measure("sharpe_annual") == LABELS["sharpe_annual"].text_zh


def test_rules_that_cannot_act_are_said_in_the_report(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    config = make_config("market.preset=us")
    data = TradedData("XNYS", "adjusted", ("AAPL",), opens=False, volume=False, limits=False)
    for summary in (copy / "evaluations").glob("*/summary.json"):
        tree = json.loads(summary.read_text(encoding="utf-8"))
        tree["rules"] = rules_in_force(config, data).facts()
        summary.write_text(json.dumps(tree), encoding="utf-8")
    for lang, idle in (
        ("en", "slippage, the volume cap (the data have no volume)"),
        ("zh", "滑点，成交量上限（数据无成交量）"),
    ):
        own = own_part(html_of(copy, lang=lang))
        assert f"<dt>{Words(lang)('fact_idle')}</dt>" in own
        assert own.count(idle) >= 2, "among the facts and beside the costs"


def test_palettes_have_the_same_roles() -> None:
    assert LIGHT.keys() == DARK.keys()


# Unusual runs


def test_one_seed_has_no_spread_and_no_mean(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", splits=("test",), seeds=(7,))
    html = html_of(path)
    own = own_part(html)
    assert "with one seed" in own
    assert "Agent, seed 7" in own
    assert "±" not in re.sub(r'<p class="note">.*?</p>', "", own)
    assert list(data_of(html)["charts"]["test/holdings"]["variants"]) == ["seed-7"]


def test_target_weights_count_as_buys_and_sells(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", splits=("test",), seeds=(7,), policy=lambda seed: Targets())
    html = html_of(path)
    assert "This agent sets target weights" in html
    shares = {t["name"]: t["y"] for t in figures(html)["test/actions seed-7"]["data"]}
    assert shares["Hold"][0] >= 0.75 - 1e-9  # three of four assets are never touched
    assert 0 < shares["Buy"][0] <= 0.25


def test_intraday_run_is_thinned_by_days_and_keeps_deepest_drawdowns(tmp_path: Path) -> None:
    sessions, bars = days(70), 48
    offsets = np.timedelta64(570, "m") + np.arange(bars) * np.timedelta64(5, "m")
    times = (sessions[:, None] + offsets).ravel()
    world = make_world(n_rows=len(times), n_assets=2, times=times, splits=three_splits(len(times)))
    path = make_run(
        tmp_path / "run",
        world=world,
        seeds=(1, 2),
        splits=("test",),
        overrides=("eval.baselines=[cash]",),
    )
    html = html_of(path)
    arrays = equity_arrays(html, "test/equity", (1, 2))
    saved = load_evaluation(path, "test").tables(1).equity
    assert len(saved) > MOST_POINTS > len(arrays["times"]) > 60
    shown = dict(zip(arrays["times"], arrays["growth seed-1"], strict=True))
    at = str(saved["time"][-1])[:16]
    assert shown[at] == pytest.approx(saved["value"][-1] / saved["value"][0], rel=1e-5)
    assert -min(arrays["drawdown seed-1"]) == pytest.approx(saved["drawdown"].max(), rel=1e-5)
    assert "the last value of each day" in html


def test_book_that_ends_early_stays_where_it_ended(run: Path) -> None:
    split = gather(run, ["test"]).main
    first = split.agents[0]
    short = first.tables._replace(equity=first.tables.equity.head(50))
    ended = type(first)(first.key, first.seed, first.measures, short)
    cut = type(split)(split.name, split.evaluation, (ended, *split.agents[1:]), split.baselines)
    assert len(cut.mean([r.growth for r in cut.agents])) == len(split.times)
    lone = cut.over_span(ended.growth)
    assert (lone[50:] == ended.growth[-1]).all()


def test_names_with_markup_in_them_stay_text(tmp_path: Path) -> None:
    symbols = ("</script><b>", "A&B")
    times = days(200)
    world = make_world(
        n_rows=200, n_assets=2, symbols=symbols, times=times, splits=three_splits(200)
    )
    path = make_run(tmp_path / "<i>run", world=world, seeds=(1,), splits=("test",))
    own = own_part(html_of(path))
    assert "<i>run" not in own
    assert "</script><b>" not in own
    names = [
        t["name"] for t in data_of(own)["charts"]["test/holdings"]["variants"]["seed-1"]["data"]
    ]
    assert set(names) <= {*symbols, "Cash"}
    assert "</script><b>" in names


# What can go wrong


def test_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"config\.yaml: no such file.*`echelon train`"):
        write_report(tmp_path)


def test_comparison_is_refused_with_the_name_of_a_run_in_it(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "agents" / name).mkdir(parents=True)
        (tmp_path / "agents" / name / "config.yaml").touch()
    with pytest.raises(StoreError, match=rf"Name one in it: {tmp_path}/agents/a$"):
        write_report(tmp_path)


def test_run_that_was_not_evaluated_names_the_command(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "evaluations")
    with pytest.raises(StoreError, match=r"not evaluated yet.*echelon evaluate .* --split test"):
        write_report(copy)


def test_split_that_was_not_evaluated_names_the_command(run: Path) -> None:
    with pytest.raises(StoreError, match=r"not evaluated on train.*--split train"):
        write_report(run, ["train"])


@pytest.mark.parametrize("name", ["equity", "actions", "weights"])
def test_missing_table_is_named(run: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "evaluations" / "test" / f"{name}.parquet").unlink()
    with pytest.raises(StoreError, match=rf"{name}\.parquet.*echelon evaluate"):
        write_report(copy)


def test_table_without_a_column_is_named(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    path = copy / "evaluations" / "test" / "equity.parquet"
    pl.read_parquet(path).drop("stamp").write_parquet(path)
    with pytest.raises(StoreError, match=r"equity\.parquet: .*no column 'stamp'"):
        write_report(copy)


@pytest.mark.parametrize("name", ["best_steps", "ledger"])
def test_summary_without_a_fact_is_named(run: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    path = copy / "evaluations" / "test" / "summary.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    del tree[name]
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(
        StoreError, match=rf"summary\.json: .*{name}: Field required.*echelon evaluate"
    ):
        write_report(copy)


@pytest.mark.parametrize("name", ["hit_rate", "sharpe_annual", "cost_share"])
def test_measure_that_an_older_evaluation_lacks_is_shown_as_a_dash(
    run: Path, page: str, tmp_path: Path, name: str
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    for path in (copy / "evaluations").glob("*/summary.json"):
        tree = json.loads(path.read_text(encoding="utf-8"))
        for books in (tree["seeds"], tree["baselines"]):
            for measures in books.values():
                del measures[name]
        path.write_text(json.dumps(tree), encoding="utf-8")
    evaluation = load_evaluation(copy, "test")
    assert math.isnan(evaluation.over_seeds(name).mean)
    assert all(math.isnan(values[name]) for values in evaluation.baselines.values())
    assert html_of(copy).count("–") > page.count("–")


def test_missing_training_log_is_named(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "seeds" / "43")
    with pytest.raises(StoreError, match=r"seeds/43/metrics\.jsonl: no such file.*echelon train"):
        write_report(copy)


def test_unknown_split_or_language_is_refused(run: Path) -> None:
    with pytest.raises(UsageError, match="'tset'"):
        write_report(run, ["tset"])
    with pytest.raises(UsageError, match="'fr'"):
        write_report(run, lang="fr")


def test_full_disk_leaves_the_earlier_report(
    run: Path, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    assert (copy / "report" / "equity.png").exists()

    def full(data: RunData, words: Words, directory: Path) -> None:
        assert (directory / "report.zh.html").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_module, "draw_slides", full)
    with pytest.raises(StoreError, match=r"No space left on device.*echelon report"):
        write_report(copy, lang="zh")
    assert (copy / "report" / "report.html").read_text(encoding="utf-8") == page
    assert (copy / "report" / "equity.png").exists()
    assert not list(copy.glob(".report-*"))


def test_browser_draws_every_chart_of_the_open_tab(run: Path, page: str, tmp_path: Path) -> None:
    assert page
    dom = draw_page(run / "report" / "report.html", tmp_path / "profile")
    shown = re.findall(r'<div class="chart[^"]*" data-chart="([^"]+)"', dom)
    assert drawn_charts(dom) == {key for key in shown if not key.startswith("valid/")}


def test_what_the_encoder_foresees_has_its_lines(tmp_path: Path) -> None:
    assert encoder_lines(tmp_path, Words("en")) == []
    file = tmp_path / "encoder" / "encoder.json"
    file.parent.mkdir()
    score = {
        "cells": 9,
        "r2": {"encoder": 0.021, "linear": 0.02, "last": None},
        "mse": {"linear": 0.5},
        "over_linear": {"estimate": 0.001, "low": -0.002, "high": 0.004},
    }
    facts = {"enabled": True, "scores": {"return_5": score, "return_9": {"cells": 0}}}
    file.write_text(json.dumps({"facts": facts}))
    (line,) = encoder_lines(tmp_path, Words("en"))
    assert line == (
        "return_5: R² 2.10 %, ridge 2.00 %, last value –; squared error saved vs ridge: "
        "0.20 % (-0.40 % to 0.80 %)"
    )
    rank = {
        "cells": 9,
        "ic": {"encoder": 0.0851, "linear": 0.06, "boosted": None},
        "icir": {"encoder": 0.7, "linear": 0.5, "boosted": None},
        "over_linear": {"estimate": 0.025, "low": 0.01, "high": 0.04},
        "over_boosted": {"estimate": None, "low": None, "high": None},
    }
    ics = {"rank_5": {"in_sample": 0.16, "out_of_fold": 0.1}}
    facts = {"enabled": True, "scores": {"rank_5": rank}, "cross_fit": ics}
    file.write_text(json.dumps({"facts": facts}))
    assert encoder_lines(tmp_path, Words("en")) == [
        "rank_5: daily rank IC 0.085 (ICIR 0.700), ridge 0.060, boosted trees –; ahead of ridge by "
        "0.025 (0.010 to 0.040), of boosted trees by – (– to –)",
        "rank_5: mean rank IC on the train window 0.160 in sample, 0.100 out of fold, which is "
        "what the agents learn on",
    ]
    assert "0.085" in encoder_lines(tmp_path, Words("zh"))[0]
    file.write_text(json.dumps({"facts": {"enabled": False}}))
    assert encoder_lines(tmp_path, Words("zh")) == ["随机初始化，未预训练"]
    file.write_text("{")
    with pytest.raises(StoreError, match=r"encoder\.json: missing or damaged"):
        encoder_lines(tmp_path, Words("en"))


def test_adapter_and_replay_of_a_learner_have_their_lines(tmp_path: Path) -> None:
    assert learner_lines(tmp_path, Words("en")) == []
    file = tmp_path / "learner.json"
    facts: dict[str, Any] = {"replay": {"transition_bytes": 217, "capacity": 1_000_000}}
    file.write_text(json.dumps({"adapter": {"trained": 12_345, "whole": 234_567}} | facts))
    assert learner_lines(tmp_path, Words("en")) == [
        ("fact_adapter", ["12,345 of 234,567 encoder weights are trained (5.3 %)"]),
        ("fact_replay", ["217 bytes per transition, 217 MB for 1,000,000"]),
    ]
    assert learner_lines(tmp_path, Words("zh"))[1][1] == [
        "每条转移 217 字节，1,000,000 条共 217 MB"
    ]
    file.write_text(json.dumps({"adapter": None} | facts))
    assert [key for key, _ in learner_lines(tmp_path, Words("en"))] == ["fact_replay"]
    dropped = {"adapter": None, "replay": None, "dropped": ["market.lots"]}
    file.write_text(json.dumps(dropped))
    ((key, (line,)),) = learner_lines(tmp_path, Words("en"))
    assert key == "fact_dropped"
    assert line.startswith("learns without market.lots, ")
    file.write_text("[]")
    with pytest.raises(StoreError, match=r"learner\.json: missing or damaged"):
        learner_lines(tmp_path, Words("en"))
