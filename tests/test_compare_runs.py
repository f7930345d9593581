"""`echelon compare RUN RUN …`: what compares, two intervals a difference, and what is said."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats
from shells import Shell
from worlds import prepared_run

from echelon.cli.compare import conclusion
from echelon.config import load_config
from echelon.evaluation.comparison import ComparedRow, SharpeGap, saved_returns
from echelon.evaluation.evaluate import Evaluation, load_evaluation
from echelon.evaluation.runs_comparison import (
    RunDifference,
    RunLine,
    RunsComparison,
    compare_runs,
    open_runs,
    welch,
)
from echelon.evaluation.statistics import at_both_blocks
from echelon.evaluation.test_access import Look
from echelon.evaluation.trust import ClaimBasis, claim_basis, load_trust
from echelon.features import Prepared
from echelon.ops.measures import LABELS, sharpe_annual
from echelon.runs import RunDirectory
from echelon.training.run import TrainedRun, Training, Worlds, seed_directory

FLAT = (
    *("model.d_model=8", "model.n_layers=1", "model.hidden=8", "reward.scale=100", "seed=1"),
    *("train.rollout_steps=10", "train.books=4", "train.offset_groups=2", "train.lr_actor=0.01"),
    *("train.lr_critic=0.01", "train.total_env_steps=80", "train.validate_every_steps=40"),
    *("logging.tensorboard=false", "eval.baselines=[equal_weight, cash]"),
)
EXPERT = (
    *("train.algo=SAC", "model.encoder=TimeCNN", "pretrain.epochs=1", "expert.hidden=8"),
    *("expert.batch_size=16", "expert.learning_starts=40", "expert.updates_per_step=0.05"),
    *("train.episode_steps=20", "train.total_env_steps=80"),
)
HIERARCHY = (
    *EXPERT[1:],
    *("train.algo=HIERARCHY", "expert.updates_per_step=0.25", "experts.n_experts=2"),
    *("experts.sharing.buffer_size=2000", "experts.sharing.sequence_steps=3"),
    *("experts.skill_dim=2", "expert.warmup_updates=0"),
    *("trainer.round_steps=20", "trainer.probe_states=8", "meta_router.n_steps=32"),
    *("trainer.training_schedule.experts={freq: 2, steps: 16}", "meta_router.n_envs=4"),
    *("trainer.training_schedule.router={freq: 2, steps: 32}", "meta_router.batch_size=16"),
    *("meta_router.episode_decisions=4", "trainer.evolution.windows=2", "train.lr_actor=0.003"),
)
SEEDS = {"a2c": (1, 2), "sac": (1, 2, 3), "hierarchy": (1,)}
SETTINGS = {"a2c": (), "sac": EXPERT, "hierarchy": HIERARCHY}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Path:
    """A directory with runs of three kinds on one prepared set; nothing is evaluated."""
    root = tmp_path_factory.mktemp("trained")
    base = prepared_run(root / "a2c", bars_file, *FLAT)
    for name, settings in SETTINGS.items():
        config = load_config(base / "config.yaml", settings)
        if name != "a2c":
            shutil.copytree(base / "prepared", root / name / "prepared")
        prepared = Prepared.open(root / name)
        for seed in SEEDS[name]:
            worlds = Worlds.from_prepared(prepared, config)
            Training(config, worlds, seed_directory(root / name, seed), seed).run()
        facts = {
            "data": prepared.manifest["dataset"],
            "prepared": prepared.manifest["content_hash"],
        }
        RunDirectory(root / name).record(config, "train", **facts)
    return root


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained runs, to do with as one likes: RUNS/a2c, RUNS/sac, RUNS/hierarchy."""
    names = shutil.ignore_patterns("store", "cache")
    return Path(shutil.copytree(trained, tmp_path / "runs", ignore=names))


def change(run: Path, *overrides: str) -> None:
    """Another configuration in a run, as if it had been trained by it."""
    config = load_config(run / "config.yaml", overrides)
    RunDirectory(run).record(config, "train", prepared=TrainedRun.open(run).facts["prepared"])


def reads(root: Path) -> int:
    run = TrainedRun.open(root / "a2c")
    look = Look.back(run, "test")
    return len(look.registry.reads(look.window))


def test_runs_of_three_kinds_are_compared_and_evaluated_only_where_needed(
    shell: Shell, runs: Path
) -> None:
    names = ("runs/a2c", "runs/sac", "runs/hierarchy")
    out, err = shell.works("compare", *names, "--output-dir", "cmp", columns=80)
    assert max(map(len, out.splitlines())) <= 80
    assert err.count("rules: ") == 1
    assert [err.count(f"evaluating {name} on valid: not evaluated") for name in names] == [1, 1, 1]
    for part in ("A2C, 2", "SAC, 3", "HIERARCHY, 1", "equal_weight", "Welch's t", "block boot"):
        assert part in out, out
    assert "This window chose the checkpoints: nothing can be claimed from it." in out
    tree = json.loads(Path("cmp/comparison.json").read_text())
    assert (tree["kind"], tree["split"], tree["first_run"]) == ("runs", "valid", "a2c")
    assert {run["name"]: len(run["seeds"]) for run in tree["runs"]} == {
        "a2c": 2,
        "sac": 3,
        "hierarchy": 1,
    }
    assert set(tree["baselines"]) == {"equal_weight", "cash"}
    first, sac, hierarchy = (run["difference"] for run in tree["runs"])
    assert first is None
    saved = {name: load_evaluation(runs / name, "valid") for name in SEEDS}
    assert (saved["a2c"].reference_policies, saved["sac"].reference_policies) == ({}, {})
    assert tuple(saved["hierarchy"].reference_policies[1]) == ("hedge", "expert-0", "expert-1")
    sharpes = {
        name: [values["sharpe_annual"] for values in saved[name].seeds.values()] for name in SEEDS
    }
    assert sac["seeds"].items() >= welch(sharpes["sac"], sharpes["a2c"])._asdict().items()
    mine, theirs = (saved_returns(saved[name], SEEDS[name]) for name in ("sac", "a2c"))
    both = at_both_blocks(mine, theirs, seed=1)
    wider = (both.low, both.high)
    annual = math.sqrt(tree["periods_per_year"])
    assert (sac["days"]["low"], sac["days"]["high"]) == pytest.approx(annual * np.array(wider))
    assert sac["days"]["estimate"] == pytest.approx(sac["seeds"]["estimate"], abs=1e-6)
    assert hierarchy["seeds"]["low"] is None  # one seed
    assert not any(d["claimed"] for d in (sac, hierarchy))

    out, err = shell.works("compare", *names, "--output-dir", "cmp")
    assert "evaluating" not in err
    assert json.loads(Path("cmp/comparison.json").read_text()) == tree

    shutil.rmtree(runs / "sac" / "seeds" / "3")  # other agents than those that were evaluated
    _, err = shell.works("compare", *names)
    assert err.count("evaluating") == 1
    assert "evaluating runs/sac on valid: trained or prepared again" in err
    assert set(load_evaluation(runs / "sac", "valid").seeds) == {1, 2}


def test_looks_at_the_test_window_are_counted_and_only_where_runs_compare(
    shell: Shell, runs: Path
) -> None:
    change(runs / "hierarchy", "market.fill=close")
    code, _, err = shell("compare", "runs/a2c", "runs/sac", "runs/hierarchy", "--split", "test")
    assert (code, "fill convention" in err) == (2, True)
    assert reads(runs) == 0
    assert not any(RunDirectory(runs / name).evaluated_splits() for name in SEEDS)
    out, err = shell.works("compare", "runs/a2c", "runs/sac", "--split", "test")
    assert err.count("the registry counts this look") == 2
    assert reads(runs) == 2
    assert "claimed" in out
    shell.works("compare", "runs/a2c", "runs/sac", "--split", "test")
    assert reads(runs) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["runs/a2c"], "at least two runs; it got 1"),
        (["runs/a2c", "runs/sac", "runs/../runs/a2c"], "are the same run"),
        (["runs/a2c", "runs/sac", "--agents", "sac"], "--agents: nothing is trained"),
        (["runs/a2c", "runs/sac", "--steps", "sac=1"], "--steps: nothing is trained"),
        (["runs/a2c", "runs/sac", "--seeds", "2", "--workers", "1"], "--seeds, --workers: nothing"),
        (["runs/a2c", "runs/sac", "-c", "x.yaml", "-o", "seed=1"], "--config, --override: nothing"),
        (["runs/a2c", "runs/sac", "--resume", "x", "--overwrite"], "--resume, --overwrite"),
        (["runs/a2c", "runs/sac", "--output-dir", "runs/a2c/run.json"], "is a file"),
        (["runs/a2c", "runs/sac", "--output-dir", "study"], "is not of compared runs"),
        (["runs/a2c", "study"], "a study, not a run. Name runs inside it: study/agents/b"),
        (["runs/a2c", "runs/sac", "--split", "train"], "is not one of 'valid', 'test'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    options: list[str], expected: str, shell: Shell, runs: Path
) -> None:
    inside = Path("study/agents/b")
    inside.mkdir(parents=True)
    shutil.copy(runs / "a2c" / "config.yaml", inside / "config.yaml")
    shutil.copy(runs / "a2c" / "config.yaml", "study/base.yaml")
    Path("study/comparison.json").write_text('{"format": 1, "agents": ["b"]}')
    code, _, err = shell("compare", *options)
    assert (code, expected in " ".join(err.split())) == (2, True), err
    assert not any(RunDirectory(runs / name).evaluated_splits() for name in SEEDS)
    assert Path("study/comparison.json").read_text() == '{"format": 1, "agents": ["b"]}'


def test_directories_that_are_no_runs_are_refused(shell: Shell, runs: Path) -> None:
    for name, expected in (("nowhere", "not a run directory"), ("runs", "not a run directory")):
        code, _, err = shell("compare", "runs/a2c", name)
        assert (code, expected in err) == (5, True), err
    shutil.rmtree(runs / "sac" / "seeds")
    code, _, err = shell("compare", "runs/a2c", "runs/sac")
    assert (code, "no trained agent there yet" in err) == (5, True)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("market.fill=close", "fill convention (market.fill): open in runs/a2c, close in runs/sac"),
        ("eval.use_fee=false", "fees (eval.use_fee): True in runs/a2c, False in runs/sac"),
        ("market.commission_bps=7", "market rule commission: 0.0005 in runs/a2c, 0.0007 in"),
        ("market.initial_cash=500", "market.initial_cash: 1000000.0 in runs/a2c, 500.0 in"),
    ],
)
def test_first_difference_of_fills_and_costs_is_named(
    override: str, expected: str, shell: Shell, runs: Path
) -> None:
    change(runs / "sac", override)
    code, _, err = shell("compare", "runs/a2c", "runs/sac")
    assert (code, expected in " ".join(err.split())) == (2, True), err


def test_first_difference_of_assets_data_window_and_features_is_named(
    shell: Shell, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prepared, "verify", lambda _self, **_: None)  # made up, and no run has it
    prepared = runs / "sac" / "prepared"
    whole = {name: (prepared / name).read_text() for name in ("manifest.json", "splits.json")}

    def refused(expected: str, **changes: Any) -> None:
        for name, text in whole.items():
            tree = json.loads(text)
            tree |= {key: value for key, value in changes.items() if key in tree}
            tree.pop("facts_hash", None)
            (prepared / name).write_text(json.dumps(tree))
        code, _, err = shell("compare", "runs/a2c", "runs/sac")
        assert (code, expected in " ".join(err.split())) == (2, True), err

    manifest, splits = (json.loads(text) for text in whole.values())
    symbols = ["ZZZ", *manifest["symbols"][1:]]
    refused("assets: only runs/a2c has AAPL; only runs/sac has ZZZ", symbols=symbols)
    refused("data (hash)", dataset=manifest["dataset"] | {"content_hash": "0" * 64})
    refused("valid window", valid=splits["valid"] | {"last": "2016-06-29"})
    refused("features: only runs/sac has extra", features=[*manifest["features"], "extra"])
    refused("prepared set (hash)", content_hash="0" * 64)


def test_welch_agrees_with_scipy_and_says_nothing_of_single_seeds() -> None:
    rng = np.random.default_rng(3)
    mine, theirs = rng.normal(1.0, 2.0, 5), rng.normal(0.0, 0.3, 9)
    twin = stats.ttest_ind(mine, theirs, equal_var=False).confidence_interval(0.95)
    found = welch(list(mine), list(theirs))
    assert (found.low, found.high) == pytest.approx((twin.low, twin.high))
    assert found.estimate == pytest.approx(mine.mean() - theirs.mean())
    one = welch([1.0], [0.5, 0.5])
    assert one.estimate == 0.5
    assert math.isnan(one.low + one.high)
    assert welch([1.0, 1.0], [0.5, 0.5]) == SharpeGap(0.5, 0.5, 0.5)
    assert all(math.isnan(value) for value in welch([1.0, math.inf], [0.5, 0.5]))


def forge(evaluation: Evaluation, drift: float) -> None:
    """Give an evaluation's agents returns of a clear drift, in the tables and in the summary."""
    tree = json.loads((evaluation.directory / "summary.json").read_text())
    path = evaluation.directory / "equity.parquet"
    for seed in evaluation.seeds:
        table = pl.read_parquet(path)
        mine = (pl.col("policy") == "agent") & (pl.col("seed") == seed)
        own = table.filter(mine)
        made = np.random.default_rng(seed).normal(drift, 0.005, own.height - 1)
        values = pl.Series("return", [None, *made], dtype=pl.Float64)
        rest = table.filter(~mine | pl.col("seed").is_null())
        pl.concat([own.with_columns(values), rest]).write_parquet(path)
        tree["seeds"][str(seed)]["sharpe_annual"] = sharpe_annual(made, 252.0)
    (evaluation.directory / "summary.json").write_text(json.dumps(tree))


def test_what_is_claimed_counts_trials_and_looks_up_to_now(shell: Shell, runs: Path) -> None:
    names = [runs / "a2c", runs / "sac"]
    for split in ("valid", "test"):
        compare_runs(open_runs(names, split), split)  # type: ignore[arg-type]
    for name, drift in (("a2c", 0.0), ("sac", 0.004)):
        forge(load_evaluation(runs / name, "test"), drift)
    opened = open_runs(names, "test")
    result = compare_runs(opened, "test")
    found = result.runs[1].difference
    assert found is not None
    assert (found.ahead, found.days.low > 0.0, found.seeds.low > 0.0) == ("sac", True, True)
    # The trial on validation, which chose, was of agents that learned nothing.
    assert not found.claimed
    assert "not after counting the 2 configurations" in conclusion(result)

    look = Look.back(opened[1], "valid")
    entry, trials = look.entry(), look.rivals()
    mine = next(trial for trial in trials if trial.key == entry.key)
    series = look.registry.returns(mine)
    strong = np.random.default_rng(5).normal(0.004, 0.005, series.height)
    look.registry.add_trial(entry, series["time"].to_numpy(), strong, strong.mean() / strong.std())
    result = compare_runs(opened, "test")
    found = result.runs[1].difference
    assert found is not None
    assert found.standing is not None
    assert (found.claimed, found.standing.tried) == (True, 2)
    assert conclusion(result) == (
        "It can be claimed: sac is better than a2c, also after counting the 2 configurations tried."
    )
    turned = compare_runs(opened[::-1], "test").runs[1].difference
    assert turned is not None
    assert (turned.ahead, turned.claimed) == ("sac", True)

    # Twenty further looks, some as good as this one: what was seen is chosen by.
    returns = saved_returns(load_evaluation(runs / "sac", "test"), [1, 2, 3]).mean(axis=1)
    before = claim_basis(opened[1], "test", returns)
    tested = Look.back(opened[1], "test")
    times = load_evaluation(runs / "sac", "test").tables(1).equity["time"][1:].to_numpy()
    for k in range(20):
        luck = np.random.default_rng(k).normal(0.004 * (-1) ** k, 0.005, len(times))
        read = tested.registry.begin_read(tested.entry())
        tested.registry.end_read(read, times, luck, luck.mean() / luck.std())
    after = claim_basis(opened[1], "test", returns)
    assert before.deflated is not None
    assert after.deflated is not None
    assert after.deflated < before.deflated
    saved = load_trust(runs / "sac", "test")
    assert saved is not None
    assert saved["registry"]["reads"] == 2  # as it was then


def line(name: str, difference: RunDifference | None) -> RunLine:
    row = ComparedRow(name=name, kind="agent", seeds={1: dict.fromkeys(LABELS, 0.1)})
    return RunLine(Path(name), "SAC", row, difference)


def test_conclusion_says_which_differences_are_claimed_and_why_others_are_not() -> None:
    wide, above, unknown = (
        SharpeGap(0.5, -1.0, 2.0),
        SharpeGap(1.0, 0.5, 1.5),
        SharpeGap(1.0, math.nan, math.nan),
    )
    below = SharpeGap(-1.0, -1.5, -0.5)
    facts = {"split": "test", "bars": 300}

    def said(*differences: RunDifference, **changes: Any) -> str:
        lines = [line("a", None), *(line(f"b{k}", d) for k, d in enumerate(differences))]
        return conclusion(RunsComparison(tuple(lines), (), facts | changes))

    same, single = RunDifference(wide, above, None, None), RunDifference(above, unknown, None, None)
    sure = RunDifference(above, above, "b0", ClaimBasis(0.99, 1))
    worse = RunDifference(below, below, "a", ClaimBasis(0.99, None))
    assert said(same) == "Nothing can be claimed: no significant difference between b0 and a."
    assert said(single).endswith("b0 or a has one seed, and other seeds may turn it round.")
    assert said(sure, same) == (
        "It can be claimed: b0 is better than a, also after counting the one "
        "configuration tried. Of the others, nothing: no significant difference between b1 and a."
    )
    assert "a is better than b0, also after counting the configurations" in said(worse)
    uncounted = RunDifference(above, above, "b0", ClaimBasis(None, None))
    assert said(uncounted).startswith("Nothing can be claimed: b0 is ahead of a, but")
    assert "Too few bars for a verdict: 40" in said(sure, bars=41)
    assert "nothing can be claimed from it" in said(same, split="valid")
