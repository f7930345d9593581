"""Tuning: the same search however it is interrupted and by whoever it is done, and counted."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from echelon.config import load_config
from echelon.errors import ConfigError, UsageError
from echelon.evaluation.tuning import Tuning, read_ranges
from echelon.report.texts import Words
from echelon.report.tuning import write_tuning_report
from reliability._clusters import bare_world, run

RANGES = "train.lr_actor: {low: 1.0e-4, high: 1.0e-1, log: true}\ntrain.gamma: [0.5, 0.9]\n"
TUNE = ("tune", "-c", "flat.yaml", "--ranges", "ranges.yaml", "--output-dir", "runs/t")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = bare_world(tmp_path_factory.mktemp("tuning") / "bare")
    (place / "ranges.yaml").write_text(RANGES)
    return place


@pytest.fixture(scope="module")
def whole(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight trials in a row, by one worker."""
    place = Path(shutil.copytree(bare, tmp_path_factory.mktemp("whole") / "w"))
    run(place, *TUNE, "--trials", "8", "--workers", "1")
    return place


def table(place: Path) -> list[dict[str, str]]:
    with (place / "runs/t/tuning.csv").open(newline="") as handle:
        return list(csv.DictReader(handle))


def test_search_tries_the_ranges_and_prunes_and_draws(whole: Path) -> None:
    lines = table(whole)
    assert [line["trial"] for line in lines] == [f"trial-{k:04d}" for k in range(8)]
    assert {line["state"] for line in lines} == {"complete", "pruned"}
    assert all(1e-4 <= float(line["train.lr_actor"]) <= 1e-1 for line in lines)
    assert len({line["train.lr_actor"] for line in lines}) == 8
    assert {line["train.gamma"] for line in lines} <= {"0.5", "0.9"}
    assert (whole / "runs/t/tuning.png").read_bytes().startswith(b"\x89PNG")


def test_search_goes_on_where_it_stood_and_by_two_workers(
    bare: Path, whole: Path, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(bare, tmp_path / "w"))
    run(place, *TUNE, "--trials", "5", "--workers", "2")  # within the second generation
    assert len(table(place)) == 5
    run(place, "tune", "--resume", "runs/t", "--trials", "8", "--workers", "2")
    first, second = table(place), table(whole)
    assert first[:4] == second[:4]
    assert len(first) == 8


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def test_search_that_was_killed_comes_to_the_same_end(
    bare: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    place = Path(shutil.copytree(bare, tmp_path / "w"))
    tell, calls = Tuning.tell, iter(range(9))

    def fatal(self: Tuning, study: Any, course: Any) -> None:
        if next(calls) == 1:  # after the second generation, of which nothing is told
            raise Killed
        tell(self, study, course)

    with monkeypatch.context() as patch:
        patch.setattr(Tuning, "tell", fatal)
        with pytest.raises(Killed):
            run(place, *TUNE, "--trials", "8", "--workers", "1")
    run(place, "tune", "--resume", "runs/t", "--workers", "1")
    assert table(place) == table(whole)


def test_every_trial_is_counted_where_a_claim_is_deflated(whole: Path) -> None:
    registry = json.loads((whole / "runs/registry/trials.json").read_text())
    names = sorted(line["run"] for line in registry["lines"])
    assert names == [f"trial-{k:04d}" for k in range(8)]
    assert not (whole / "runs/registry/reads.json").exists()
    run(whole, "evaluate", "runs/t/trials/trial-0001", "--split", "test")
    trust = (whole / "runs/t/trials/trial-0001/evaluations/test/trust.json").read_text()
    assert json.loads(trust)["claim"]["trials"] == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.gamma: 0.5\n", "train.gamma: expected {low"),
        ("train.gamma: {low: 0.9, high: 0.5}\n", "train.gamma: expected {low"),
        ("train.gamma: {low: 0, high: 0.5, log: true}\n", "log wants low above 0"),
        ("train.gama: [0.5, 0.9]\n", "train.gama"),
        ("train.gamma: [0.5, 1.9]\n", "train.gamma = 1.9"),
        ("split.valid: [1, 2]\n", "no setting of an agent"),
    ],
)
def test_range_that_is_no_good_is_refused_with_its_key(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "ranges.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_ranges(tmp_path / "ranges.yaml", load_config(None, []))
    assert words in str(caught.value)


@pytest.mark.parametrize(("lang", "page"), [("en", "report.html"), ("zh", "report.zh.html")])
def test_report_shows_the_search_and_every_trial_in_both_languages(
    whole: Path, lang: str, page: str
) -> None:
    run(whole, "report", "runs/t", "--lang", lang)
    text = (whole / "runs/t/report" / page).read_text()
    words = Words(lang)
    for key in ("tuning_title", "tuning_search_note", "tuning_pruned", "tuning_log"):
        assert words(key) in text
    assert words("tuning_deflation", n=8) in text
    lines = table(whole)
    complete = [line for line in lines if line["state"] == "complete"]
    best = max(complete, key=lambda line: float(line["value"]))
    cells = re.findall(r'<th scope="row">(?:<b>)?(trial-\d+)', text)
    assert sorted(cells) == [line["trial"] for line in lines]
    assert cells[0] == best["trial"]
    assert f"<b>{best['trial']}</b>" in text
    for line in lines:  # each is a point of the chart, with what it came to
        assert f"{line['trial']}: {float(line['value']):.3f}" in text
    assert "train.lr_actor: 0.0001 – 0.1" in text


def test_report_of_a_search_that_has_not_ended_names_the_command(
    bare: Path, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(bare, tmp_path / "w"))
    tuning = Tuning(
        place / "runs/t",
        load_config(place / "flat.yaml", []),
        read_ranges(place / "ranges.yaml", load_config(place / "flat.yaml", [])),
    )
    tuning.directory.mkdir(parents=True)
    tuning.save()
    with pytest.raises(UsageError, match=r"has not ended\. Go on with `echelon tune --resume"):
        write_tuning_report(tuning.directory)
    with pytest.raises(UsageError, match="trials on validation only"):
        run(place, "report", "runs/t", "--split", "test")
