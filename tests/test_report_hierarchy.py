"""The sections of a report that only a hierarchy has, from made-up records and populations."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from functools import partial
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest
from command_records import make_book, make_history, make_record
from test_report import data_of, days, figures, make_run, three_splits
from worlds import make_config, make_world

from echelon.agents.mfpbt import FOUNDER, DecisionKind, Life
from echelon.backtest.baselines import Momentum
from echelon.envs.world import World
from echelon.errors import StoreError
from echelon.ops.measures import LABELS
from echelon.population.attribution import SUMMED
from echelon.population.record import (
    POPULATION,
    CommandRecord,
    PopulationHistory,
    has_record,
    remove_record,
)
from echelon.report.charts.chart import Cells
from echelon.report.charts.hierarchy import (
    LIFE_SYMBOLS,
    correlation_plot,
    lineage_chart,
    member_names,
    population_slide,
    rounds_chart,
)
from echelon.report.charts.interactive import page_chart
from echelon.report.charts.slides import draw_slide
from echelon.report.hierarchy import (
    MARKS,
    attribution_of,
    family_tree,
    market_baseline,
    market_returns,
    plane,
    recent_entropy,
    reigns,
    router_sentence,
    trailing_mean,
    whole_entropy,
)
from echelon.report.pages import render_part
from echelon.report.run.gather import Record, SplitData, gather
from echelon.report.run.page import PARTS, draw_slides, render, run_slides, write_report
from echelon.report.series import choice_shares
from echelon.report.texts import Words, catalogue
from echelon.risk.events import RiskEvent, RiskKind
from echelon.training.run import seed_directory

EN, ZH = Words("en"), Words("zh")


class Commander(Momentum):
    """Trades by momentum, and says that made-up experts were in charge."""

    def __init__(self, seed: int, experts: int = 5) -> None:
        super().__init__(3 + seed % 5)
        self._seed, self._experts = seed, experts
        self._made: CommandRecord | None = None

    @property
    def record(self) -> CommandRecord | None:
        return self._made

    def start(self, world: World, span: range) -> None:
        super().start(world, span)
        times = world.times[span.start : span.stop - 1]
        self._made = make_record(len(times), self._experts, seed=self._seed, times=times)


def hierarchy_run(
    path: Path,
    *,
    bars: int = 400,
    seeds: tuple[int, ...] = (42, 43),
    experts: int = 5,
    per_niche: int = 1,
    rounds: int = 200,
) -> Path:
    """A run as training and evaluation of a hierarchy leave it; its book follows its experts."""
    world = make_world(n_rows=bars, n_assets=4, times=days(bars), splits=three_splits(bars))
    make_run(
        path, world=world, seeds=seeds, splits=("test",), policy=lambda s: Commander(s, experts)
    )
    for seed in seeds:
        make_history(experts, per_niche, rounds).write(seed_directory(path, seed))
        follow(path / "evaluations" / "test", seed)
    return path


def follow(directory: Path, seed: int) -> None:
    """Let the saved book be one that follows the experts of its record."""
    record = CommandRecord.read(directory, f"seed-{seed}")
    book = make_book(record, seed)
    file = directory / "equity.parquet"
    columns: dict[str, Any] = {
        name: np.concatenate([[0.0], getattr(book, name)])
        for name in ("commission", "stamp", "slippage")
    }
    peak = np.maximum.accumulate(book.values)
    columns |= {"value": book.values, "drawdown": 1.0 - book.values / peak}
    every = pl.read_parquet(file)
    mine = (pl.col("policy") == "agent") & (pl.col("seed") == seed)
    changed = every.filter(mine).with_columns(**{k: pl.Series(v) for k, v in columns.items()})
    rest = every.filter(~mine | pl.col("seed").is_null())
    pl.concat([changed, rest], how="vertical_relaxed").write_parquet(file)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hierarchy_run(tmp_path_factory.mktemp("runs") / "commanded")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def risk_card(split: SplitData, agent: Record) -> str:
    """The card of risk events of an agent alone."""
    return render_part("risk", EN, split=split, agents={agent.key: agent}, **PARTS)


# What is written


def test_report_of_a_hierarchy_has_its_sections_and_pictures(run: Path, page: str) -> None:
    for key in ("command", "attribution", "risk_events", "population", "lineage", "skill_map"):
        assert f">{EN(key)}</h" in page, key
    names = {path.stem for path in (run / "report").glob("*.png")}
    assert {"command", "experts", "population"} <= names
    for name in ("command", "experts", "population"):
        head = (run / "report" / f"{name}.png").read_bytes()[:24]
        assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (1920, 1080)


def test_charts_of_a_hierarchy_are_what_plotly_accepts(page: str) -> None:
    found = {k: v for k, v in figures(page).items() if "command" in k or "population" in k}
    for part in ("", "/usage", "/distance", "/correlations", "/map"):
        assert f"test/command/seed-43{part}" in found
    for part in ("rounds", "skills", "lineage"):
        assert f"population/42/{part}" in found
    for name, tree in found.items():
        assert len(go.Figure(tree).data) > 0, name


def test_every_chart_of_the_page_has_its_place(page: str) -> None:
    places = re.findall(r'class="chart[^"]*" data-chart="([^"]+)"', page)
    assert sorted(places) == sorted(data_of(page)["charts"])


def test_choosing_a_seed_draws_the_charts_of_its_pane(page: str) -> None:
    assert '[data-pane="${key}"]:not([hidden]) [data-chart]' in page
    shown = re.findall(r'data-pane="test/command" data-key="(seed-\d+)"( hidden)?', page)
    assert sorted(key for key, _ in shown) == ["seed-42", "seed-43"]
    assert [bool(hidden) for _, hidden in shown] == [False, True]


def test_report_in_chinese_has_the_same_sections(run: Path, tmp_path: Path) -> None:
    data = gather(run, None)
    html = render(data, ZH, "echelon report")
    for key in ("command", "attribution", "risk_events", "population"):
        assert f">{ZH(key)}</h2>" in html
    draw_slides(data, ZH, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {
        f"{name}.zh.png" for name in ("command", "experts", "population")
    }


def test_every_kind_of_event_and_life_has_words_and_a_mark() -> None:
    for kind in RiskKind:
        assert MARKS[kind].key in catalogue("en")
        assert f"risk_{kind}" in catalogue("en")
    for kind in (FOUNDER, *get_args(DecisionKind)):
        assert kind in LIFE_SYMBOLS
        assert f"life_{kind}" in catalogue("en")


def test_report_without_record_or_population_has_none_of_it(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    for seed in (42, 43):
        remove_record(copy / "evaluations" / "test", f"seed-{seed}")
        (seed_directory(copy, seed) / POPULATION).unlink()
    data = gather(copy, None)
    html = render(data, EN, "echelon report")
    for key in ("command", "attribution", "risk_events", "population"):
        assert f">{EN(key)}</h2>" not in html
    assert set(run_slides(data, EN)) == {"equity", "monthly", "holdings", "training"}


def test_evaluation_writes_the_record_of_the_costs_configured_and_removes_old_ones(
    tmp_path: Path,
) -> None:
    make = partial(make_run, tmp_path / "run", seeds=(7,), splits=("test",))
    directory = make(policy=Counting) / "evaluations" / "test"
    # The cost sweep runs the policy again; what is written is of the first run.
    assert CommandRecord.read(directory, "seed-7").experts == ("run 1",)
    make(policy=lambda seed: Momentum(5))
    assert not has_record(directory, "seed-7")


class Counting(Commander):
    """Names its expert after how often it was run."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, experts=1)
        self._runs = 0

    def start(self, world: World, span: range) -> None:
        super().start(world, span)
        self._runs += 1
        assert self._made is not None
        self._made = replace(self._made, experts=(f"run {self._runs}",))


@pytest.mark.parametrize("file", ["seed-42.command.parquet", "seed-42.risk_events.jsonl"])
def test_damaged_record_is_refused_by_name(run: Path, tmp_path: Path, file: str) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "evaluations" / "test" / file).write_bytes(b"nothing of the kind")
    with pytest.raises(StoreError, match=re.escape(file)):
        gather(copy, None)


def test_record_of_other_bars_is_refused(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    make_record(30).write(copy / "evaluations" / "test", "seed-42")
    with pytest.raises(StoreError, match="not those of"):
        gather(copy, None)


def test_damaged_population_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (seed_directory(copy, 43) / POPULATION).write_text("{}")
    with pytest.raises(StoreError, match=POPULATION):
        gather(copy, None)


# Numbers


def test_band_shows_who_was_in_charge_at_every_bar(run: Path, page: str) -> None:
    agent = gather(run, None).main.agents[0]
    record = agent.command
    assert record is not None
    chart = figures(page)["test/command/seed-42"]
    bands = {t["name"]: t for t in chart["data"] if t["type"] == "bar"}
    assert list(bands) == [*record.experts, "Cash"]
    days_in_charge = {
        name: sum(w for w in band["width"] if w) / 86_400_000 for name, band in bands.items()
    }
    lengths = np.diff(agent.times).astype("timedelta64[D]").astype(int)
    for k, name in enumerate([*record.experts, "Cash"]):
        assert days_in_charge[name] == lengths[record.in_charge == k].sum()


def test_marks_stand_on_the_curve_where_the_event_was(run: Path, page: str) -> None:
    agent = gather(run, None).main.agents[0]
    chart = figures(page)["test/command/seed-42"]
    masked = next(t for t in chart["data"] if t["name"] == EN("mark_masked"))
    at = 259 // 2
    assert masked["x"] == [str(agent.times[at].astype("datetime64[D]"))]
    assert masked["y"][0] == pytest.approx(agent.growth[at], rel=1e-5)
    assert masked["hovertext"] == ["Masked: Reversal<br>Forced decision: Reversal"]
    cuts = next(t for t in chart["data"] if t["name"] == EN("mark_cut"))
    assert cuts["visible"] == "legendonly"


def test_attribution_table_adds_up_and_names_its_market(run: Path, page: str) -> None:
    data = gather(run, None)
    agent = data.main.agents[0]
    found = attribution_of(data.main, agent, data.config)
    assert found is not None
    total = math.log(agent.value[-1] / agent.value[0])
    assert sum(found.parts[n].total for n in SUMMED) == pytest.approx(total, abs=1e-12)
    said = text_of(page)
    assert "Market: equal weight, before costs." in said
    shown = LABELS["total_return"].format
    assert f"Real book {shown(total)}" in said
    assert f"Routing {shown(found.parts['routing'].total)}" in said
    assert router_sentence(found.router, EN) in said


def test_market_is_equal_weight_before_its_costs(run: Path) -> None:
    split = gather(run, None).main
    assert market_baseline(split) == "equal_weight"
    book = next(r for r in split.baselines if r.key == "equal_weight")
    paid = book.tables.equity["commission"].to_numpy()[1:]
    expected = (book.value[1:] + paid) / book.value[:-1] - 1.0
    np.testing.assert_allclose(market_returns(split, len(expected)), expected, atol=1e-12)
    alone = replace(split, baselines=())
    assert market_baseline(alone) is None
    assert not market_returns(alone, 5).any()


def test_risk_events_are_shown_newest_first_and_capped(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = gather(run, None).main
    said = text_of(risk_card(split, split.agents[0]))
    assert said.index("Resumed Portfolio") < said.index("Halted Portfolio")
    assert said.index("Halted Portfolio") < said.index("Forced decision Reversal")
    monkeypatch.setattr("echelon.report.hierarchy.MOST_EVENTS", 3)
    html = risk_card(split, split.agents[0])
    assert html.count("<tr>") == 1 + 3
    assert "the last 3 of" in html
    assert "seed-42.risk_events.jsonl" in html


def test_run_without_events_says_so(run: Path) -> None:
    split = gather(run, None).main
    agent = split.agents[0]
    assert agent.command is not None
    quiet = replace(agent, command=replace(agent.command, events=()))
    assert EN("risk_events_none") in risk_card(split, quiet)


def test_names_from_files_are_escaped(run: Path) -> None:
    data = gather(run, None)
    agent = data.main.agents[0]
    assert agent.command is not None
    values = {"event": "<b>x", "subject": "<b>x", "error": "<script>"}
    event = RiskEvent(1, RiskKind.ALERT_FAILED, "<b>x</b>", 0.2, 0.1, 0, values)
    odd = replace(agent, command=replace(agent.command, events=(event,)))
    html = risk_card(data.main, odd)
    assert "<b>x" not in html
    assert "<script>" not in html


def test_book_that_lost_everything_is_said_not_to_be_attributable(run: Path) -> None:
    split = gather(run, None).main
    lost = {"seed-42": None}
    html = render_part("attribution", EN, split=split, attributions=lost, **PARTS)
    assert EN("attribution_none") in html


# Pure parts


def test_reigns_cover_every_bar_once() -> None:
    record = make_record(60, 3)
    found = reigns(record)
    again = np.concatenate([np.full(r.stop - r.first, r.who) for r in found])
    np.testing.assert_array_equal(again, record.in_charge)
    assert all(a.who != b.who for a, b in pairwise(found))


def test_usage_and_its_entropy_worked_out_by_hand() -> None:
    record = make_record(8, 3, times=days(8, "2020-01-30"))  # two days in January
    record = replace(
        record, in_charge=np.array([0, 1, 0, 0, 0, 2, 3, 3]), decided=np.ones(8, dtype=bool)
    )
    found = choice_shares(record.times, record.in_charge[:, None], 4, "month")
    np.testing.assert_allclose(found.shares, [[0.5, 0.5, 0, 0], [0.5, 0, 1 / 6, 2 / 6]])
    times, values = recent_entropy(record, decisions=4)
    assert len(values) == 5
    assert values[0] == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    )
    assert values[-1] == pytest.approx(1.5 * math.log(2) / math.log(4))
    np.testing.assert_array_equal(times, record.times[3:])
    shares = np.array([4, 1, 1, 2]) / 8
    assert whole_entropy(record) == pytest.approx(-(shares * np.log(shares)).sum() / math.log(4))


def test_trailing_mean_leaves_out_what_is_not_known() -> None:
    found = trailing_mean(np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan]), 2)
    np.testing.assert_array_equal(found, [np.nan, 2.0, 3.0, 5.0, 5.0, np.nan])
    assert np.isnan(trailing_mean(np.ones(3), 5)).all()


def test_correlation_of_a_still_book_is_not_known() -> None:
    record = make_record(50, 3)
    values = record.own_values.copy()
    values[:, 1] = 1.0
    (cells,) = correlation_plot(replace(record, own_values=values), EN).layers
    assert isinstance(cells, Cells)
    found = cells.values
    assert np.isnan(found[1]).all()
    assert found[0, 0] == pytest.approx(1.0)
    expected = np.corrcoef(record.own_returns[:, 0], record.own_returns[:, 2])[0, 1]
    assert found[0, 2] == pytest.approx(expected)


def test_plane_keeps_distances_of_points_that_lie_in_one() -> None:
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(5, 2))
    axes, _ = np.linalg.qr(rng.normal(size=(10, 10)))
    found = plane(flat @ axes[:2] + 3.0)
    assert found is not None
    gaps = np.linalg.norm(found.points[:, None] - found.points[None], axis=-1)
    np.testing.assert_allclose(gaps, np.linalg.norm(flat[:, None] - flat[None], axis=-1))
    assert found.explained.sum() == pytest.approx(1.0)
    assert plane(np.ones((3, 4))) is None
    assert plane(np.array([[np.nan], [1.0]])) is None
    two_points = plane(np.array([[0.0], [1.0]]))
    assert two_points is not None
    np.testing.assert_allclose(np.abs(two_points.points), [[0.5, 0.0], [0.5, 0.0]], atol=1e-12)


def test_family_tree_worked_out_by_hand() -> None:
    lives = (
        Life(0, 0, 0, 0, "founder", None, None, {}),
        Life(1, 1, 0, 0, "founder", None, None, {}),
        Life(2, 1, 0, 3, "exploit", 0, 0, {}),  # weights and settings of member 0
        Life(3, 0, 0, 5, "borrow", 0, 2, {}),  # own weights, settings of member 1
        Life(4, 1, 0, 6, "reseed", None, None, {}),
        Life(5, 1, 0, 6, "propose", 4, None, {}),  # the second decision of the round about it
    )
    tree = family_tree(PopulationHistory(("a", "b"), np.zeros((2, 1)), lives))
    assert tree is not None
    assert [(b.life.member, b.life.round, b.last) for b in tree.branches] == [
        (0, 0, 5),
        (1, 0, 3),
        (1, 3, 6),
        (0, 5, 6),
        (1, 6, 6),
        (1, 6, 6),
    ]
    assert [b.mark for b in tree.branches] == pytest.approx([0, 0, 3, 5, 6, 6 + 0.013 * 6])
    # What was copied whole is one edge, of weights.
    assert [(c.source, c.member, c.at, c.weights) for c in tree.copies] == [
        (0, 1, 3, True),
        (1, 0, 5, False),
    ]
    assert (tree.members, tree.last) == (2, 6)
    assert tree.lead == pytest.approx(0.3)
    assert family_tree(PopulationHistory(("a",), np.zeros((1, 1)))) is None


def test_members_of_a_niche_are_numbered() -> None:
    assert member_names(make_history(2, 1, 1), EN) == ["Trend", "Reversal"]
    assert member_names(make_history(2, 2, 1), EN)[1:3] == ["Trend · 2", "Reversal · 1"]
    unnamed = replace(make_history(2, 2, 1), experts=("expert 0", "expert 1"))
    assert member_names(unnamed, EN)[:3] == ["Expert 0 · 1", "Expert 0 · 2", "Expert 1 · 1"]
    assert member_names(unnamed, ZH)[0] == "专家 0 · 1"


def test_few_rounds_are_marked_on_the_lines_of_a_population() -> None:
    few, many = (
        page_chart(rounds_chart(make_history(3, 1, n), make_config(), EN)) for n in (1, 200)
    )
    assert {t["mode"] for t in few["data"] if t["name"] == "MAPD"} == {"lines+markers"}
    assert {t["mode"] for t in many["data"] if t["name"] == "MAPD"} == {"lines"}


def test_thirty_two_members_can_be_drawn(run: Path) -> None:
    data = gather(run, None)
    history = make_history(4, 8, 60)
    chart = lineage_chart(history, EN)
    assert chart is not None
    assert len(page_chart(chart)["layout"]["yaxis"]["ticktext"]) == 32
    slide = population_slide(replace(data, populations={"seed-42": history}), "seed-42", EN)
    assert draw_slide(slide).startswith(b"\x89PNG")
