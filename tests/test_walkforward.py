"""Walk-forwards: what a fold knows, what comes out, stitched returns by hand, and going on."""

from __future__ import annotations

import json
import math
import os
import signal
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from markets import make_bars
from matplotlib.image import imread
from shells import Shell, tiny

from echelon.backtest.files import AGENT, Book, Tables, save_tables
from echelon.cli.console import Watch
from echelon.config import load_config
from echelon.evaluation.evaluate import Evaluation, load_evaluation
from echelon.evaluation.walkforward import WalkForward, statistics, stitch
from echelon.features import Prepared
from echelon.ops.measures import LABELS, max_drawdown
from echelon.risk.budget import budget_cap

MONTHS = (
    *("walk_forward.unit=month", "walk_forward.train=9", "walk_forward.valid=3"),
    *("walk_forward.test=2", "walk_forward.first_test=null", "walk_forward.last_test=2016-04-30"),
    *("walk_forward.embargo_bars=3", "train.total_env_steps=400"),
)
"""Two folds of the made-up years 2015 and 2016: January and February, March and April 2016."""
FOLDS = ("2016-01..2016-02", "2016-03..2016-04")


def _words(bars: Path, *more: str) -> list[str]:
    return ["walk-forward", *tiny(bars, *MONTHS, *more), "--output-dir", "wf", "--workers", "1"]


def _table(directory: str = "wf") -> dict[tuple[str, str], dict[str, Any]]:
    rows = pl.read_csv(f"{directory}/walk_forward.csv").to_dicts()
    return {(row["fold"], row["who"]): row for row in rows}


def _tree() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(Path("wf/walk_forward.json").read_text())
    return tree


def test_walk_forward_ends_with_tables_picture_statistics_and_run_directories(
    shell: Shell, bars_file: Path
) -> None:
    out, err = shell.works(*_words(bars_file), "--seeds", "2")
    assert "2 folds × 2 seeds: 4 to train" in err
    assert err.count("rules: ") == 1  # the same in every fold
    assert "stitched: 2016-01-05 to 2016-04-29" in out
    assert "over other seeds, 95 %" in out
    assert "Sharpe vs equal_weight" in out
    assert "ensemble's Sharpe vs cash" in out
    assert "information ratio over equal_weight, ensemble" in out
    table = _table()
    whos = ("agent", "ensemble", "seed-42", "seed-43", "cash", "equal_weight")
    assert list(table) == [(fold, who) for fold in (*FOLDS, "stitched") for who in whos]
    assert pl.read_parquet("wf/walk_forward.parquet").height == len(table)
    assert imread("wf/splits.png").shape[1] > 1000
    for entry, name in zip(_tree()["folds"], FOLDS, strict=True):
        run = Path("wf/folds") / name
        facts = json.loads((run / "run.json").read_text())
        assert (facts["command"], facts["walk_forward"]) == ("walk-forward", {"fold": name})
        prepared = Prepared.open(run)
        for window in ("train", "valid", "test"):
            split = prepared.splits[window]
            assert [str(split.first), str(split.last)] == entry[window]
            assert len(split.rows) == entry["bars"][window]
        assert [str(day) for day in prepared.scaler.window] == entry["train"]
        assert [p.name for p in (run / "evaluations").iterdir()] == ["test"]
        summary = json.loads((run / "evaluations/test/summary.json").read_text())
        for seed in ("42", "43"):
            for measure, value in summary["seeds"][seed].items():
                assert table[name, f"seed-{seed}"][measure] == pytest.approx(value, nan_ok=True)
        both = [table[name, f"seed-{seed}"]["sharpe_annual"] for seed in (42, 43)]
        assert table[name, "agent"]["sharpe_annual"] == pytest.approx(np.mean(both))
        assert table[name, "agent"]["sharpe_annual_std"] == pytest.approx(np.std(both, ddof=1))
    found = _tree()["statistics"]
    assert (found["sharpe_annual"]["n"], found["sharpe_annual"]["method"]) == (2, "t")
    single, double = (found["differences"]["equal_weight"][k] for k in ("single", "double"))
    assert double["block_length"] == pytest.approx(2 * single["block_length"])
    assert single["low"] < single["estimate"] < single["high"]
    assert (found["looks"], found["deflation"]["n_trials"]) == (1, 1)
    assert found["deflation"]["probability"] == found["deflation"]["psr"]
    assert found["verdict"]["key"] in ("better", "undeflated", "calmer", "worse", "same")
    assert set(found["ensemble"]) == {"equal_weight", "cash"}
    assert [line["factor"] for line in found["costs"]] == [0.0, 1.0, 2.0]
    by_fold = [
        json.loads(Path(f"wf/folds/{name}/evaluations/test/trust.json").read_text())["costs"][2]
        for name in FOLDS
    ]
    assert found["costs"][2]["sharpe_annual"] == pytest.approx(
        np.mean([line["sharpe_annual"]["estimate"] for line in by_fold])
    )


def test_stitched_is_the_product_of_the_folds_test_returns(shell: Shell, bars_file: Path) -> None:
    shell.works(*_words(bars_file))
    table, returns = _table(), pl.read_parquet("wf/stitched.parquet")
    assert returns.columns == ["time", "fold", "seed-42", "cash", "equal_weight"]
    assert returns["time"].is_sorted()
    for who, policy in (("seed-42", 42), ("equal_weight", "equal_weight")):
        folds = (load_evaluation(Path("wf/folds") / f, "test") for f in FOLDS)
        equity = [fold.tables(policy).equity for fold in folds]
        # A new book in each fold, which begins with the same cash.
        assert {e["value"][0] for e in equity} == {1_000_000.0}
        assert all(e["cash_share"][0] == 1.0 for e in equity)
        growth = math.prod(e["value"][-1] / e["value"][0] for e in equity)
        row = table["stitched", who]
        assert row["total_return"] == pytest.approx(growth - 1.0)
        by_hand = np.concatenate([e["return"].drop_nulls().to_numpy() for e in equity])
        np.testing.assert_array_equal(returns[who].to_numpy(), by_hand)
        ratio = by_hand.mean() / by_hand.std(ddof=1) * math.sqrt(252)
        assert row["sharpe_annual"] == pytest.approx(ratio)
        assert row["max_drawdown"] == pytest.approx(max_drawdown(by_hand))
        traded = np.concatenate([e["traded"][1:].to_numpy() for e in equity])
        assert row["turnover_annual"] == pytest.approx(traded.mean() * 252)
        assert row["turnover_annual"] > 0.0
        held = np.concatenate([1.0 - e["cash_share"][:-1].to_numpy() for e in equity])
        assert row["exposure"] == pytest.approx(held.mean())
        paid = sum(e["commission"].sum() for e in equity)
        assert row["cost_commission"] == pytest.approx(paid)
        assert row["cost_share"] == pytest.approx(paid / 1_000_000.0)
    assert returns["fold"].unique(maintain_order=True).to_list() == list(FOLDS)
    assert set(LABELS) <= set(table["stitched", "agent"])
    _configurations_differ_in_windows_and_assets_only()


def _configurations_differ_in_windows_and_assets_only() -> None:
    walk = WalkForward.open(Path("wf"))
    base = load_config(Path("wf/base.yaml"))
    assert [fold.name for fold in walk.folds] == list(FOLDS)
    for member, fold in zip(walk.members, walk.folds, strict=True):
        own = {"split": fold.split, "assets": fold.assets}
        saved = load_config(Path("wf/folds") / member.name / "config.yaml")
        # By value: what a run directory may run of the code it names is not a part of this.
        assert member.config.model_dump() == base.model_copy(update=own).model_dump()
        assert member.config.model_dump() == saved.model_dump()


def _evaluation(directory: Path, books: dict[str, list[float]]) -> Evaluation:
    """A saved evaluation of books with these values, one a day; half of each is invested."""
    directory.mkdir()
    tables: dict[Book, Tables] = {}
    times = np.datetime64("2020-01-01", "us") + np.arange(9) * np.timedelta64(1, "D")
    for name, values in books.items():
        value = np.array(values)
        n = len(value)
        equity = pl.DataFrame(
            {
                "time": times[:n],
                "value": value,
                "return": [None, *(value[1:] / value[:-1] - 1.0).tolist()],
                "drawdown": 1.0 - value / np.maximum.accumulate(value),
                "cash_share": np.full(n, 0.5, dtype=np.float32),
                "traded": np.full(n, 0.1),
                "commission": np.where(np.arange(n), 2.0, 0.0),  # a step's, after it
                "stamp": np.zeros(n),
                "slippage": np.where(np.arange(n), 1.0, 0.0),
                "orders_cut": np.zeros(n, dtype=np.int64),
            }
        )
        rows = pl.DataFrame({"time": times[:n]})
        orders = rows.head(0).with_columns(symbol=pl.lit("", dtype=pl.String))
        seed = name.removeprefix("seed-")
        book = Book(name) if seed == name else Book(AGENT, int(seed))
        tables[book] = Tables(equity, rows, rows.head(n - 1), orders)
    save_tables(directory, tables)
    seeds = {int(n.removeprefix("seed-")): {} for n in books if n.startswith("seed-")}
    baselines = {n: {} for n in books if not n.startswith("seed-")}
    return Evaluation(directory, seeds, baselines, {"periods_per_year": 252.0})


def test_ruined_book_earns_nothing_for_the_rest_of_its_fold_and_begins_anew(
    tmp_path: Path,
) -> None:
    first = _evaluation(
        tmp_path / "a", {"seed-1": [100, 50, 10], "cash": [100] * 5, "benchmark": [100] * 5}
    )
    second = _evaluation(tmp_path / "b", {"seed-1": [100, 110, 121], "cash": [100] * 3})
    stitched = stitch({"a": first, "b": second})
    assert stitched.folds == ("a",) * 4 + ("b",) * 2
    assert tuple(stitched.baselines) == ("cash",)  # the benchmark is not in every fold
    measures, returns = stitched.seeds[1]
    np.testing.assert_allclose(returns, [-0.5, -0.8, 0.0, 0.0, 0.1, 0.1])
    assert measures["total_return"] == pytest.approx(0.5 * 0.2 * 1.1 * 1.1 - 1.0)
    assert measures["exposure"] == pytest.approx((2 * 0.5 + 2 * 0.5) / 6)
    assert measures["turnover_annual"] == pytest.approx((2 * 0.1 + 2 * 0.1) / 6 * 252)
    assert (measures["cost_commission"], measures["cost_slippage"]) == (8.0, 4.0)
    assert measures["cost_share"] == pytest.approx(0.12)
    # Six returns are too few to resample, and one seed has no spread.
    found = statistics(stitched, seed=1, looks=2, trusts=[])
    assert (found["differences"], found["deflation"], found["costs"]) == ({}, None, [])
    assert found["verdict"]["key"] == "unknown"
    assert (found["sharpe_annual"]["method"], found["sharpe_annual"]["low"]) == ("none", None)


def test_later_data_and_later_listings_change_nothing_of_a_fold(
    shell: Shell, bars_file: Path, tmp_path: Path
) -> None:
    every = ("assets=[]", "data.cache.enabled=false")
    shell.works(*_words(bars_file, *every))
    bars = pl.read_parquet(bars_file)
    after = pl.col("date") > datetime(2016, 2, 29)
    prices = pl.col("open", "high", "low", "close", "adj_close")
    newcomer = bars.filter(after & (pl.col("symbol") == "MSFT")).with_columns(symbol=pl.lit("AAA"))
    other = tmp_path / "other.parquet"
    changed = bars.with_columns(pl.when(after).then(prices * 3.0).otherwise(prices))
    pl.concat([changed, newcomer]).write_parquet(other)
    before = {name: _weights(name) for name in FOLDS}
    tables = _table()
    shell.works(*_words(other, *every), "--overwrite")
    assert _weights(FOLDS[0]) == before[FOLDS[0]]
    assert _weights(FOLDS[1]) != before[FOLDS[1]]
    for who in ("agent", "equal_weight"):
        assert _table()[FOLDS[0], who] == tables[FOLDS[0], who]
    assert "AAA" not in Prepared.open(Path("wf/folds") / FOLDS[0]).symbols
    assert "AAA" in Prepared.open(Path("wf/folds") / FOLDS[1]).symbols


def _weights(fold: str) -> bytes:
    best = Path("wf/folds") / fold / "seeds/42/checkpoints/best"
    return (best / "tensors.safetensors").read_bytes()


def test_symbols_that_leave_are_traded_while_they_are_members(shell: Shell, tmp_path: Path) -> None:
    # 504 sessions; B stops after February 2016, C begins with it, D is there before 2015 only.
    bars = make_bars(("A", "B", "C", "E"), gone={"B": 215}, late={"C": 271})
    gone = make_bars(("D",), date(2014, 1, 2), date(2014, 12, 31), seed=1)
    file, universe = tmp_path / "some.parquet", tmp_path / "universe.csv"
    pl.concat([bars, gone]).rename({"time": "date"}).drop("factor").write_parquet(file)
    universe.write_text(
        "symbol,start,end\nA,2014-01-01,\nB,2014-01-01,2016-01-20\nC,2016-03-15,\nE,2014-01-01,\n"
        "Z,2014-01-01,\n"
    )
    more = ("assets=[]", f"data.universe={universe}", "data.start=2015-01-02")
    _, err = shell.works(*_words(file, *more))
    assert err.count("1 of 5 member(s) have no bars") == 1  # said once, not for every fold
    first, second = (Prepared.open(Path("wf/folds") / name) for name in FOLDS)
    assert first.symbols == ("A", "B", "C", "E")
    assert second.symbols == ("A", "B", "C", "E")
    days = first.times.astype("datetime64[D]")
    member = first.array("member")
    assert member is not None
    last = days[member[:, 1]].max()
    assert last == np.datetime64("2016-01-19")  # as known then: the end is exclusive
    assert not member[:, 2].any()
    rows = first.splits["train"].rows
    assert not first.present[rows.start : rows.stop, 2].any()  # not listed yet, and no harm done
    joined = second.array("member")
    assert joined is not None
    assert joined[second.splits["test"].rows.stop - 1].tolist() == [True, False, True, True]
    assert _table()["stitched", "agent"]["seeds"] == 1


def test_interrupted_walk_forward_goes_on_to_the_same_result(
    shell: Shell, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.works(*_words(bars_file))
    expected = Path("wf/walk_forward.csv").read_text()
    show = Watch.progress

    def interrupted(self: Watch, k: int, now: Any) -> None:
        show(self, k, now)
        if k == 1 and now.step > 200:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "progress", interrupted)
        code, _, err = shell(*_words(bars_file), "--overwrite")
    assert code == 143
    assert "1 of 2 trainings ended" in err
    assert "echelon walk-forward --resume wf" in err
    assert not Path("wf/walk_forward.csv").exists()
    assert "statistics" not in _tree()
    _, err = shell.works("walk-forward", "--resume", "wf", "--workers", "1")
    assert "1 to train, 1 done before" in err
    assert Path("wf/walk_forward.csv").read_text() == expected
    # What is done is not done again, and no test window is read a second time.
    _, err = shell.works("walk-forward", "--resume", "wf", "--workers", "1")
    assert "0 to train, 2 done before" in err
    summary = Path(f"wf/folds/{FOLDS[0]}/evaluations/test/summary.json").read_text()
    assert json.loads(summary)["reads"] == 1
    assert Path("wf/walk_forward.csv").read_text() == expected


def test_budget_is_carried_from_fold_to_fold_also_when_one_is_evaluated_again(
    shell: Shell, bars_file: Path
) -> None:
    limited = ("risk.max_drawdown=0.03", "risk.target_volatility=0.15")
    shell.works(*_words(bars_file, *limited))
    folds = [load_evaluation(Path("wf/folds") / name, "test") for name in FOLDS]
    assert [fold.facts["limits"]["carried"] for fold in folds] == [False, True]
    for who in (42, "equal_weight"):
        first, second = (fold.tables(who).equity for fold in folds)
        value = first["value"].to_numpy()
        carried = budget_cap(np.array([1.0 - value[-1] / value.max()]), 0.03)[0]
        assert first["exposure_cap"][0] == budget_cap(np.zeros(1), 0.03)[0]
        # Forty days of returns without limits are known by then, so that volatility counts too.
        wish = first["unscaled"].to_numpy()
        rate = (wish[1:] / wish[:-1] - 1.0)[-59:].std(ddof=1) * math.sqrt(252)
        known = min(carried, 0.15 / rate) if rate > 0.0 else carried
        assert second["exposure_cap"][0] == pytest.approx(known, rel=0.02)
    assert folds[1].tables("equal_weight").equity["exposure_cap"][0] < budget_cap(np.zeros(1), 0.03)
    stitched, before = _table()["stitched", "equal_weight"], Path("wf/stitched.csv").read_bytes()
    returns = pl.read_parquet("wf/stitched.parquet")["equal_weight"].to_numpy()
    assert stitched["max_drawdown"] == pytest.approx(max_drawdown(returns))
    assert stitched["max_drawdown"] < 0.05
    assert stitched["budget_jumps"] >= 0.0
    page = Path("wf/report/report.html").read_text()
    assert "a drawdown budget of 3.00 %" in page
    Path("wf/folds", FOLDS[0], "evaluations/test/summary.json").unlink()
    evaluated = folds[1].facts["evaluated"]
    shell.works("walk-forward", "--resume", "wf", "--workers", "1")
    assert Path("wf/stitched.csv").read_bytes() == before
    again = load_evaluation(Path("wf/folds") / FOLDS[1], "test")
    assert again.facts["reads"] == 2, evaluated  # what it goes on from was made again


def test_processes_side_by_side_give_the_same_result(shell: Shell, bars_file: Path) -> None:
    shell.works(*_words(bars_file), "--seeds", "2")
    expected = Path("wf/walk_forward.csv").read_text()
    assert "stitched,2016-01-05,2016-04-29,ensemble" in expected
    shell.works(*_words(bars_file)[:-2], "--seeds", "2", "--workers", "2", "--overwrite")
    assert Path("wf/walk_forward.csv").read_text() == expected


def test_plan_shows_the_folds_and_trains_nothing(shell: Shell, bars_file: Path) -> None:
    out, _ = shell.works(*_words(bars_file, "walk_forward.partial=true"), "--plan-only")
    assert "2 folds" in out
    for word in (*FOLDS, "2015-01-02", "2015-09-29", "2015-12-28", "2016-04-29"):
        assert word in out
    assert not Path("wf").exists()


def test_failing_fold_is_named_and_nothing_is_stitched(shell: Shell, bars_file: Path) -> None:
    # February has 19 sessions and March 22: only the second fold has a window of 20 to train on.
    short = (
        *("walk_forward.train=1", "walk_forward.valid=1", "walk_forward.purge_bars=0"),
        *("walk_forward.first_test=2016-03-01", "walk_forward.test=1", "window=20"),
    )
    code, out, err = shell(*_words(bars_file, *short))
    assert code == 1
    assert "1 of 2 folds failed" in err
    assert "2016-03: split.train has 19 bars" in err
    assert "echelon walk-forward --resume wf" in err
    assert "Traceback" not in err
    assert "failed" in out
    assert "stitched" not in out
    table = _table()
    assert table["2016-03", "agent"]["seeds"] == 0
    assert "19 bars" in table["2016-03", "agent"]["problem"]
    assert table["2016-04", "agent"]["seeds"] == 1
    assert not Path("wf/stitched.parquet").exists()


def test_taken_directory_odd_options_and_too_little_data_are_refused(
    shell: Shell, bars_file: Path
) -> None:
    code, _, err = shell(*_words(bars_file, "walk_forward.train=30"))
    assert (code, "no fold fits: the data run from 2015-01-02 to 2016-12-30" in err) == (4, True)
    assert not Path("wf").exists()
    Path("wf").mkdir()
    Path("wf/run.json").write_text("{}")
    code, _, err = shell(*_words(bars_file))
    assert (code, "holds a run" in err) == (2, True)
    Path("wf/run.json").unlink()
    Path("wf/walk_forward.json").write_text('{"format": 0, "echelon": "0.0.1"}')
    code, _, err = shell(*_words(bars_file))
    assert (code, "holds a walk-forward" in err, "--overwrite" in err) == (2, True, True)
    code, _, err = shell("walk-forward", "--resume", "wf")
    assert (code, "another version" in err) == (5, True)
    Path("wf/walk_forward.json").write_text('{"format": 1, "folds": [{}]}')
    code, _, err = shell("walk-forward", "--resume", "wf")
    assert (code, "damaged" in err) == (5, True)
    code, _, err = shell("walk-forward", "--resume", "nowhere")
    assert (code, "no walk-forward there" in err) == (2, True)
    code, _, err = shell("walk-forward", "--resume", "wf", "-o", "window=3")
    assert (code, "only --seeds" in err) == (2, True)
