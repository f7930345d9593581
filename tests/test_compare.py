"""`echelon compare`: six agents on one market, one table, and going on without training again."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from markets import CONFIGS
from matplotlib.image import imread
from shells import Shell, tiny

from echelon.cli.compare import print_comparison
from echelon.cli.console import Watch
from echelon.config import load_config
from echelon.errors import UsageError
from echelon.evaluation.comparison import (
    AGENTS,
    ComparedRow,
    Comparison,
    ComparisonResult,
    SharpeGap,
    agent_config,
)
from echelon.ops.measures import LABELS
from echelon.report.charts.variants import comparison_rows, draw_comparison
from echelon.training.run import TrainedRun

SMALL = (
    *("train.algo=SAC", "model.encoder=TimeCNN", "model.n_layers=1", "pretrain.epochs=1"),
    *("expert.hidden=8", "expert.batch_size=16", "expert.learning_starts=80"),
    *("expert.updates_per_step=0.05", "train.episode_steps=40", "train.total_env_steps=400"),
    *("train.validate_every_steps=200", "train.checkpoint_every_steps=200"),
)
"""An expert that trains in no time, for all but a2c and SB3's, which have networks of their own."""


def _compare(shell: Shell, bars: Path, *more: str) -> tuple[int, str, str]:
    return shell("compare", *tiny(bars, *SMALL), "--output-dir", "cmp", "--workers", "1", *more)


def _table(split: str = "valid") -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in pl.read_csv(f"cmp/comparison-{split}.csv").to_dicts()}


def _best(name: str) -> Path:
    return Path(f"cmp/agents/{name}/seeds/42/checkpoints/best/tensors.safetensors")


def test_six_agents_are_compared_and_gone_on_with_without_training_again(
    shell: Shell, bars_file: Path
) -> None:
    code, out, err = _compare(shell, bars_file, "--seeds", "2")
    assert "This window chose the checkpoints; nothing can be claimed from it." in out
    assert code == 0, err
    assert "6 agents × 2 seeds: 12 to train" in err
    assert err.count("rules: ") == 1
    table = _table()
    assert list(table) == [*AGENTS, "cash", "equal_weight"]
    assert "vs sac" in out
    for name in AGENTS:
        row, run = table[name], Path("cmp/agents") / name
        assert (row["kind"], row["seeds"], row["problem"]) == ("agent", 2, "")
        assert row["steps"] >= 400
        outcomes = json.loads((run / "run.json").read_text())["outcomes"]
        best = [outcome["best_score"] for outcome in outcomes]
        assert row["sharpe_annual_mean"] == pytest.approx(sum(best) / 2)
        assert not list(run.rglob("*.pkl")) + list(run.rglob("*.zip"))
        assert load_config(run / "config.yaml").train.algo == AGENTS[name]
        gap = row["sharpe_annual_diff_estimate"]
        if name == "sac":
            assert gap is None
            continue
        difference = row["sharpe_annual_mean"] - table["sac"]["sharpe_annual_mean"]
        assert gap == pytest.approx(difference, abs=1e-6)
        assert row["sharpe_annual_diff_low"] < gap < row["sharpe_annual_diff_high"]
    assert table["cash"]["sharpe_annual_mean"] == 0.0
    assert imread("cmp/comparison-valid.png").shape[1] > 1000
    tree = json.loads(Path("cmp/comparison-valid.json").read_text())
    assert (tree["reference"], tree["split"], len(tree["rows"])) == ("sac", "valid", 8)
    assert list(tree["rows"][1]["seeds"]) == ["42", "43"]

    before = Path("cmp/comparison-valid.csv").read_text()
    written = {name: _best(name).stat().st_mtime_ns for name in AGENTS}
    _, err = shell.works("compare", "--resume", "cmp", "--workers", "1")
    assert "0 to train, 12 done before" in err
    assert Path("cmp/comparison-valid.csv").read_text() == before
    _, err = shell.works("compare", "--resume", "cmp", "--workers", "1", "--split", "test")
    assert "0 to train, 12 done before" in err
    assert {name: _best(name).stat().st_mtime_ns for name in AGENTS} == written
    test = _table("test")
    assert test["sb3-sac"]["sharpe_annual_mean"] != table["sb3-sac"]["sharpe_annual_mean"]
    assert Path("cmp/comparison-valid.csv").read_text() == before
    assert TrainedRun.open(Path("cmp/agents/sb3-ppo")).policy(43).kind == "weights"


def test_interrupted_agent_of_sb3_goes_on_to_the_same_result(
    shell: Shell, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("--agents", "sb3-sac", "--steps", "sb3-sac=480")
    assert _compare(shell, bars_file, *few)[0] == 0
    expected = pl.read_csv("cmp/comparison-valid.csv").drop("seconds")
    assert expected["steps"].to_list()[0] == 480
    show = Watch.progress

    def interrupted(self: Watch, k: int, now: Any) -> None:
        show(self, k, now)
        if now.step > 200:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "progress", interrupted)
        code, _, err = _compare(shell, bars_file, *few, "--overwrite")
    assert (code, "0 of 1 trainings ended" in err) == (143, True)
    assert "echelon compare --resume cmp" in err
    assert not Path("cmp/comparison-valid.csv").exists()
    _, err = shell.works("compare", "--resume", "cmp", "--workers", "1")
    assert "1 to train, 0 done before" in err
    assert pl.read_csv("cmp/comparison-valid.csv").drop("seconds").equals(expected)


def test_failing_agent_is_named_and_the_others_go_on(shell: Shell, bars_file: Path) -> None:
    # APG's gradients need returns that are smooth in the weights; SB3 does not mind.
    more = ("--agents", "apg,sb3-ppo", "-o", "reward.kind=differential_sharpe")
    code, out, err = _compare(shell, bars_file, *more)
    assert code == 1
    assert "1 of 2 agents failed" in err
    assert "apg: seed 42: train.algo=APG cannot learn" in err
    assert "failed" in out
    table = _table()
    assert (table["apg"]["seeds"], table["sb3-ppo"]["seeds"]) == (0, 1)
    assert table["sb3-ppo"]["sharpe_annual_diff_estimate"] is None  # the reference is apg


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--agents", "sac,ppo"], 2, "agent 'ppo' is unknown; there are a2c, sb3-ppo"),
        (["--agents", "sb3-pp"], 2, "Did you mean 'sb3-ppo'?"),
        (["--agents", "sac,sac"], 2, "sac named more than once"),
        (["--agents", " , "], 2, "--agents: none named"),
        (["--split", "tomorrow"], 2, "'tomorrow' is not one of 'valid', 'test'"),
        (["--steps", "sac"], 2, "expected NAME=N"),
        (["--steps", "sac=0"], 2, "expected a whole number above 0"),
        (["--agents", "sac", "--steps", "td3=10"], 2, "td3 takes no part"),
        (["-o", "train.algo=A2C"], 2, "agent 'sac' takes its settings from the configuration"),
        (
            ["--resume", "cmp"],
            2,
            "only --split, --seeds, --trust-code, --on and --workers go with it",
        ),
        (["-o", "train.algo=PPO"], 3, "train.algo"),
    ],
)
def test_odd_options_are_refused_before_anything_is_written(
    options: list[str], code: int, expected: str, shell: Shell, bars_file: Path
) -> None:
    found, _, err = _compare(shell, bars_file, *options)
    assert (found, expected in " ".join(err.split())) == (code, True), err
    assert not Path("cmp").exists()


def test_window_without_data_and_foreign_directories_are_refused(
    shell: Shell, bars_file: Path
) -> None:
    late = "split={train: [2015-01-02, 2016-01-29], valid: [2016-02-01, 2016-06-30], test: "
    more = ("--agents", "sb3-ppo", "-o", late + "[2030-01-02, 2030-12-30]}", "--split", "test")
    code, _, err = _compare(shell, bars_file, *more)
    assert code == 1
    assert "sb3-ppo: split.test" in err
    code, _, err = shell("compare", "--resume", "nowhere")
    assert (code, "no comparison there" in err) == (2, True)
    code, _, err = _compare(shell, bars_file, "--agents", "sb3-ppo")
    assert (code, "holds a comparison" in err) == (2, True)
    Path("cmp/comparison.json").write_text('{"format": 1, "agents": 3}')
    code, _, err = shell("compare", "--resume", "cmp")
    assert (code, "damaged" in err) == (5, True)


def test_a2c_has_the_settings_of_qtmrl_fast_and_the_market_of_the_base() -> None:
    qtmrl, base = load_config(CONFIGS / "qtmrl-fast.yaml"), load_config(CONFIGS / "sac.yaml")
    made = agent_config(base, "a2c", steps=7)
    assert made.model == qtmrl.model
    # How long it learns, and when it is looked at, is the base's.
    the_bases = {
        *("total_env_steps", "log_interval_steps", "episode_steps", "validate_every_steps"),
        "checkpoint_every_steps",
    }
    for key in qtmrl.train.model_dump(exclude_defaults=True).keys() - the_bases:
        assert getattr(made.train, key) == getattr(qtmrl.train, key), key
    for key in the_bases - {"total_env_steps"}:
        assert getattr(made.train, key) == getattr(base.train, key), key
    assert (made.train.algo, made.train.total_env_steps) == ("A2C", 7)
    same = ("data", "split", "features", "market", "reward", "state", "eval", "window", "assets")
    assert all(getattr(made, part) == getattr(base, part) for part in same)
    assert agent_config(qtmrl, "a2c") == qtmrl
    assert agent_config(base, "sac") == base
    with pytest.raises(UsageError, match=r"whose train\.algo is A2C"):
        agent_config(qtmrl, "td3")


def _row(name: str, sharpes: list[float], gap: SharpeGap | None = None) -> ComparedRow:
    seeds = {k: dict.fromkeys(LABELS, 0.1) | {"sharpe_annual": s} for k, s in enumerate(sharpes)}
    return ComparedRow(
        name=name,
        kind="agent",
        seeds=seeds,
        gap=gap,
        steps=320_000,
        problem="" if seeds else "why",
    )


FACTS = {"split": "test", "first": "2018-01-02", "last": "2022-12-28", "ledger": {"fill": "x"}}


def test_table_and_picture_show_spread_difference_and_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (
        _row("sb3-ppo", [0.5, 0.7], SharpeGap(-0.9, -1.5, -0.2)),
        _row("sac", [1.0, 2.0]),
        _row("td3", []),
        ComparedRow(
            name="min_variance",
            kind="baseline",
            seeds={-1: dict.fromkeys(LABELS, 0.3)},
            gap=SharpeGap(0.1, -1.0, 1.0),
        ),
    )
    result = ComparisonResult("some", "sac", rows, FACTS)
    ppo, sac, td3, baseline = result.frame().to_dicts()
    assert (ppo["sharpe_annual_diff_low"], sac["sharpe_annual_diff_low"]) == (-1.5, None)
    assert sac["sharpe_annual_std"] == pytest.approx(math.sqrt(0.5))
    assert (td3["seeds"], td3["problem"], td3["sharpe_annual_mean"]) == (0, "why", None)
    assert (baseline["seeds"], baseline["steps"], baseline["total_return_mean"]) == (
        None,
        None,
        0.3,
    )
    lines = {line.label: line for line in comparison_rows(result)}
    assert list(lines)[:2] == ["sb3-ppo, 320,000 steps", "sac, 320,000 steps"]
    assert lines["sac, 320,000 steps"].is_base
    assert lines["min_variance"].reference == 1.5
    draw_comparison(result, tmp_path / "c.png")
    assert imread(tmp_path / "c.png").shape[1] > 1000
    monkeypatch.setenv("COLUMNS", "80")
    print_comparison(result)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for part in ("320,000", "−1.50 to −0.20", "± 0.71", "failed", "min_variance", "vs sac"):
        assert part in shown, shown


def test_reference_is_sac_or_the_first(tmp_path: Path) -> None:
    base = load_config(CONFIGS / "sac.yaml")
    assert Comparison(tmp_path, base).reference == "sac"
    assert Comparison(tmp_path, base, ("td3", "apg")).reference == "td3"
