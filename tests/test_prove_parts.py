"""Parts of a proof: done once, kept, gone on with, refused where they are of something else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from provings import tiny_config

from echelon.backtest.baselines import make_baseline
from echelon.backtest.run import run_backtest
from echelon.config import Config
from echelon.errors import Stopped, StoreError, TrainingError, UsageError
from echelon.proving.certificate import Certificate
from echelon.proving.parts import Done, Finding, Part, identity_of, lock_proof, run_all
from echelon.proving.planted import BayesFilter, PlantedMarket, PlantedPart
from echelon.proving.prove import prove
from echelon.proving.worlds import (
    EqualWeight,
    last_bars,
    planted_worlds,
    proof_config,
    trade_draws,
    train_agent,
    with_steps,
)
from echelon.training.loop import Progress
from echelon.training.run import Worlds
from echelon.workers import Report, ShouldStop


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Counted(Part):
    """A part that notes each time it is run, and gives up as often as it is told to."""

    KEY = "{0.name}"

    name: str
    config: Config
    stops: int = 0
    fails: bool = False

    @property
    def steps(self) -> int:
        return 7

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        log = directory / "runs"
        times = len(log.read_text(encoding="utf-8")) if log.exists() else 0
        log.write_text("x" * (times + 1), encoding="utf-8")
        if self.fails:
            raise TrainingError(f"{self.name} diverged")
        return None if times < self.stops else {"value": 2.5, "times": times + 1}


def runs_of(directory: Path, name: str) -> int:
    return len((directory / "parts" / name / "runs").read_text(encoding="utf-8"))


def test_a_part_with_a_finding_is_not_run_again(tmp_path: Path) -> None:
    parts = [Counted("a", tiny_config()), Counted("b", tiny_config())]
    told: list[tuple[str, object]] = []
    first = run_all(parts, tmp_path, workers=1)
    again = run_all(
        parts, tmp_path, workers=1, on_report=lambda part, message: told.append((part.key, message))
    )
    assert again == first
    assert [done.finding["value"] for done in first.values()] == [2.5, 2.5]
    assert (runs_of(tmp_path, "a"), runs_of(tmp_path, "b")) == (1, 1)
    assert [key for key, message in told if isinstance(message, Done)] == ["a", "b"]


def test_a_stopped_part_is_gone_on_with(tmp_path: Path) -> None:
    parts = [Counted("a", tiny_config()), Counted("b", tiny_config(), stops=1)]
    with pytest.raises(Stopped, match="1 of 2 parts are done"):
        run_all(parts, tmp_path, workers=1)
    assert run_all(parts, tmp_path, workers=1)["b"].finding["times"] == 2
    assert runs_of(tmp_path, "a") == 1


def test_a_failure_is_raised_and_leaves_other_findings(tmp_path: Path) -> None:
    parts = [Counted("bad", tiny_config(), fails=True), Counted("good", tiny_config())]
    with pytest.raises(TrainingError, match="bad diverged"):
        run_all(parts, tmp_path, workers=1)
    assert (tmp_path / "parts" / "good" / "part.json").is_file()


def test_a_part_of_another_configuration_is_refused_before_anything_runs(tmp_path: Path) -> None:
    run_all([Counted("a", tiny_config())], tmp_path, workers=1)
    other = [Counted("b", tiny_config()), Counted("a", tiny_config("train.gamma=0.5"))]
    with pytest.raises(UsageError, match="--overwrite"):
        run_all(other, tmp_path, workers=1)
    assert not (tmp_path / "parts" / "b").exists()


def test_identity_knows_the_configuration_and_not_where_it_is_logged() -> None:
    part = Counted("a", tiny_config())
    assert identity_of(part) == identity_of(Counted("a", tiny_config("logging.output_dir=/x")))
    assert identity_of(part) != identity_of(Counted("a", tiny_config("train.gamma=0.5")))
    assert identity_of(part) != identity_of(replace(part, stops=1))


def test_a_damaged_finding_is_named(tmp_path: Path) -> None:
    part = Counted("a", tiny_config())
    run_all([part], tmp_path, workers=1)
    path = tmp_path / "parts" / "a" / "part.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match=r"part\.json: missing or damaged"):
        run_all([part], tmp_path, workers=1)


@dataclass(frozen=True)
class Unreadable(Part):
    """A part that meets a damaged file, its own or another's."""

    KEY = "{0.name}"

    name: str
    path: str

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        where = directory if self.path == "own" else Path(self.path)
        raise StoreError(f"{where / 'state.json'}: damaged. Resume from an earlier one: --resume x")


@pytest.mark.parametrize("path", ["own", "elsewhere"])
def test_a_damaged_checkpoint_of_a_part_comes_with_advice_that_can_be_followed(
    path: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="damaged") as caught:
        run_all([Unreadable("a", path)], tmp_path, workers=1)
    own = tmp_path / "parts" / "a"
    assert (f"delete {own} and run the same command" in str(caught.value)) is (path == "own")


def test_deleting_a_part_with_a_damaged_checkpoint_trains_it_again(tmp_path: Path) -> None:
    config = proof_config(tiny_config("train.total_env_steps=400"))
    part = PlantedPart(config, PlantedMarket(n_bars=160, n_assets=3), 1, 1)
    ran = run_all([part], tmp_path, workers=1)
    own = tmp_path / "parts" / part.key
    (own / "part.json").unlink()
    (own / "seeds" / "1" / "result.json").unlink()
    for state in own.glob("seeds/1/checkpoints/*/state.json"):
        state.write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match=f"delete {re.escape(str(own))} and run"):
        run_all([part], tmp_path, workers=1)
    shutil.rmtree(own)
    again = run_all([part], tmp_path, workers=1)
    assert again[part.key].finding == ran[part.key].finding


def test_a_finding_says_what_it_cost(tmp_path: Path) -> None:
    run_all([Counted("a", tiny_config())], tmp_path, workers=1)
    path = tmp_path / "parts" / "a" / "part.json"
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert set(tree) == {"key", "finding", "seconds", "cpu_seconds", "code"}
    assert tree["seconds"] >= 0.0


def planted(n_draws: int, n_bars: int = 160) -> tuple[PlantedMarket, list[Any], Config]:
    config = proof_config(tiny_config())
    market = PlantedMarket(n_bars=n_bars, n_assets=3)
    worlds = planted_worlds([market.draw(k, "test") for k in range(n_draws)], config)
    return market, worlds, config


def test_draws_traded_together_give_what_each_gives_alone() -> None:
    market, worlds, config = planted(3)
    together = trade_draws(BayesFilter(market), worlds, config)
    for d, world in enumerate(worlds):
        alone = run_backtest(BayesFilter(market), world, world.span("test"), config)
        assert np.array_equal(together.returns[:, d], alone.returns)
        assert together.traded[:, d] == pytest.approx(alone.traded, rel=1e-12)
        assert together.sharpes[d] == pytest.approx(alone.measures["sharpe_annual"])
        assert together.turnover[d] == pytest.approx(alone.traded.mean() * 252)


def test_equal_weight_of_many_draws_is_the_baseline_of_each() -> None:
    _, worlds, config = planted(3)
    together = trade_draws(EqualWeight(config), worlds, config)
    for d, world in enumerate(worlds):
        baseline = make_baseline("equal_weight", config)
        alone = run_backtest(baseline, world, world.span("test"), config)
        assert together.returns[:, d] == pytest.approx(alone.returns, abs=1e-12)
    assert together.turnover.min() > 0


def test_last_bars_are_the_test_window() -> None:
    _, (world,), _ = planted(1)
    cut = last_bars(world, 50)
    assert cut.span("test") == range(110, 160)
    assert cut.span("train") == world.span("train")


def test_steps_are_capped_and_validations_spread() -> None:
    config = tiny_config("train.total_env_steps=1000", "train.validate_every_steps=50")
    assert with_steps(config, 5000).train == config.train
    fewer = with_steps(config, 400, 3).train
    assert (fewer.total_env_steps, fewer.validate_every_steps) == (400, 134)


def test_training_goes_on_after_a_stop_and_ends_as_without_one(tmp_path: Path) -> None:
    _, (train, valid), config = planted(2)
    worlds = Worlds(train, valid, "x")

    def at(name: str, should_stop: ShouldStop) -> Any:
        return train_agent(config, worlds, tmp_path / name, 1, lambda _: None, should_stop)

    whole = at("whole", lambda: False)
    assert at("cut", lambda: True) is None
    resumed = at("cut", lambda: False)
    again = at("cut", lambda: False)
    scores = {t.outcome.best_score for t in (whole, resumed, again)}
    assert len(scores) == 1
    left, right = (trade_draws(t.policy, [valid], config).returns for t in (whole, resumed))
    assert np.array_equal(left, right)


def test_progress_is_passed_on(tmp_path: Path) -> None:
    _, (train, valid), config = planted(2)
    seen: list[object] = []
    train_agent(config, Worlds(train, valid, "x"), tmp_path, 1, seen.append, lambda: False)
    assert isinstance(seen[-1], Progress)
    assert seen[-1].step == 400


def test_overwriting_waits_for_no_proof_and_takes_the_old_certificate_away(tmp_path: Path) -> None:
    old = tmp_path / "certificate.json"
    kept = tmp_path / "parts" / "x" / "part.json"
    kept.parent.mkdir(parents=True)
    for path in (old, kept):
        path.write_text("{}", encoding="utf-8")
    with lock_proof(tmp_path), pytest.raises(StoreError, match="another process"):
        prove(tiny_config(), tmp_path, markets=(), overwrite=True)
    assert old.exists()
    assert kept.exists()
    made = prove(tiny_config(), tmp_path, markets=(), overwrite=True)
    assert made.markets == ()
    assert not kept.exists()
    assert Certificate.read(old).markets == (), "it is this proof's"
