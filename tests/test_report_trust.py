"""What a report says of how far its numbers can be believed: no more than trust.json does."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from test_report import days, figures, html_of, make_run
from worlds import make_world

from echelon.cli.evaluate import how_sure
from echelon.errors import StoreError
from echelon.evaluation.trust import load_trust
from echelon.ops.measures import LABELS
from echelon.report.pages import render_part
from echelon.report.run.gather import SplitData, gather
from echelon.report.run.page import PARTS
from echelon.report.run.trust import range_text, search_lines, span_of, verdict_sentence
from echelon.report.texts import Words

EN, ZH = Words("en"), Words("zh")
ROOT = math.sqrt(252.0)


def three_windows() -> dict[str, range]:
    return {"train": range(80), "valid": range(80, 160), "test": range(160, 260)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = make_world(n_rows=260, n_assets=3, times=days(260), splits=three_windows())
    runs = tmp_path_factory.mktemp("runs")
    other = ("train.gamma=0.9", "eval.baselines=[equal_weight]")
    make_run(runs / "other", world=world, seeds=(7,), overrides=other)
    return make_run(runs / "mine", world=world, seeds=(42, 43), splits=("train", "valid", "test"))


@pytest.fixture(scope="module")
def splits(run: Path) -> dict[str, SplitData]:
    return {split.name: split for split in gather(run, None).splits}


@pytest.fixture
def trust(splits: dict[str, SplitData]) -> dict[str, Any]:
    """The test window's, to be changed."""
    assert splits["test"].trust is not None
    return copy.deepcopy(dict(splits["test"].trust))


def trust_card(split: SplitData, words: Words = EN) -> str:
    return render_part("trust_card", words, split=split, **PARTS)


def card(split: SplitData, words: Words = EN) -> str:
    """The section as text without markup, a space between cells."""
    html = trust_card(split, words)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def shown(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def differing(trust: dict[str, Any], low: float, high: float, key: str) -> dict[str, Any]:
    """The same with other ratios vs equal weight, a year; wider at twice the blocks."""
    for both, shift in ((trust["differences"]["equal_weight"], 0.0), (trust["active"]["agent"], 1)):
        for kind, more in (("single", 0.0), ("double", 0.1)):
            both[kind] |= {
                "estimate": ((low + high) / 2 + shift) / ROOT,
                "low": (low - more + shift) / ROOT,
                "high": (high + more + shift) / ROOT,
            }
    trust["verdict"]["key"] = key
    return trust


# The verdict


@pytest.mark.parametrize(
    ("key", "low", "high", "said", "chinese"),
    [
        ("same", -0.7, 0.5, "No significant difference from equal weight", "无显著差异"),
        ("worse", -1.7, -0.5, "Worse than equal weight", "劣于等权"),
        (
            *("calmer", 0.5, 1.1),
            "A higher Sharpe ratio than equal weight, but no significant active return over it",
            "但相对其没有显著的超额收益",
        ),
        (
            *("better", 0.5, 1.1),
            "Better than equal weight, also after counting the 7 configurations",
            "计入所尝试的 7 组配置后依然成立",
        ),
        (
            *("undeflated", 0.5, 1.1),
            "Ahead of equal weight, but not after counting the 7 configurations",
            "但计入所尝试的 7 组配置后不再成立",
        ),
    ],
)
def test_verdict_is_one_sentence_with_the_wider_interval(
    trust: dict[str, Any], key: str, low: float, high: float, said: str, chinese: str
) -> None:
    tree = differing(trust, low, high, key)
    sentence = verdict_sentence(tree, EN, 7)
    assert sentence.startswith(said)
    middle, first, last = shown((low + high) / 2), shown(low - 0.1), shown(high + 0.1)
    ratio, least, most = (shown(v + 1) for v in ((low + high) / 2, low - 0.1, high + 0.1))
    assert sentence.endswith(
        f" (ΔSharpe {middle}, 95 % CI {first}…{last}; "
        f"information ratio {ratio}, 95 % CI {least}…{most})."
    )
    assert chinese in verdict_sentence(tree, ZH, 7)
    assert f"95 % 置信区间 {first}…{last}" in verdict_sentence(tree, ZH, 7)


def test_lead_whose_search_is_not_known_is_not_claimed(trust: dict[str, Any]) -> None:
    tree = differing(trust, 0.5, 1.1, "undeflated")
    tree["claim"]["deflated"] = None
    assert "what was tried before is not known, so nothing is claimed" in verdict_sentence(
        tree, EN, None
    )


def test_windows_that_chose_or_taught_claim_nothing(splits: dict[str, SplitData]) -> None:
    for name, why in (("valid", "chose the checkpoints"), ("train", "agents were trained on")):
        tree = splits[name].trust
        assert tree is not None
        for key in ("better", "undeflated", "worse", "same"):
            sentence = verdict_sentence({**tree, "verdict": {**tree["verdict"], "key": key}}, EN, 3)
            assert why in sentence
            assert "nothing can be claimed from it" in sentence
            assert "Better" not in sentence
            assert "(ΔSharpe vs equal weight " in sentence


def test_verdict_says_why_nothing_can_be_said(trust: dict[str, Any]) -> None:
    trust["differences"] = {}
    assert "equal weight was not run" in verdict_sentence(trust, EN, None)
    trust["bars"] = 41
    assert verdict_sentence(trust, EN, None).startswith("Too few bars for a verdict: 41; at")


def test_difference_without_an_error_has_no_interval(trust: dict[str, Any]) -> None:
    trust["differences"]["equal_weight"]["double"]["low"] = None
    assert math.isnan(span_of(trust["differences"]["equal_weight"], ROOT).low)
    assert "no interval; information ratio" in verdict_sentence(trust, EN, None)
    del trust["active"]  # as evaluations made before have it
    assert "no interval)" in verdict_sentence(trust, EN, None)


def test_verdict_of_a_window_that_proves_nothing_has_no_colour(
    splits: dict[str, SplitData], trust: dict[str, Any]
) -> None:
    tree = differing(trust, 0.5, 1.1, "better")
    test = replace(splits["test"], trust=tree)
    assert '<p class="verdict good">' in trust_card(test)
    valid = replace(splits["valid"], trust=tree | {"split": "valid"})
    assert '<p class="verdict open">' in trust_card(valid)


# Numbers


def test_every_difference_is_shown_a_year_in_table_and_chart(
    run: Path, splits: dict[str, SplitData]
) -> None:
    split = splits["test"]
    assert split.trust is not None
    differences = split.trust["differences"]
    assert set(differences) == {r.key for r in split.baselines}
    text = card(split)
    for name, both in differences.items():
        single, double = both["single"], both["double"]
        cells = [shown(single["estimate"] * ROOT)]
        cells += [
            f"{shown(b['low'] * ROOT)} to {shown(b['high'] * ROOT)}" for b in (single, double)
        ]
        assert f"{EN.name(name)} {' '.join(cells)}" in text
    figure = go.Figure(figures(html_of(run))["test/differences"])
    single, double = figure.data
    names = [EN.name(r.key) for r in split.baselines]
    assert list(figure.layout.yaxis.ticktext) == names
    np.testing.assert_allclose(
        single.x, [differences[r.key]["single"]["estimate"] * ROOT for r in split.baselines], 1e-4
    )
    highs = [differences[r.key]["double"]["high"] * ROOT for r in split.baselines]
    np.testing.assert_allclose(np.add(double.x, double.error_x.array), highs, rtol=1e-4)
    low, high = figure.layout.yaxis.range
    assert low > high  # from the top down
    assert figure.layout.shapes[0].x0 == 0.0


def test_search_is_counted_from_the_registry(splits: dict[str, SplitData]) -> None:
    test, valid = splits["test"], splits["valid"]
    assert test.trust is not None
    assert valid.trust is not None
    looks = {line.name: line for line in search_lines(test.trust, EN)}
    assert looks["Looks at this test window"].value == "2"
    assert "By 2 runs" in looks["Looks at this test window"].said
    tried = {line.name: line for line in search_lines(valid.trust, EN)}
    assert tried["Configurations tried"].value == "2"
    assert test.tried == valid.tried == 2
    hurdle = shown(valid.trust["deflation"]["hurdle"] * ROOT)
    found = tried["Deflated Sharpe ratio"]
    assert found.value == f"{valid.trust['deflation']['probability']:.3f}"
    assert f"above {hurdle} (annual), which the best of 2 configurations" in found.said
    deflated = looks["Deflated on validation"]
    assert deflated.value == f"{valid.trust['deflation']['probability']:.3f}"
    assert looks["Superior predictive ability, p-value"].value != "–"
    assert "Chosen on these days" not in looks


def test_overfitting_needs_twenty_configurations_and_shows_its_null_band(
    trust: dict[str, Any],
) -> None:
    line = {found.name: found for found in search_lines(trust, EN)}[EN("pbo")]
    assert (line.value, line.said) == (
        "–",
        "Needs 20 configurations on the same days; there are 2.",
    )
    trust["overfitting"] = {
        "probability": 0.31,
        "null_low": 0.22,
        "null_high": 0.79,
        "n_configurations": 24,
        "n_blocks": 16,
    }
    line = {found.name: found for found in search_lines(trust, EN)}[EN("pbo")]
    assert line.value == "0.310"
    assert "among 24 configurations" in line.said
    assert "0.220 to 0.790" in line.said


def test_what_has_no_number_is_a_dash_with_its_reason(
    splits: dict[str, SplitData], trust: dict[str, Any]
) -> None:
    trust["seeds"]["measures"]["calmar"] = None
    trust["costs"][0]["sharpe_annual"] = None
    trust["deflation"] |= {"psr": None, "probability": None, "probability_effective": None}
    trust["claim"]["deflated"] = None
    trust["superiority"] = None
    trust["differences"]["cash"]["single"] |= {"low": None, "high": None}
    html = trust_card(replace(splits["test"], trust=trust))
    assert html.count(f'<td title="{EN("no_number")}">–</td>') == 4
    assert html.count(f'<td title="{EN("no_error")}">–</td>') == 1
    lines = {line.name: line for line in search_lines(trust, EN)}
    for name in ("psr", "dsr", "dsr_chosen", "spa"):
        assert lines[EN(name)].value == "–"
    assert lines[EN("psr")].said == EN("no_variance")
    assert "None" not in html
    trust |= {"bars": 40, "deflation": None, "differences": {}}
    text = card(replace(splits["test"], trust=trust))
    assert text.count("40; at least 60 are needed") == 4


def test_validation_windows_on_these_days_are_told(trust: dict[str, Any]) -> None:
    trust["registry"]["trials"] = 3
    line = {found.name: found for found in search_lines(trust, EN)}["Chosen on these days"]
    assert line.value == "3"
    assert "they have seen it" in line.said


def test_seeds_have_interval_and_interquartile_mean(splits: dict[str, SplitData]) -> None:
    split = splits["test"]
    assert split.trust is not None
    text = card(split)
    assert "Student's t interval over 2 seeds" in text
    for name, found in split.trust["seeds"]["measures"].items():
        label = LABELS[name]
        least = max(found["low"], label.least)
        low, high, iqm = map(label.format, (least, found["high"], found["iqm"]))
        assert f"{low.removesuffix(label.suffix)} to {high} {iqm}" in text, name


def test_many_seeds_say_bootstrap_and_one_seed_says_there_is_no_interval(
    splits: dict[str, SplitData], trust: dict[str, Any]
) -> None:
    one = {"estimate": 1.0, "low": 0.5, "high": 1.5, "iqm": 1.1, "n": 12, "method": "bootstrap"}
    trust["seeds"] = {"n": 12, "measures": {"sharpe_annual": one}}
    many = trust_card(replace(splits["test"], trust=trust))
    assert "studentised bootstrap over 12 seeds" in many
    trust["seeds"] = {"n": 1, "measures": {"sharpe_annual": one | {"low": None}}}
    single = trust_card(replace(splits["test"], trust=trust))
    assert "no interval" in single
    assert "Train more (--seeds 5)" in single
    assert single.count("<table") == many.count("<table") - 1


def test_cost_sweep_shows_agents_and_equal_weight(splits: dict[str, SplitData]) -> None:
    split = splits["test"]
    assert split.trust is not None
    text = card(split)
    for line in split.trust["costs"]:
        agent, other = line["sharpe_annual"], line["equal_weight_sharpe_annual"]
        low, high = shown(agent["low"]), shown(agent["high"])
        row = f"{line['factor']:g}× {shown(agent['estimate'])} {low} to {high} {shown(other)}"
        assert row in text
    assert [line["factor"] for line in split.trust["costs"]] == [0.0, 1.0, 2.0]


def test_training_window_has_no_search(splits: dict[str, SplitData]) -> None:
    text = card(splits["train"])
    assert "Deflated" not in text
    assert EN("differences") in text


def test_section_is_chinese_in_a_chinese_report(splits: dict[str, SplitData]) -> None:
    text = card(splits["test"], ZH)
    for key in ("trust", "differences", "search", "psr", "dsr", "pbo", "spa", "sweep"):
        assert ZH(key) in text
        assert EN(key) not in text


# What can go wrong


def test_run_evaluated_without_statistics_is_told_to_evaluate_again(
    run: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(run, tmp_path / "copy")
    (copied / "evaluations" / "test" / "trust.json").unlink()
    html = html_of(copied)
    assert f"Evaluate it again: echelon evaluate {copied} --split test" in html
    assert "test/differences" not in figures(html)
    assert "valid/differences" in figures(html)


@pytest.mark.parametrize("split", ["test", "valid"])
def test_damaged_statistics_are_named(run: Path, tmp_path: Path, split: str) -> None:
    copied = shutil.copytree(run, tmp_path / "copy")
    path = copied / "evaluations" / split / "trust.json"
    path.write_text('{"format": 1', encoding="utf-8")
    with pytest.raises(
        StoreError, match=rf"{split}/trust\.json: missing or damaged.*echelon evaluate"
    ):
        gather(copied, ["test"])


def test_statistics_without_a_part_are_named(run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run, tmp_path / "copy")
    path = copied / "evaluations" / "test" / "trust.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    del tree["costs"]
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(StoreError, match=r"trust\.json: .*costs: Field required.*echelon evaluate"):
        gather(copied, ["test"])


# The command line


def test_command_line_says_verdict_seeds_deflation_and_looks(run: Path) -> None:
    trust = load_trust(run, "test")
    assert trust is not None
    lines = list(how_sure(run, "test"))
    assert lines[0] == verdict_sentence(trust, EN, 2)
    assert lines[1].startswith("Sharpe ")
    assert lines[1].endswith("(t, n = 2)")
    assert lines[2].startswith("information ratio over equal_weight, agent: ")
    assert any("deflated by 2 looks" in line for line in lines)
    assert lines[-1] == "this test window has been read 2 times, by 2 runs"
    assert "deflated by 2 configurations" in "\n".join(how_sure(run, "valid"))
    assert len(list(how_sure(run, "train"))) == 3


def test_command_line_is_silent_where_nothing_is_known(tmp_path: Path) -> None:
    assert list(how_sure(tmp_path, "test")) == []


def test_interval_ends_where_the_measure_does() -> None:
    drawdown, gain = LABELS["max_drawdown"], LABELS["total_return"]
    assert range_text(-0.256, 0.697, Words("en"), drawdown) == "0.00 to 69.7 %"
    assert range_text(-0.256, 0.697, Words("en"), gain) == "−25.6 to 69.7 %"


def test_plots_side_by_side_scroll_where_there_is_no_room(run: Path) -> None:
    html = html_of(run)
    wide = '<div class="scroll"><div class="chart several" data-chart="training"></div></div>'
    assert wide in html
    assert '<div class="chart" data-chart="test/equity"></div>' in html
