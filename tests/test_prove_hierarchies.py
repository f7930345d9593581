"""The hierarchy on the regime market: its parts on tiny sizes, its verdict by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from markets import CONFIGS
from provings import SIZES, shrink_leaky, shrink_quick
from rule_routers import FixedRouter
from typer.testing import CliRunner
from worlds import make_config

from echelon.cli import app
from echelon.config import Config, load_config
from echelon.errors import EchelonError
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HedgeRouter
from echelon.proving.parts import Done, Finding
from echelon.proving.prove import (
    FULL,
    PROOF_MARKETS,
    QUICK,
    QUICK_EXPERTS,
    QUICK_HIERARCHY,
    Pace,
    plan,
    sizes_for,
)
from echelon.proving.regime import (
    BLIND,
    CHOOSING,
    FOLLOW,
    OPPOSE,
    PairCounts,
    RegimeFlatPart,
    RegimeHierarchyPart,
    RegimeMarket,
    RegimeSetting,
    assess_hierarchy,
    assess_regime,
    by_pair,
    flat_config,
    flat_sac,
    run_references,
)
from echelon.proving.worlds import Trained, trade_draws
from echelon.training.loop import Outcome

TINY = (
    *("window=6", "model.d_model=8", "model.n_layers=1", "expert.hidden=8", "train.books=4"),
    *("train.episode_steps=12", "train.algo=HIERARCHY", "reward.scale=100", "pretrain.epochs=1"),
    *("expert.batch_size=16", "expert.learning_starts=16", "expert.updates_per_step=0.25"),
    *("experts.n_experts=2", "experts.skill_dim=4", "experts.responsibility_bars=5"),
    *("experts.sharing.buffer_size=3000", "experts.sharing.sequence_steps=3"),
    *("experts.sharing.fresh_steps=200", "trainer.round_steps=16", "trainer.probe_states=6"),
    *("trainer.training_schedule.experts={freq: 2, steps: 16}", "meta_router.n_steps=32"),
    *("trainer.training_schedule.router={freq: 2, steps: 32}", "meta_router.n_envs=4"),
    *("meta_router.batch_size=16", "meta_router.episode_decisions=4", "meta_router.every_bars=2"),
    *("meta_router.horizons=[2, 5]", "train.total_env_steps=200", "logging.tensorboard=false"),
    *("train.validate_every_steps=200", "train.checkpoint_every_steps=10000"),
    "train.lr_actor=0.001",
)
MARKET = RegimeMarket(n_assets=3, n_bars=90)
DRAWS = PairCounts(train=2, valid=1, test=1, valid_bars=60)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def done(key: str, finding: Finding) -> Done:
    return Done(key, finding, 1.0, 2.0, "code")


def test_a_hierarchy_trades_the_test_pairs_beside_everybody_in_it(tmp_path: Path) -> None:
    part = RegimeHierarchyPart(make_config(*TINY), MARKET, DRAWS, 5)
    finding = part.run(tmp_path, lambda _message: None, lambda: False)
    assert finding is not None
    assert part.key == "regime-hierarchy-5"
    assert set(finding["sharpes"]) == {"hierarchy", "hedge", "oracle", "expert 0", "expert 1"}
    assert all(
        len(found) == 1 and np.isfinite(found).all() for found in finding["sharpes"].values()
    )
    assert 0.0 <= finding["information"]["information"] <= finding["information"]["of"] <= 1.0
    assert set(finding["shown"]["in_charge"]) <= {0, 1, 2}
    assert len(finding["shown"]["regime"]) == len(finding["shown"]["in_charge"])


def test_hedge_of_the_proof_is_that_of_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the same two rules and without risk control they trade alike to the last bit."""
    config = make_config(*TINY, "meta_router.every_bars=5", "risk.enabled=false")
    market = replace(MARKET, n_bars=400, flip=1 / 50)
    part = RegimeHierarchyPart(config, market, DRAWS, 5)

    def untrained(config: Config, *_: object) -> Trained:
        policy = HierarchyPolicy([FOLLOW, OPPOSE], FixedRouter(0), config, 5)
        return Trained(policy, Outcome(5, "done", 0, 0, 0.0, 0.0))

    monkeypatch.setattr("echelon.proving.worlds.train_agent", untrained)
    finding = part.run(tmp_path, lambda _message: None, lambda: False)
    assert finding is not None
    setting = RegimeSetting.from_counts(config, market, DRAWS, 5)
    wanted = run_references(market, setting.test, setting.config)
    assert finding["sharpes"]["hedge"] == by_pair(wanted["fixed-share hedge"])
    assert finding["sharpes"]["hierarchy"] == by_pair(wanted["follow"])
    slow = HierarchyPolicy([FOLLOW, OPPOSE], HedgeRouter(rate=5.0), setting.config, 5)
    others = by_pair(trade_draws(slow, setting.worlds().test, setting.config).returns)
    assert others != finding["sharpes"]["hedge"], "the draw does not tell one rate from another"


@pytest.mark.parametrize("shown", [False, True])
def test_flat_agents_learn_on_the_same_draws_for_as_many_steps(tmp_path: Path, shown: bool) -> None:
    config = flat_config(make_config(*TINY), "sac")
    assert config.train.algo == "SAC"
    assert config.train.total_env_steps == 200
    part = RegimeFlatPart(config, MARKET, DRAWS, 5, "sac", shown)
    finding = part.run(tmp_path, lambda _message: None, lambda: False)
    assert finding is not None
    assert finding["steps"] >= 200
    assert part.key == f"regime-sac-{'shown' if shown else 'flat'}-5"


def test_flat_a2c_has_the_settings_it_was_proved_with() -> None:
    config = flat_config(make_config(*TINY), "a2c")
    assert config.train.algo == "A2C"
    assert config.train.peer_baseline
    assert config.train.total_env_steps == 200


def references(*filtered: float) -> Done:
    others = dict.fromkeys((*BLIND, *CHOOSING), [0.0] * len(filtered))
    return done("regime-references", {"sharpes": {**others, "regime filter": list(filtered)}})


def test_the_verdict_is_over_seeds_and_against_the_best_single_expert() -> None:
    def hierarchy(seed: int, ours: float) -> Done:
        sharpes = {"hierarchy": [ours, ours], "hedge": [2.0, 2.0], "oracle": [3.0, 3.0]}
        sharpes |= {"expert 0": [0.1, 0.3], "expert 1": [0.5, 0.5]}
        told = {"information": 0.5, "of": 1.0}
        finding = {"seed": seed, "steps": 9, "sharpes": sharpes, "information": told, "shown": {}}
        return done(f"regime-hierarchy-{seed}", finding)

    flats = [
        done(f"regime-{algo}-flat-{seed}", {"seed": seed, "steps": 9, "sharpes": [value, value]})
        for seed in (1, 2, 3)
        for algo, value in (("sac", 0.0), ("a2c", 1.5))
    ]
    parts = [hierarchy(1, 2.2), hierarchy(2, 2.3), hierarchy(3, 2.4), *flats]
    checks, rows = assess_hierarchy(2.5, parts)
    verdicts = {check.name: check.passed for check in checks}
    assert verdicts == {
        "regime_share": True,
        "regime_over_best single expert": True,
        "regime_over_flat sac": True,
        "regime_over_flat a2c": False,
    }
    assert rows["best single expert"] == [0.5, 0.5, 0.5]
    assert checks[0].estimate == pytest.approx(2.3 / 2.5)
    whole = assess_regime([references(2.4, 2.6, 9.9), *parts])
    shares = [check for check in whole.checks if check.name == "regime_share"]
    assert shares[0].estimate == pytest.approx(2.3 / 2.5)  # of the same two pairs
    assert whole.facts["hierarchy_seeds"] == [1, 2, 3]
    assert whole.facts["shown"] == {"seed": 1, "experts": 2}
    assert whole.cpu_seconds == 2.0 * (1 + len(parts))


def test_the_full_proof_of_a_hierarchy_has_flat_agents_beside_it() -> None:
    keys = [part.key for part in plan(make_config(*TINY), ["regime"], FULL).parts["regime"]]
    assert keys[0] == "regime-references"
    assert sum(key.startswith("regime-hierarchy") for key in keys) == FULL.hierarchy_seeds
    assert len(keys) == 1 + 5 * FULL.hierarchy_seeds


def test_flat_sac_makes_as_many_updates_as_the_experts_together() -> None:
    config = make_config(
        *("train.algo=HIERARCHY", "experts.n_experts=5", "trainer.round_steps=1000"),
        *("trainer.training_schedule.experts={freq: 5, steps: 5000}", "meta_router.every_bars=5"),
        *("trainer.training_schedule.router={freq: 10, steps: 10000}",),
        "expert.updates_per_step=0.06",
    )
    # Ten rounds: 2 phases of 5 experts with 300 updates each, in 50,000 steps of the experts and
    # 50,000 of the router.
    assert flat_sac(config) == ("train.algo=SAC", "expert.updates_per_step=0.03")


def test_the_quick_proof_of_a_hierarchy_has_one_on_fewer_pairs_and_no_flat_agents() -> None:
    config = make_config(*TINY)
    sizes = sizes_for(config, quick=True)
    assert sizes == QUICK_HIERARCHY
    planned = plan(config, PROOF_MARKETS, sizes)
    assert [part.key for part in planned.parts["regime"]] == [
        "regime-references",
        f"regime-hierarchy-{config.seed}",
    ]
    trained = [part.key for part in planned.first if part.steps]
    assert len(trained) == 6, "trend, regime, peeking, honest, and both fees"


def test_one_seed_is_held_to_no_bar_and_says_so() -> None:
    sharpes = {"hierarchy": [1.0], "hedge": [2.0], "oracle": [3.0], "expert 0": [0.2]}
    told = {"information": 0.5, "of": 1.0}
    finding = {"seed": 1, "steps": 9, "sharpes": sharpes, "information": told, "shown": {}}
    whole = assess_regime([references(2.0), done("regime-hierarchy-1", finding)])
    assert [check.passed for check in whole.checks[-2:]] == [None, None]
    assert whole.checks[-2].estimate == pytest.approx(0.5)
    assert whole.notes[-2:] == ("regime_one_seed", "regime_no_flat")


def test_quick_sizes_are_those_of_the_agent() -> None:
    named = {"qtmrl-fast": QUICK, "sac": QUICK_EXPERTS, "hierarchical": QUICK_HIERARCHY}
    for name, sizes in named.items():
        config = load_config(CONFIGS / f"{name}.yaml")
        assert sizes_for(config, quick=True) is sizes
        assert sizes_for(config, quick=False) is FULL
    assert QUICK_EXPERTS.pace is None
    assert QUICK_EXPERTS.own_draws == FULL.own_draws


def test_a_hierarchy_is_proved_on_all_five_markets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters on TimesNet and all bonuses; too small to learn anything."""
    shrink_leaky(monkeypatch)
    small = replace(
        SIZES,
        planted_seeds=1,
        own_draws=(2, 1),
        n_draws=1,
        claim_draws=1,
        null_draws=2,
        regime_pairs=1,
        hierarchy_seeds=1,
        hierarchy_steps=200,
        hierarchy_draws=DRAWS,
        hierarchy_flat=False,
        pace=Pace(1, 64, 10, 0.25, 1e-3),
    )
    shrink_quick(monkeypatch, small)
    settings = [word for item in TINY for word in ("-o", item)]
    command = ["prove", "--quick", "--workers", "1", "--output-dir", str(tmp_path)]
    where = ["--config", str(CONFIGS / "hierarchical.yaml")]
    result = CliRunner().invoke(app, [*command, *where, *settings])
    assert isinstance(result.exception, EchelonError), result.output
    assert "not passed" in str(result.exception)
    tree = json.loads((tmp_path / "certificate.json").read_text(encoding="utf-8"))
    found = {market["name"]: market for market in tree["markets"]}
    assert tuple(found) == PROOF_MARKETS
    assert tree["about"]["pace"]["lr"] == 1e-3
    assert {"regime_one_seed", "regime_no_flat"} < set(found["regime"]["notes"])
    assert found["regime"]["facts"]["shown"]["experts"] == 2
    assert found["null"]["facts"]["claims"]["agent"][1] == 1
    checks = {check["name"]: check for m in found.values() for check in m["checks"]}
    assert checks["leaky_refused"]["passed"] is True
    assert checks["regime_share"]["passed"] is None
    page = (tmp_path / "certificate.html").read_text(encoding="utf-8")
    assert "Hurried, by the same method" in page
    assert page.count("<svg") == 7
