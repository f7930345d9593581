"""The study of shared replay: its task's optimum, its replay, its naive returns, its tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import _point as point
from bench import sharing
from bench._control import (
    Drawn,
    Episodes,
    GaussianGroup,
    GaussianMLP,
    Lived,
    TwinGroup,
    TwinMLP,
)
from bench.sharing import CONDITIONS, GAMMA, Budget, Learners, as_stretches, n_step
from echelon.config.hierarchy import SharingConfig
from echelon.rng import stream

TINY = Budget(rounds=2, episodes=2, updates=2, points=2)
PAIR = (0, 1)
EPISODE = 1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the study runs; for networks of this size a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def told_episodes(n: int, n_learners: int) -> Lived:
    """Episodes [n,T,G,…] whose numbers say which episode it is, which step and whose."""
    place = torch.meshgrid(
        torch.arange(n), torch.arange(point.STEPS), torch.arange(n_learners), indexing="ij"
    )
    episode, step, learner = (part.float() for part in place)
    obs = torch.stack([learner, episode, step, torch.zeros_like(step)], dim=-1)
    pair = obs[..., :2]
    return Lived(obs, pair, pair, step, pair, pair, obs)


def filled(n_learners: int = 6, n: int = 6) -> Episodes:
    replay = Episodes(n_learners, n, point.STEPS, point.N_OBS, point.N_ACTIONS)
    replay.add(told_episodes(n - 2, n_learners))
    lived = told_episodes(2, n_learners)
    lived.obs[..., EPISODE] += n - 2
    replay.add(lived)
    return replay


def lived_batch(goal: float = 0.5) -> tuple[Learners, Drawn]:
    learners = Learners(PAIR, goal)
    replay = Episodes(learners.count, 2, point.STEPS, point.N_OBS, point.N_ACTIONS)
    replay.add(learners.live(2))
    return learners, replay.draw(6, 5, stream(0, "x"), n_own=2, fresh=1, population=4)


def test_regulator_beats_every_disturbed_regulator_and_its_value_is_riccatis() -> None:
    goal, first = torch.tensor([0.5, -0.5]), sharing.judged_from()
    gains = point.regulator(1.0, point.STEPS)
    best = point.rollout(goal, first, point.regulated(goal, gains)).mean()
    rng = np.random.default_rng(0)
    for _ in range(20):
        other = gains + 0.1 * rng.standard_normal(gains.shape)
        assert point.rollout(goal, first, point.regulated(goal, other)).mean() < best
    # Two steps to go: only the first force matters, and by hand it is Δ²x/(1 + Δ⁴) for v = 0.
    assert point.regulator(1.0, 2)[0, 0] == pytest.approx(0.01 / (1.0 + 1e-4))
    assert (point.regulator(1.0, 2)[1] == 0.0).all()


def test_bounds_of_the_force_never_bind_the_regulator() -> None:
    ends = sharing.scale()
    assert ends.nothing < ends.best < 0.0
    assert 0.5 < ends.strongest < 1.0
    assert 0.99 < ends.aimed < 1.0
    corner = torch.tensor([[-1.0, -1.0, -0.3, -0.3]])
    goal = torch.tensor([sharing.GOAL, sharing.GOAL])
    law = point.regulated(goal, point.regulator(1.0, point.STEPS))
    assert float(law(corner, 0).abs().max()) < 1.0


def test_a_step_pushes_and_pays_as_the_formula_says() -> None:
    obs = torch.tensor([[1.0, 0.0, 0.5, 0.0]])
    action = torch.tensor([[0.5, -1.0]])
    torch.testing.assert_close(point.advance(obs, action), torch.tensor([[1.06, -0.02, 0.6, -0.2]]))
    paid = point.reward(torch.tensor([0.0, 1.0]), obs, action)
    torch.testing.assert_close(paid, torch.tensor([-0.1 * (2.0 + 4.0 * 1.25)]))


def test_walls_stop_what_would_leave() -> None:
    obs = torch.tensor([[1.49, -1.0, 1.0, -1.0]])
    after = point.advance(obs, torch.zeros(1, 2))
    torch.testing.assert_close(after, torch.tensor([[point.WALL, -1.1, 0.0, -1.0]]))


def test_a_group_answers_as_its_members_do() -> None:
    torch.manual_seed(0)
    actors = [GaussianMLP(4, 2, (8, 6)) for _ in range(3)]
    critics = [TwinMLP(4, 2, (8, 6)) for _ in range(3)]
    obs, action = torch.randn(5, 3, 4), torch.randn(5, 3, 2)
    mean, log_std = GaussianGroup(actors)(obs.flatten(0, 1))
    q = TwinGroup(critics)(obs.flatten(0, 1), action.flatten(0, 1))
    for k in range(3):
        wanted = actors[k](obs[:, k])
        torch.testing.assert_close(mean.view(5, 3, 2)[:, k], wanted[0])
        torch.testing.assert_close(log_std.view(5, 3, 2)[:, k], wanted[1])
        torch.testing.assert_close(q.view(2, 5, 3)[:, :, k], critics[k](obs[:, k], action[:, k]))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_no_learner_moves_another(condition: str) -> None:
    def weights(disturbed: int | None) -> list[torch.Tensor]:
        learners, drawn = lived_batch()
        batch = as_stretches(drawn, learners.goals)
        if disturbed is not None:
            rows = batch.reward.view(5, 6, -1)
            rows[:, :, disturbed] += 1.0
        if condition == "n-step":
            learners.core.update(n_step(batch, 0.1))
        else:
            learners.core.update_sequences(
                batch, SharingConfig(trace=1.0, kl_limit=1.0, corrected=condition != "naive")
            )
        parts = (learners.core.actor, learners.core.critic)
        found = [p.detach().clone() for part in parts for p in part.parameters()]
        # Critics after the first layer are [2·G,…]; all else is [G,…].
        return [p.view(-1, learners.count, *p.shape[1:]) for p in found]

    before, after = weights(None), weights(2)
    changed = torch.tensor(
        [
            [not torch.equal(x[:, g], y[:, g]) for g in range(8)]
            for x, y in zip(before, after, strict=True)
        ]
    )
    assert changed[:, 2].any()
    assert not changed[:, [g for g in range(8) if g != 2]].any()


def test_sequences_are_contiguous_and_come_from_whom_they_should() -> None:
    replay = filled()
    drawn = replay.draw(400, 5, stream(0, "x"), n_own=100, fresh=2, population=3)
    source, episode, step = drawn.steps.obs.unbind(-1)[:3]
    assert (source == drawn.source).all()
    assert (episode == episode[0]).all()
    assert (step - step[0] == torch.arange(5)[:, None, None]).all()
    assert torch.equal(drawn.last, step == point.STEPS - 1)
    assert drawn.last[-1].any()
    assert not drawn.last[:-1].any()
    for learner in range(6):
        theirs = drawn.source[:, learner]
        assert (theirs[:100] == learner).all()
        assert {*episode[0, :100, learner].tolist()} == {4.0, 5.0}
        assert {*theirs[100:].tolist()} == ({0, 1, 2} if learner < 3 else {3, 4, 5})
        assert {*episode[0, 100:, learner].tolist()} == set(range(6))
        assert {*step[0, :, learner].tolist()} == set(range(point.STEPS - 4))
    alone = replay.draw(40, 5, stream(0, "x"), n_own=10, fresh=2, population=1)
    assert (alone.source == torch.arange(6)).all()


def test_replay_refuses_more_than_it_has_room_for() -> None:
    replay = filled()
    with pytest.raises(ValueError, match="no room for episode 7 among 6"):
        replay.add(told_episodes(1, 6))


def test_naive_returns_are_those_of_a_loop_and_the_bootstrap_is_the_sequences_end() -> None:
    learners, drawn = lived_batch()
    batch = as_stretches(drawn, learners.goals)
    alpha = 0.3
    made = n_step(batch, alpha)
    steps = Lived(*(part.flatten(1, 2) for part in drawn.steps))
    n = batch.reward.shape[1]
    for b in range(0, n, 7):
        for t in range(5):
            total = 0.0
            for i in range(t, 5):
                noise = (steps.raw[i, b] - steps.mean[i, b]) / steps.log_std[i, b].exp()
                density = -0.5 * noise**2 - steps.log_std[i, b] - 0.5 * math.log(2 * math.pi)
                density -= torch.log(1 - steps.action[i, b] ** 2)
                soft = float(batch.reward[i, b]) - (alpha * float(density.sum()) if i > t else 0.0)
                total += GAMMA ** (i - t) * soft
            k = t * n + b
            assert float(made.reward[k]) == pytest.approx(total, rel=1e-3)
            assert float(made.discount[k]) == pytest.approx(GAMMA ** (5 - t))
            assert torch.equal(made.next_obs[k], steps.next_obs[4, b])
            assert torch.equal(made.obs[k], steps.obs[t, b])


def test_lived_steps_go_on_and_are_paid_by_the_learners_own_goal() -> None:
    learners, drawn = lived_batch()
    lived = learners.live(3)
    assert lived.obs.shape == (3, point.STEPS, 8, 4)
    assert torch.equal(lived.next_obs[:, :-1], lived.obs[:, 1:])
    torch.testing.assert_close(point.advance(lived.obs, lived.action), lived.next_obs)
    batch = as_stretches(drawn, learners.goals)
    assert torch.equal(batch.shared.view(6, 8), drawn.source != torch.arange(8))
    assert not batch.shared.view(6, 8)[:2].any()
    assert batch.shared.any()
    for learner in range(8):
        goal = 0.5 * torch.tensor(sharing.CORNERS[learner % 4])
        wanted = point.reward(goal, *(part[:, :, learner] for part in drawn.steps[:2]))
        torch.testing.assert_close(batch.reward.view(5, 6, 8)[:, :, learner], wanted)


def test_conditions_begin_alike_repeat_themselves_and_part() -> None:
    outcomes = {c: sharing.run(c, PAIR, TINY) for c in CONDITIONS}
    for outcome in outcomes.values():
        assert outcome.steps == [0, 100, 200]
        assert outcome.returns.shape == (3, 2, 4)
        assert np.array_equal(outcome.returns[0], outcomes["own"].returns[0])
    again = sharing.run("corrected", PAIR, TINY)
    assert np.array_equal(again.returns, outcomes["corrected"].returns)
    assert len({outcome.returns[-1].tobytes() for outcome in outcomes.values()}) == 4
    assert np.isnan(outcomes["own"].trace[:, 1:]).all()
    for name in ("naive", "n-step"):
        assert (outcomes[name].trace == 1.0).all()
        assert (outcomes[name].dropped == 0.0).all()
    corrected = outcomes["corrected"]
    assert (corrected.trace[:, 1:] < 1.0).all()
    assert (corrected.dropped[:, 0] == 0.0).all()


def test_runs_are_kept_gathered_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for condition in CONDITIONS:
        sharing.run_into(tmp_path, condition, PAIR, TINY, 0.5)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    sharing.run_into(tmp_path, "own", PAIR, TINY, 0.5)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    capsys.readouterr()
    good = sharing.summary(tmp_path)
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "summary" / "result.json").read_text())
    own = json.loads((tmp_path / "own.json").read_text())
    mean = float(sharing.scale().share(np.mean(own["returns"][-1])))
    assert result["curves"]["own"][-1]["estimate"] == pytest.approx(mean)
    assert f"{mean:.3f}" in shown
    paired = next(x for x in result["differences"] if x["of"] == "corrected − own")
    corrected = result["curves"]["corrected"][-1]["estimate"]
    assert paired["end"]["estimate"] == pytest.approx(corrected - mean)
    assert good == (paired["end"]["high"] >= 0.0)
    assert {*result["sources"]["corrected"]} == {"itself", "neighbours", "opposite"}
    assert {*result["sources"]["own"]} == {"itself"}


def test_summary_refuses_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no run of own, naive"):
        sharing.summary(tmp_path)
    once = TINY._replace(rounds=1, points=1)
    for condition in CONDITIONS:
        goal = 0.2 if condition == "own" else 0.5
        sharing.run_into(tmp_path, condition, PAIR, once, goal)
    with pytest.raises(SystemExit, match="different goal"):
        sharing.summary(tmp_path)
