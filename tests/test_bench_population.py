"""The population's benchmark: both sides do the same work, and every line of it is measured."""

from __future__ import annotations

import re

import pytest
import torch

from bench import population
from bench._sac_peer import Setting, see_windows
from bench.population import Peer, Spent, Work, config_of, five, ours, theirs, worlds_of
from bench.sac import make_encoder

SMALL = (
    *("model.d_model=8", "model.n_layers=1", "expert.hidden=8", "expert.batch_size=15"),
    *("expert.learning_starts=16", "expert.updates_per_step=0.5", "train.books=4"),
    *("train.episode_steps=20", "trainer.workers=1", "trainer.round_steps=8"),
    *("experts.n_experts=2", "experts.skill_dim=4", "experts.sharing.buffer_size=2000"),
    *("trainer.training_schedule.experts={freq: 2, steps: 16}", "trainer.probe_states=8"),
    *("trainer.training_schedule.router={freq: 4, steps: 32}", "meta_router.n_steps=32"),
    *("trainer.training_schedule.population.freq=4", "meta_router.n_envs=4"),
    *("meta_router.batch_size=16", "meta_router.episode_decisions=4", "expert.buffer_size=256"),
    *("experts.sharing.sequence_steps=3", "experts.mi_reward_weight=0"),
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(population, "TRAIN", 300)
    monkeypatch.setattr(population, "VALID", 150)
    monkeypatch.setattr(population, "WINDOWS", ("expert.buffer_size=64",))
    # Two threads on cores that other tests keep busy wait for each other most of the time.
    monkeypatch.setattr(population, "CORES", 1)


def test_both_sides_make_as_many_steps_and_updates() -> None:
    config = config_of(SMALL)
    assert Work.of(config) == Work(rounds=2, bars=4, updates=8)
    spent = ours(config, worlds_of(config), population.cycle_of(config))
    assert (spent.bars, spent.updates) == (8, 16)
    assert set(spent.phases) == set(population.PHASES)
    assert all(seconds > 0 for seconds in spent.phases.values())
    # Two experts' 8 bars of 4 books, and 32 decisions of 5 bars.
    assert spent.steps == 2 * 8 * 4 + 32 * 5
    world = worlds_of(config)
    peers = theirs(
        *(config, world, see_windows(world), Setting(ours=True)),
        lambda: make_encoder(config, world),
        *(2, 1),
    )
    assert [peer.threads for peer in peers] == [1]
    assert all(len(peer.seconds) == 2 and peer.bar > 0 for peer in peers)


def test_a_schedule_with_other_updates_than_sb3_makes_is_refused() -> None:
    uneven = config_of(SMALL, "trainer.training_schedule.experts={freq: 2, steps: 20}")
    with pytest.raises(SystemExit, match=r"10 updates after 4 bars are not 2 for each"):
        Work.of(uneven)
    with pytest.raises(SystemExit, match="no whole cycle"):
        population.cycle_of(config_of(SMALL, "trainer.training_schedule.population.freq=5"))


def test_five_runs_are_five_times_the_quicker_number_of_threads() -> None:
    found = five("SB3", [Peer(1, [3.0, 1.0, 2.0]), Peer(2, [1.5, 1.4, 9.0])], 10, 5)
    assert found.seconds == 5 * 10 * 1.5
    assert "1 thread(s) 2,000 ms, 2 thread(s) 1,500 ms" in found.how
    spent = Spent({"collect": 1.0, "experts": 2.0, "router": 4.0, "population": 8.0}, 1, 1, 1)
    assert spent.experts == 3.0


def test_every_line_is_measured_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for item in SMALL for word in ("-o", item)]
    code = population.main(["--rounds", "1", "--window-rounds", "1", *words])
    said = capsys.readouterr().out
    ratio = re.search(r"goal: at least 15× .*: ([\d.]+)×, (met|MISSED)", said)
    assert ratio is not None
    assert (code == 0) == (float(ratio[1]) >= 15.0) == (ratio[2] == "met")
    for name in (
        *("ours, experts' phases", "SB3, windows, TimeCNN learns", "SB3, embeddings"),
        *("SB3, windows, TimeCNN frozen", "ours, with adapters", "ours, the whole cycle"),
        *("matrix products", "time/collect", "time/router", "equal inputs"),
    ):
        assert name in said
