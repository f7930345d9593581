"""A hierarchy beside what is made of the same experts, from the policy to the printed page."""

from __future__ import annotations

import json
import math
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from commands import Always, Tilted
from rule_routers import FixedRouter
from test_report import days, html_of, make_run, three_splits
from walks import make_walk
from worlds import make_config, make_world

from echelon.backtest.baselines import Momentum
from echelon.backtest.run import run_backtest
from echelon.cli.console import out
from echelon.cli.evaluate import how_sure, print_evaluation
from echelon.cli.walk_forward import print_walk
from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.errors import StoreError
from echelon.evaluation.evaluate import Evaluation, load_evaluation
from echelon.evaluation.statistics import at_both_blocks
from echelon.evaluation.trust import (
    BEST_EXPERT,
    EXPERTS_MEAN,
    Track,
    by_row,
    load_trust,
    reference_returns,
)
from echelon.evaluation.walkforward import WalkForward, WalkForwardResult, statistics, stitch
from echelon.ops.measures import LABELS, information_ratio
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HEDGE, HedgeRouter, reference_policies_of
from echelon.report.run.gather import gather
from echelon.report.texts import Words
from echelon.report.walkforward import write_walk_forward_report

CONFIG = make_config("meta_router.horizons=[2,5]", "meta_router.every_bars=2")
NAMES = (HEDGE, "expert-0", "expert-1")
SEEDS = (42, 43)
EN, ZH = Words("en"), Words("zh")


def hierarchy(seed: int) -> HierarchyPolicy:
    """Two rules, of every seed others, of which the router knows one only."""
    experts = [Tilted("up", 1.0 + seed % 5), Always("flat", (0.4, 0.1, 0.1, 0.2))]
    return HierarchyPolicy(experts, FixedRouter(0), CONFIG, seed)


class Alone:
    """The same agent, whose experts nobody knows of."""

    kind: ActionKind = "weights"
    name = "alone"

    def __init__(self, seed: int) -> None:
        self._policy = hierarchy(seed)

    def start(self, world: World, span: range) -> None:
        self._policy.start(world, span)

    def decide(self, row: np.ndarray, held: Holdings) -> np.ndarray:
        return self._policy.decide(row, held)


def world_of(bars: int = 400) -> World:
    return make_world(n_rows=bars, n_assets=4, times=days(bars), splits=three_splits(bars))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "hierarchy"
    return make_run(path, world=world_of(), seeds=SEEDS, splits=("test",), policy=hierarchy)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "hierarchy"
    return make_run(path, world=world_of(), seeds=SEEDS, splits=("test",), policy=Alone)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("walks") / "walk"
    return make_walk(path, folds=2, seeds=SEEDS, policy=hierarchy)


@pytest.fixture(scope="module")
def plain_walk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("walks") / "walk"
    return make_walk(path, folds=2, seeds=SEEDS, policy=Alone)


def text_of(html: str) -> str:
    body = re.sub(r"<(script|style)[^>]*>.*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def titles_of(lines: list[str]) -> list[str]:
    """First cells of the rows of a printed table."""
    return [line.split("│")[1].strip() for line in lines if line.startswith("│")]


def tree_of(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tree


# The policy


def test_reference_policies_are_the_hedge_over_the_same_experts_and_each_expert() -> None:
    world, agent = world_of(), hierarchy(1)
    found = reference_policies_of(agent)
    assert tuple(found) == NAMES
    hedge = HierarchyPolicy(agent.experts, HedgeRouter(rate=60.0, share=0.004), CONFIG, 1)
    wanted = run_backtest(hedge, world, world.span("test"), CONFIG)
    got = run_backtest(found[HEDGE], world, world.span("test"), CONFIG)
    np.testing.assert_array_equal(got.value, wanted.value)
    assert hedge.record is not None
    assert len(set(hedge.record.in_charge.tolist())) > 1, "the hedge never switches"
    assert (found["expert-0"], found["expert-1"]) == agent.experts


def test_agent_without_parts_brings_nobody_along() -> None:
    assert reference_policies_of(Momentum(3)) == {}


# Rows


def measured(sharpe: float) -> dict[str, float]:
    return dict.fromkeys(LABELS, 1.0) | {"sharpe_annual": sharpe, "calmar": 10 * sharpe}


def test_best_expert_is_chosen_by_sharpe_and_keeps_its_other_measures() -> None:
    nan = math.nan
    own = {HEDGE: measured(0.5), "expert-0": measured(nan), "expert-1": measured(-1.0)}
    other = {HEDGE: measured(0.7), "expert-0": measured(2.0), "expert-1": measured(1.0)}
    rows = by_row({1: own, 2: other}, best=True)
    assert tuple(rows) == (HEDGE, BEST_EXPERT, EXPERTS_MEAN)
    assert [seed["calmar"] for seed in rows[BEST_EXPERT]] == [-10.0, 20.0]
    assert [seed["sharpe_annual"] for seed in rows[HEDGE]] == [0.5, 0.7]
    assert [seed["sharpe_annual"] for seed in rows[EXPERTS_MEAN]] == pytest.approx(
        [nan, 1.5], nan_ok=True
    )
    assert tuple(by_row({1: own})) == (HEDGE, EXPERTS_MEAN), "a maximum is for those who ask for it"
    assert by_row({}) == by_row({}, best=True) == {}


def test_returns_of_a_ruined_expert_are_nothing_after_its_end() -> None:
    bars = {HEDGE: 3, "expert-0": 1, "expert-1": 3}
    found = reference_returns({1: {name: Track({}, np.ones(n)) for name, n in bars.items()}}, 3)
    assert found[HEDGE].tolist() == [[1.0], [1.0], [1.0]]
    assert found[EXPERTS_MEAN].tolist() == [[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]


# Evaluation


def test_evaluation_has_the_backtests_of_every_seeds_reference_policies(run: Path) -> None:
    found = load_evaluation(run, "test")
    assert {seed: tuple(own) for seed, own in found.reference_policies.items()} == dict.fromkeys(
        SEEDS, NAMES
    )
    world = world_of()
    equal = found.tables("equal_weight").equity["return"][1:].to_numpy()
    for seed in SEEDS:
        for name, policy in reference_policies_of(hierarchy(seed)).items():
            backtest = run_backtest(policy, world, world.span("test"), CONFIG)
            active = information_ratio(backtest.returns, equal, world.periods_per_year)
            wanted = backtest.measures | {"information_ratio": active}
            assert math.isfinite(active)
            assert found.reference_policies[seed][name] == pytest.approx(wanted, nan_ok=True), (
                seed,
                name,
            )
            equity = found.tables(name, seed).equity
            np.testing.assert_array_equal(equity["value"].to_numpy(), backtest.value)


def test_differences_to_reference_policies_pair_the_same_days(run: Path) -> None:
    trust, found = load_trust(run, "test"), load_evaluation(run, "test")
    assert trust is not None

    def returns(*policies: str) -> np.ndarray:
        every = (found.tables(name, seed).equity for seed in SEEDS for name in policies)
        return np.column_stack([e["return"][1:].to_numpy() for e in every])

    agents, hedges, experts = returns("agent"), returns("hedge"), returns("expert-0", "expert-1")
    assert tuple(trust["reference_policies"]) == (EXPERTS_MEAN, HEDGE)  # as JSON sorts them
    for name, theirs in ((HEDGE, hedges), (EXPERTS_MEAN, experts)):
        both = at_both_blocks(agents, theirs, seed=42)
        for kind in ("single", "double"):
            wanted, got = getattr(both, kind), trust["reference_policies"][name][kind]
            assert (got["estimate"], got["low"], got["high"]) == pytest.approx(
                (wanted.estimate, wanted.low, wanted.high)
            )


def test_reference_policies_change_nothing_else_of_an_evaluation(
    run: Path, plain_run: Path
) -> None:
    for name in ("summary.json", "trust.json"):
        ours, theirs = (tree_of(r / "evaluations" / "test" / name) for r in (run, plain_run))
        assert ours.pop("reference_policies")
        for tree in (ours, theirs):
            tree.pop("evaluated", None)
            tree.pop("run", None)
        assert ours == theirs, name


def test_table_shows_who_is_above_the_same_experts(run: Path) -> None:
    found = load_evaluation(run, "test")
    with out.capture() as printed:
        print_evaluation(found, ("total_return", "sharpe", "volatility", "max_drawdown"))
    lines = printed.get().splitlines()
    start = next(k for k, line in enumerate(lines) if "over the same experts" in line)
    titles = titles_of(lines[start:])
    for title in ("agent", "Fixed-Share", "best expert*", "experts, mean"):
        assert title in titles, printed.get()
    assert titles.count("± std") == 4
    assert max(map(len, lines)) <= 80
    said = [line for line in how_sure(run, "test") if "over the same experts" in line]
    assert len(said) == 1
    assert "95 %" in said[0]


# The report of a run


def test_report_shows_hedge_hindsight_and_mean_in_both_languages(run: Path) -> None:
    found = load_evaluation(run, "test")
    for words in (EN, ZH):
        text = text_of(html_of(run, lang=words.lang))
        for key in ("reference", "row_hedge", "row_best", "row_experts", "reference_differences"):
            assert words(key) in text, key
    text = text_of(html_of(run))
    best = [
        max(own[f"expert-{k}"]["sharpe_annual"] for k in (0, 1))
        for own in found.reference_policies.values()
    ]
    ratio = LABELS["sharpe_annual"]
    row = text.partition(EN("row_experts"))[2].partition(EN.measure("sharpe_annual"))[2]
    assert ratio.format(float(np.mean(best)), float(np.std(best, ddof=1))) in row[:120]
    assert "IN HINDSIGHT" in text


def test_evaluation_of_before_is_reported_without_them(run: Path, tmp_path: Path) -> None:
    old = shutil.copytree(run, tmp_path / "old")
    for name in ("summary.json", "trust.json"):
        file = old / "evaluations" / "test" / name
        tree = tree_of(file)
        del tree["reference_policies"]
        file.write_text(json.dumps(tree), encoding="utf-8")
    assert load_evaluation(old, "test").reference_policies == {}
    assert EN("reference") not in html_of(old)


def test_summary_with_half_the_reference_policies_is_refused(run: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(run, tmp_path / "bad")
    file = bad / "evaluations" / "test" / "summary.json"
    tree = tree_of(file)
    del tree["reference_policies"]["43"]["hedge"]
    file.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(StoreError, match=r"summary.json: 'hedge' is missing"):
        gather(bad, None)


# A walk-forward


def test_walk_forward_stitches_reference_policies_by_seed_and_shows_no_maximum(walk: Path) -> None:
    table = pl.read_parquet(walk / "walk_forward.parquet")
    for fold in ("fold-0", "fold-1", "stitched"):
        whos = table.filter(pl.col("fold") == fold)["who"].to_list()
        beside = [f"seed-{seed}-{name}" for seed in SEEDS for name in NAMES]
        assert whos[-len(beside) - 2 :] == [HEDGE, EXPERTS_MEAN, *beside]
        assert BEST_EXPERT not in whos
    stitched = pl.read_parquet(walk / "stitched.parquet")
    lines = {row["who"]: row for row in table.filter(pl.col("fold") == "stitched").to_dicts()}
    for seed, name in ((42, "hedge"), (43, "expert-1")):
        who = f"seed-{seed}-{name}"
        folds = (load_evaluation(walk / f"folds/fold-{k}", "test") for k in (0, 1))
        parts = [fold.tables(name, seed).equity for fold in folds]
        by_hand = np.concatenate([p["return"][1:].to_numpy() for p in parts])
        np.testing.assert_array_equal(stitched[who].to_numpy(), by_hand)
        ratio = by_hand.mean() / by_hand.std(ddof=1) * math.sqrt(252)
        assert lines[who]["sharpe_annual"] == pytest.approx(ratio, rel=0.01)
    hedges = [lines[f"seed-{seed}-hedge"]["sharpe_annual"] for seed in SEEDS]
    assert lines[HEDGE]["sharpe_annual"] == pytest.approx(np.mean(hedges))
    assert lines[HEDGE]["sharpe_annual_std"] == pytest.approx(np.std(hedges, ddof=1))
    experts = [lines[f"seed-{s}-expert-{k}"]["sharpe_annual"] for s in SEEDS for k in (0, 1)]
    assert lines[EXPERTS_MEAN]["sharpe_annual"] == pytest.approx(np.mean(experts))


def test_reference_policies_change_nothing_else_of_a_walk_forward(
    walk: Path, plain_walk: Path
) -> None:
    ours, theirs = (tree_of(w / "walk_forward.json") for w in (walk, plain_walk))
    assert ours["stitched"].pop("reference_policies")
    assert set(ours["statistics"].pop("reference_policies")) == {HEDGE, EXPERTS_MEAN}
    assert ours == theirs


def test_page_of_a_walk_forward_has_them_beside_the_agent(walk: Path, plain_walk: Path) -> None:
    for lang, words in (("en", EN), ("zh", ZH)):
        text = text_of(write_walk_forward_report(walk, lang).read_text(encoding="utf-8"))
        for key in ("reference", "row_hedge", "row_experts", "reference_differences"):
            assert words(key) in text, key
        assert words("row_best") not in text
    plain = text_of(write_walk_forward_report(plain_walk).read_text(encoding="utf-8"))
    assert EN("reference") not in plain


def test_command_prints_them_stitched(walk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = WalkForward.open(walk)
    found: dict[str, Evaluation] = {
        fold.name: load_evaluation(walk / "folds" / fold.name, "test") for fold in opened.folds
    }
    stitched = stitch(found)
    sure = statistics(stitched, 42, looks=1, trusts=[])
    with out.capture() as printed:
        print_walk(WalkForwardResult(opened.folds, found, {}, stitched, sure))
    titles = titles_of(printed.get().splitlines())
    assert titles[titles.index("Fixed-Share") :][:4] == [
        "Fixed-Share",
        "± std",
        "experts, mean",
        "± std",
    ]
    assert "Fixed-Share over the same experts" in capsys.readouterr().out
