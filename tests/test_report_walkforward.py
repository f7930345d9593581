"""The page of a walk-forward: its windows, the stitched series, every fold, and its faults."""

from __future__ import annotations

import json
import math
import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest
from browsers import draw_page, drawn_charts
from shells import Shell
from test_report import equity_arrays, figures, own_part
from walks import make_walk

from echelon.envs.act import Holdings
from echelon.errors import StoreError
from echelon.market import Rows
from echelon.ops.measures import LABELS
from echelon.report.run.trust import verdict_sentence
from echelon.report.texts import Words
from echelon.report.walkforward import (
    SHOWN,
    WalkData,
    gather_walk,
    render_walk,
    write_walk_forward_report,
)
from echelon.types import Floats

EN = Words("en")
FOLDS = ("fold-0", "fold-1", "fold-2")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_walk(tmp_path_factory.mktemp("studies") / "walk")


@pytest.fixture(scope="module")
def page(directory: Path) -> str:
    return write_walk_forward_report(directory).read_text(encoding="utf-8")


@pytest.fixture
def copied(directory: Path, tmp_path: Path) -> Path:
    return shutil.copytree(directory, tmp_path / "walk")


@pytest.fixture
def walk(directory: Path) -> WalkData:
    return gather_walk(directory)


def text_of(html: str) -> str:
    """Without script, style and markup; a space between cells."""
    body = re.sub(r"<(script|style)[^>]*>.*?</\1>", " ", own_part(html), flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def rewrite(path: Path, **changes: object) -> None:
    """Change parts of a JSON file; None: leave the part out."""
    tree = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {name: value for name, value in tree.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def test_page_is_one_file_that_reaches_for_nothing(directory: Path, page: str) -> None:
    assert (directory / "report" / "report.html").is_file()
    own = own_part(page)
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in own
    assert not re.findall(r"https?:|//[a-z]+\.|url\(|@import|\bsrc=|\bhref=|<link|<iframe", own)
    again = render_walk(gather_walk(directory), EN, f"echelon report {directory}")
    assert again == page


def test_charts_are_what_plotly_accepts(page: str) -> None:
    found = figures(page)
    wanted = {"windows", "differences", "equity", "folds"}
    assert set(found) == {f"stitched/{name}" for name in wanted}
    for name, tree in found.items():
        assert len(go.Figure(tree).data) > 0, name


def test_windows_are_drawn_from_their_first_day_to_their_last(page: str, walk: WalkData) -> None:
    train, valid, test = figures(page)["stitched/windows"]["data"]
    rows = [base + thick / 2 for base, thick in zip(train["base"], train["y"], strict=True)]
    assert rows == pytest.approx(range(len(FOLDS)))
    assert train["base"] == valid["base"] == test["base"]
    fold = walk.folds[1]
    days = (fold.valid[1] - fold.valid[0]).days + 1
    assert valid["width"][1] == days * 24 * 3600 * 1000
    middle = np.datetime64(fold.valid[0], "ms") + np.timedelta64(valid["width"][1] // 2, "ms")
    assert np.datetime64(valid["x"][1]) == middle
    assert test["hovertext"][1] == f"fold-1: {fold.test[0]} – {fold.test[1]} (80)"


def test_equity_is_the_product_of_the_stitched_returns(directory: Path, page: str) -> None:
    returns = pl.read_parquet(directory / "stitched.parquet")
    arrays = equity_arrays(page, "stitched/equity", (42, 43))
    assert len(arrays["times"]) == len(returns) + 1
    for key in ("seed-42", "equal_weight"):
        growth = np.concatenate([[1.0], np.cumprod(1.0 + returns[key].to_numpy())])
        np.testing.assert_allclose(arrays[f"growth {key}"], growth, rtol=1e-5)
        deepest = float((1.0 - growth / np.maximum.accumulate(growth)).max())
        assert -min(arrays[f"drawdown {key}"]) == pytest.approx(deepest, rel=1e-4)
    lines = figures(page)["stitched/equity"]["layout"]["shapes"]
    assert len(lines) == 2 * (len(FOLDS) - 1)  # where a new fold begins, in both plots


def test_every_fold_has_its_measures_beside_two_baselines(page: str, walk: WalkData) -> None:
    text = text_of(page)
    for fold in (*FOLDS, "stitched"):
        cells = []
        for name in SHOWN:
            label = LABELS[name]
            for who in ("agent", "equal_weight", "benchmark"):
                values = walk.values(fold, who)
                assert values is not None
                assert math.isnan(values[f"{name}_std"]) == (who != "agent")
                cells.append(
                    label.format(values[name], values[f"{name}_std"]).removesuffix(label.suffix)
                )
        assert f"{'Stitched' if fold == 'stitched' else fold} {' '.join(cells)}" in text, fold


def test_every_other_measure_is_in_the_folded_tables(page: str, walk: WalkData) -> None:
    panes = re.findall(r'data-pane="stitched/measures" data-key="(\w+)"', page)
    assert panes == list(LABELS)
    values = walk.values("fold-2", "momentum")
    assert values is not None
    assert LABELS["cvar95"].format(values["cvar95"]) in page


def test_headline_is_the_verdict_on_the_stitched_series(directory: Path, walk: WalkData) -> None:
    tree = json.loads((directory / "walk_forward.json").read_text(encoding="utf-8"))
    found = tree["statistics"]["differences"]["equal_weight"]
    root = math.sqrt(tree["stitched"]["periods_per_year"])
    low = min(found[kind]["low"] for kind in found) * root
    high = max(found[kind]["high"] for kind in found) * root
    words = {
        "same": "No significant difference from equal weight",
        "worse": "Worse than equal weight",
        "better": "also after counting the one look at these test windows",
        "undeflated": "but not after counting the one look at these test windows",
    }
    sentence = verdict_sentence(walk.statistics, EN, walk.statistics["looks"], "looks")
    assert words[tree["statistics"]["verdict"]["key"]] in sentence
    assert f"95 % CI {low:.2f}…{high:.2f}; ".replace("-", "−") in sentence
    assert re.search(r"; information ratio \S+, 95 % CI \S+…\S+\)\.$", sentence)


def test_statistics_of_the_stitched_series_are_shown(page: str, walk: WalkData) -> None:
    text = text_of(page)
    found = walk.statistics
    assert f"Probabilistic Sharpe ratio {found['deflation']['psr']:.3f}" in text
    interval = found["sharpe_annual"]
    low, high = (f"{interval[end]:.2f}".replace("-", "−") for end in ("low", "high"))
    assert f"{low} to {high}" in text
    for line in found["costs"]:
        values = (line["sharpe_annual"], line["equal_weight_sharpe_annual"])
        cells = " ".join(LABELS["sharpe_annual"].format(v) for v in values)
        assert f"{line['factor']:g}× {cells}" in text
    assert "Looks at these windows 1" in text


class Tilted:
    """A share of each asset that grows with its number, the more the higher the seed."""

    kind, name = "weights", "tilted"

    def __init__(self, seed: int) -> None:
        weights = 1.0 + (seed - 41) * np.arange(4)
        self._weights = weights / weights.sum()

    def start(self, world: object, span: range) -> None:
        """Nothing to make ready."""

    def decide(self, row: Rows, held: Holdings) -> Floats:
        return np.tile(self._weights, (len(row), 1))


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three test windows over two calendar years, with an ensemble, in a market with volume."""
    place = tmp_path_factory.mktemp("joined") / "walk"
    return make_walk(place, bars=(120, 60, 160), policy=Tilted, ensemble=True, volume=50_000.0)


def test_ensemble_stands_in_tables_and_statistics(joined: Path) -> None:
    tree = json.loads((joined / "walk_forward.json").read_text(encoding="utf-8"))
    returns = pl.read_parquet(joined / "stitched.parquet")
    found = tree["statistics"]
    assert set(found["ensemble"]) == set(found["differences"])
    assert list(found["active"])[:2] == ["agent", "ensemble"]
    for name in ("equal_weight", "momentum"):
        pair = returns.select("ensemble", name).to_numpy()
        ratios = pair.mean(axis=0) / pair.std(axis=0, ddof=1)
        estimate = found["ensemble"][name]["single"]["estimate"]
        assert estimate == pytest.approx(ratios[0] - ratios[1])
    active = (returns["ensemble"] - returns["equal_weight"]).to_numpy()
    ratio = active.mean() / active.std(ddof=1)
    assert found["active"]["ensemble"]["single"]["estimate"] == pytest.approx(ratio)
    measures = tree["stitched"]["measures"]["ensemble"]
    assert measures["information_ratio"] == pytest.approx(ratio * math.sqrt(252))
    text = text_of(write_walk_forward_report(joined).read_text(encoding="utf-8"))
    assert "Ensemble of the seeds: Sharpe ratio vs each baseline" in text
    assert "Agent Ensemble Equal weight Benchmark" in text


def test_every_year_stands_alone_and_from_it_to_the_end(joined: Path) -> None:
    returns = pl.read_parquet(joined / "stitched.parquet")
    years = returns["time"].dt.year().to_numpy()
    walk = gather_walk(joined)
    first, last = int(years.min()), int(years.max())
    assert list(walk.years) == [f"year-{year}" for year in range(first, last + 1)]
    assert last - first >= 1
    for label, rows in ((f"year-{first}", years == first), (f"from-{last}", years >= last)):
        for who in ("ensemble", "equal_weight", "seed-43"):
            own = returns[who].to_numpy()[rows]
            theirs = returns["equal_weight"].to_numpy()[rows]
            values = walk.values(label, who)
            assert values is not None
            assert values["total_return"] == pytest.approx(np.prod(1.0 + own) - 1.0)
            sharpe = math.sqrt(252) * own.mean() / own.std(ddof=1)
            assert values["sharpe_annual"] == pytest.approx(sharpe)
            active = own - theirs
            ratio = math.sqrt(252) * active.mean() / active.std(ddof=1) if active.any() else 0.0
            assert values["information_ratio"] == pytest.approx(ratio)
            assert values["turnover_annual"] >= 0.0
    assert walk.values(f"from-{first}", "ensemble") is None  # that is the stitched series
    lines = walk.statistics["from"]
    assert list(lines) == [str(year) for year in range(first + 1, last + 1)]
    single = lines[str(last)]["ensemble"]["information"]["single"]
    rows = years >= last
    active = (returns["ensemble"] - returns["equal_weight"]).to_numpy()[rows]
    assert single["estimate"] == pytest.approx(active.mean() / active.std(ddof=1))
    assert single["low"] < single["estimate"] < single["high"]
    text = text_of(write_walk_forward_report(joined).read_text(encoding="utf-8"))
    assert "Year by year Every calendar year of the stitched series by itself. Years" in text
    line = walk.statistics["from"][str(last)]["agent"]["information"]["single"]["estimate"]
    shown = LABELS["sharpe_annual"].format(line * math.sqrt(252))
    assert f"{last} – {last} {shown} " in text
    whole = walk.statistics["active"]["agent"]["single"]["estimate"] * math.sqrt(252)
    assert f"{first} – {last} {LABELS['sharpe_annual'].format(whole)} " in text


def test_capacity_is_the_mean_over_the_folds(joined: Path) -> None:
    walk = gather_walk(joined)
    folds = [
        json.loads((joined / "folds" / f / "evaluations/test/trust.json").read_text())["capacity"]
        for f in FOLDS
    ]
    usual, tenfold = walk.statistics["capacity"]
    assert (usual["factor"], tenfold["factor"], tenfold["cash"]) == (1.0, 10.0, 10 * usual["cash"])
    for name in ("sharpe_annual", "information_ratio", "participation_95"):
        assert tenfold[name] == pytest.approx(np.mean([fold[1][name] for fold in folds]))
    assert tenfold["orders"] == sum(fold[1]["orders"] for fold in folds)
    assert tenfold["participation_mean"] == pytest.approx(10 * usual["participation_mean"], rel=0.1)
    text = text_of(write_walk_forward_report(joined).read_text(encoding="utf-8"))
    assert "10× 10,000,000" in text
    own = text_of(write_walk_forward_report(joined, "zh").read_text(encoding="utf-8"))
    assert "资金容量" in own
    assert "从各年起至期末" in own


def test_walk_of_one_year_without_volume_and_weights_has_none_of_it(page: str) -> None:
    assert "Capacity" not in text_of(page)
    assert "Ensemble of the seeds" not in text_of(page)


def test_facts_say_scheme_seeds_steps_and_command(directory: Path, page: str) -> None:
    text = text_of(page)
    for said in (
        "rolling; calendar years: 6 to train, 2 to validate, 1 to test",
        "Folds 3",
        "Seeds 2",
        "Steps per agent 1,000,000",
        "made-up · " + "d" * 20,
        f"echelon report {directory}",
        "Dropped: 1 bar between train and validation, 5 bars between validation and test.",
        "total_env_steps: 1000000",
    ):
        assert said in text, said


def test_chinese_page_is_chinese(copied: Path) -> None:
    html = write_walk_forward_report(copied, "zh").read_text(encoding="utf-8")
    own = own_part(html)
    assert '<html lang="zh-CN">' in own
    words = Words("zh")
    for key in ("windows", "trust", "equity", "by_fold", "measures", "monthly", "facts"):
        assert f"<h2>{words(key)}</h2>" in own
        assert f"<h2>{EN(key)}</h2>" not in own
    assert f"echelon report {copied} --lang zh" in own


def test_failed_fold_is_told_and_nothing_is_stitched(tmp_path: Path) -> None:
    path = make_walk(tmp_path / "walk", folds=2, failed="fold-1", seeds=(1,))
    html = write_walk_forward_report(path).read_text(encoding="utf-8")
    text = text_of(html)
    assert "fold-1 failed: the disk is full" in text
    assert f"continue with: echelon walk-forward --resume {path}" in text
    assert set(figures(html)) == {"stitched/windows", "stitched/folds"}
    assert "±" not in text


def test_too_few_returns_say_so(tmp_path: Path) -> None:
    path = make_walk(tmp_path / "walk", folds=2, bars=(30, 20, 20), seeds=(1,))
    text = text_of(write_walk_forward_report(path).read_text(encoding="utf-8"))
    assert "Too few bars for a verdict: 38; at least 60 are needed." in text
    assert "Too few bars to resample: 38" in text
    assert "no interval" in text


def test_report_of_a_walk_forward_from_the_command_line(shell: Shell, copied: Path) -> None:
    out, _ = shell.works("report", str(copied))
    assert Path(out.strip().removeprefix("report: ")) == copied / "report" / "report.html"
    code, _, err = shell("report", str(copied), "--split", "test")
    assert code == 2
    assert "holds a walk-forward" in err


# What can go wrong


def test_walk_forward_that_has_not_ended_names_the_command(copied: Path) -> None:
    (copied / "walk_forward.parquet").unlink()
    with pytest.raises(StoreError, match=r"has not ended.*walk-forward --resume"):
        write_walk_forward_report(copied)


@pytest.mark.parametrize("name", ["walk_forward.parquet", "stitched.parquet"])
def test_damaged_table_is_named(copied: Path, name: str) -> None:
    (copied / name).write_bytes(b"not a table")
    with pytest.raises(StoreError, match=rf"{re.escape(name)}: missing or damaged.*--resume"):
        write_walk_forward_report(copied)


def test_table_without_a_column_is_named(copied: Path) -> None:
    path = copied / "stitched.parquet"
    pl.read_parquet(path).drop("seed-43").write_parquet(path)
    with pytest.raises(StoreError, match=r"stitched\.parquet: has no column 'seed-43'"):
        write_walk_forward_report(copied)


def test_statistics_of_another_version_are_damaged(copied: Path) -> None:
    rewrite(copied / "walk_forward.json", statistics={"differences": {}})
    with pytest.raises(StoreError, match=r"walk_forward\.json: missing or damaged"):
        write_walk_forward_report(copied)


def test_browser_draws_every_chart(directory: Path, page: str, tmp_path: Path) -> None:
    assert page
    dom = draw_page(directory / "report" / "report.html", tmp_path / "profile")
    assert drawn_charts(dom) == set(figures(page))
