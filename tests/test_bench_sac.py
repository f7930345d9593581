"""The peer of the SAC benchmark does the same work as our learner: books, networks, updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench import sac
from bench._sac_peer import Setting, make_learner, see_embeddings, see_windows
from bench.a2c import ASSETS, FEATURES, make_world
from echelon.agents.expert import ExpertLearner, SACLearner
from echelon.agents.replay import Replay
from echelon.config import Config, load_config
from echelon.envs.world import World
from echelon.models.encoders import Encoder

SMALL = (
    *("model.encoder=TimeCNN", "model.d_model=8", "expert.hidden=8", "expert.batch_size=16"),
    *("expert.buffer_size=256", "expert.learning_starts=16", "expert.updates_per_step=0.5"),
    *("train.books=4", "train.episode_steps=20", "train.rollout_steps=6"),
)
BARS = 90


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(sac.SAC_YAML, SMALL)


@pytest.fixture(scope="module")
def world(config: Config) -> World:
    return make_world(config, BARS)


@pytest.fixture
def learner(config: Config, world: World) -> ExpertLearner:
    return SACLearner(config, world, 1, sac.make_encoder(config, world))


def table_of(learner: ExpertLearner) -> torch.Tensor:
    first = learner.world.window - 1
    z = torch.zeros(BARS, ASSETS, learner.config.model.d_model)
    z[first:] = learner.table.look(np.arange(first, BARS))
    return z


@pytest.mark.parametrize("ours", [False, True])
def test_peer_sees_is_paid_and_answers_as_our_learner(
    learner: ExpertLearner, *, ours: bool
) -> None:
    see = see_embeddings(table_of(learner))
    sac.check_environments(learner, see)
    peer = make_learner(learner.config, learner.world, see, Setting(ours=ours))
    sac.check_networks(learner, peer, see)


def test_peer_on_windows_answers_as_on_embeddings(learner: ExpertLearner) -> None:
    config, world = learner.config, learner.world

    def made() -> Encoder:
        return sac.make_encoder(config, world)

    windows = make_learner(config, world, see_windows(world), Setting(), made)
    looked_up = make_learner(config, world, see_embeddings(table_of(learner)), Setting())
    windows.actor.net.load_state_dict(looked_up.actor.net.state_dict())
    rows = np.arange(30, 34)
    book = np.full((4, ASSETS + 1), 0.1, dtype=np.float32)
    answers = []
    for peer in (windows, looked_up):
        seen = np.concatenate([peer.env.see(rows), book], axis=1)
        with torch.no_grad():
            answers.append(peer.actor.get_action_dist_params(torch.from_numpy(seen))[0])
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n_envs", [1, None])
def test_both_sides_make_as_many_updates_a_bar(learner: ExpertLearner, n_envs: int | None) -> None:
    see = see_embeddings(table_of(learner))
    peer = make_learner(learner.config, learner.world, see, Setting(n_envs=n_envs))
    for one in (sac.ours(learner), sac.theirs("peer", peer, learner.config, 6)):
        one.run()
        assert one.bar > 0
    assert peer.num_timesteps % 4 == 0
    assert peer.replay_buffer is not None
    assert peer.replay_buffer.observations.shape[-1] == ASSETS * 9 + 1


def test_parts_and_products_of_a_bar_are_found_where_they_are(learner: ExpertLearner) -> None:
    shares = sac.products_of(learner, rounds=1)
    assert set(shares.parts) == {"collect", "draw", "batch", "update"}
    assert all(seconds > 0 for seconds in [*shares.parts.values(), *shares.products.values()])


def test_bytes_of_windows_are_those_that_the_buffer_allocates(world: World) -> None:
    seen = world.window * ASSETS * FEATURES + ASSETS + 1
    rest = 4 * (ASSETS + 3)  # the action, reward, done, timeout
    assert sac.bytes_of(world, seen, once=False) == 2 * 4 * seen + rest
    assert sac.bytes_of(world, seen, once=True) == 4 * seen + rest
    assert Replay(1, ASSETS).bytes_per_transition * sac.GOAL_MEMORY < 4 * seen
