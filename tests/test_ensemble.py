"""The seeds of a run as one policy: what it decides, and how it is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import trained_run
from worlds import at, make_config, make_world

from echelon.backtest.ensemble import ENSEMBLE, EnsemblePolicy
from echelon.backtest.run import run_backtest
from echelon.envs.act import Action, Holdings
from echelon.envs.world import World
from echelon.errors import UsageError
from echelon.evaluation.evaluate import evaluate, load_evaluation
from echelon.evaluation.test_access import Look
from echelon.training.run import TrainedRun

NAN = np.nan


class Says:
    """A policy that always gives the same answer, for one book."""

    name = "says"

    def __init__(self, kind: Any, answer: Any) -> None:
        self.kind, self._answer, self.started = kind, np.array([answer]), 0

    def start(self, world: World, span: range) -> None:
        self.started += 1

    def decide(self, row: np.ndarray, held: Holdings) -> np.ndarray:
        return self._answer

    lookback = 5

    def state(self) -> dict[str, Any]:
        return {"started": np.array([self.started])}

    def restore(self, state: Any) -> None:
        self.started = int(state["started"][0])

    def probabilities(self, row: np.ndarray, held: Holdings) -> np.ndarray:
        return self._answer


def holding(*weights: float) -> Holdings:
    parts: dict[str, Any] = {
        "weights": np.array([weights], dtype=np.float32),
        "cash_share": np.array([1.0 - sum(weights)], dtype=np.float32),
        "allowed": np.ones((1, len(weights), 3), dtype=bool),
        "value": np.array([1e6]),
    }
    return Holdings(*(parts[name] for name in Holdings._fields))


def test_target_weights_are_averaged_and_who_leaves_an_asset_wants_what_is_held() -> None:
    members = [Says("weights", [0.2, 0.4, NAN, 0.0]), Says("weights", [0.6, NAN, NAN, 0.5])]
    ensemble = EnsemblePolicy(members)
    assert ensemble.kind == "weights"
    target = ensemble.decide(at(3), holding(0.1, 0.25, 0.3, 0.0))
    np.testing.assert_allclose(target, [[0.4, 0.325, NAN, 0.25]])


def test_most_probable_action_by_the_mean_is_taken() -> None:
    """Two members prefer BUY by a little, one HOLD by far."""
    members = [Says("discrete", [[0.45, 0.55, 0.0]]) for _ in range(2)]
    ensemble = EnsemblePolicy([*members, Says("discrete", [[0.9, 0.1, 0.0]])])
    np.testing.assert_allclose(ensemble.probabilities(at(3), holding(0.0)), [[[0.6, 0.4, 0.0]]])
    np.testing.assert_array_equal(ensemble.decide(at(3), holding(0.0)), [[Action.HOLD]])


def test_every_member_is_started_and_one_alone_decides_as_by_itself() -> None:
    world, members = make_world(), [Says("weights", [0.2, 0.3, 0.1])] * 2
    ensemble = EnsemblePolicy(members)
    backtest = run_backtest(ensemble, world, range(10, 20), make_config())
    assert members[0].started == 2
    np.testing.assert_allclose(backtest.actions[0], [0.2, 0.3, 0.1])


def test_what_members_remember_is_saved_and_restored_each_to_its_own() -> None:
    saved, fresh = ([Says("weights", [0.1]) for _ in range(2)] for _ in range(2))
    saved[0].started, saved[1].started = 3, 7
    ensemble = EnsemblePolicy(fresh)
    ensemble.restore(EnsemblePolicy(saved).state())
    assert [member.started for member in fresh] == [3, 7]
    assert ensemble.lookback == 5


def test_policies_that_act_in_different_ways_are_not_averaged() -> None:
    members = [Says("weights", [0.1]), Says("discrete", [[1.0, 0.0, 0.0]])]
    with pytest.raises(UsageError, match="by discrete and by weights"):
        EnsemblePolicy(members)
    with pytest.raises(UsageError, match="at least one policy"):
        EnsemblePolicy([])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Path:
    return trained_run(tmp_path_factory.mktemp("run") / "run", bars_file, "A2C", seeds=(1, 2))


def test_evaluation_judges_the_ensemble_next_to_the_seeds(run: Path, shell: Any) -> None:
    out, _ = shell.works("evaluate", str(run), "--ensemble")
    assert "ensemble" in out
    saved = load_evaluation(run, "valid")
    opened = TrainedRun.open(run)
    world = Look.back(opened, "valid").world(1.0)
    policy = EnsemblePolicy([opened.policy(seed) for seed in opened.seeds])
    backtest = run_backtest(policy, world, world.span("valid"), opened.config)
    assert saved.ensemble is not None
    assert saved.ensemble["total_return"] == backtest.measures["total_return"]
    values = saved.tables(ENSEMBLE).equity["value"].to_numpy()
    np.testing.assert_array_equal(values, backtest.value)
    printed, _ = shell.works("report", str(run))
    page = Path(printed.split("report: ")[1].strip())
    assert "Ensemble of the seeds" in page.read_text(encoding="utf-8")
    # Evaluated without it, nothing of it stays.
    assert evaluate(opened, "valid", trust=False).ensemble is None
    assert "ensemble" not in json.loads((saved.directory / "summary.json").read_text())
