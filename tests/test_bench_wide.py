"""The study of the wide universe: which symbols it may see, how it goes on, and its table."""

from __future__ import annotations

import json
import math
from pathlib import Path

import polars as pl
import pytest
from test_report_walkforward import Tilted
from walks import make_walk

from bench import wide


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("study") / "walk"
    return make_walk(place, bars=(120, 60, 160), policy=Tilted, ensemble=True, volume=50_000.0)


def test_the_same_hundred_symbols_are_set_aside_whatever_their_order(tmp_path: Path) -> None:
    names = [f"S{k:03d}" for k in range(500)]
    kept, aside = wide.split_symbols(names)
    assert (len(kept), len(aside), set(kept) & set(aside)) == (400, 100, set())
    assert wide.split_symbols(names[::-1]) == (kept, aside)
    bars = pl.DataFrame({"symbol": names, "close": 1.0})
    bars.write_parquet(tmp_path / "all.parquet")
    parts = [tmp_path / "new" / f"{part}.parquet" for part in wide.PARTS]
    assert wide.main([str(tmp_path / "all.parquet"), *map(str, parts)]) == 0
    assert [pl.read_parquet(part)["symbol"].to_list() for part in parts] == [kept, aside]


def test_study_begins_a_walk_forward_and_then_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode = 3

    def run(command: list[str], **_: object) -> Done:
        commands.append(command[3:])
        return Done()

    monkeypatch.setattr(wide.subprocess, "run", run)
    pl.DataFrame({"symbol": [f"S{k}" for k in range(150)]}).write_parquet(tmp_path / "all.parquet")
    given = ["study", str(tmp_path / "all.parquet"), str(tmp_path / "runs")]
    assert wide.main([*given, "-o", "seed=7", "--workers", "2"]) == 3
    place, data = tmp_path / "runs" / "walk", tmp_path / "runs" / "development.parquet"
    assert commands[0] == [
        *("walk-forward", "--config", "configs/wide.yaml", "-o", f"data.path={data}"),
        *("-o", "seed=7", "--seeds", "3", "--output-dir", str(place), "--workers", "2"),
    ]
    place.mkdir()
    (place / "walk_forward.json").write_text("{}")
    wide.main(given)
    assert commands[1] == ["walk-forward", "--resume", str(place)]
    wide.main([*given, "--held-out"])
    assert f"data.path={tmp_path / 'runs' / 'held-out.parquet'}" in commands[2]


def test_table_says_what_the_walk_forward_came_to(walk: Path) -> None:
    tree = json.loads((walk / "walk_forward.json").read_text(encoding="utf-8"))
    found, annual = tree["statistics"], math.sqrt(tree["stitched"]["periods_per_year"])
    table = wide.study_table(walk)
    active = found["active"]["ensemble"]
    cell = (
        f"{active['single']['estimate'] * annual:.2f} "
        f"({active['single']['low'] * annual:.2f} to {active['single']['high'] * annual:.2f}; "
        f"{active['double']['low'] * annual:.2f} to {active['double']['high'] * annual:.2f})"
    )
    assert f"| {cell} | – |" in table  # no forecast here
    measures = pl.read_parquet(walk / "walk_forward.parquet")
    for year in ("year-2017", "year-2018"):
        line = measures.filter((pl.col("fold") == year) & (pl.col("who") == "ensemble")).to_dicts()
        assert f"{line[0]['information_ratio']:.2f} / {line[0]['sharpe_annual']:.2f}" in table
    assert "10,000,000" in table
    low = min(active[kind]["low"] for kind in active) * annual
    word = "met" if low >= 0 else "missed"
    line = f"- ensemble: information ratio, lower end {low:.2f}, bar 0.00: {word} by {abs(low):.2f}"
    assert line in table


def test_table_of_a_walk_forward_that_failed_says_so(tmp_path: Path) -> None:
    place = make_walk(tmp_path / "walk", folds=2, failed="fold-1", seeds=(1,))
    with pytest.raises(SystemExit, match="a fold failed or is missing"):
        wide.study_table(place)
