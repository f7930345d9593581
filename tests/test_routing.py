"""The proof of routing: fixed experts, a router that learns, and the hint that only it sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import make_config, make_world

from echelon.errors import ConfigError
from echelon.population.expert_books import survey
from echelon.population.meta_env import MetaEnv
from echelon.population.router_task import MarketView, observation_names
from echelon.proving import routing
from echelon.proving.regime import RegimeMarket
from echelon.proving.routing import RoutingPart, fixed_experts, hinted_worlds
from echelon.proving.worlds import proof_config

SMALL = (
    *("meta_router.n_steps=64", "meta_router.batch_size=32", "meta_router.n_envs=4"),
    *("meta_router.prior=fixed_share", "meta_router.episode_decisions=10", "window=5"),
)


def test_router_sees_the_series_that_all_assets_share() -> None:
    world = make_world(n_rows=120, n_features=3, seed=1)
    world.x[..., 2] = np.linspace(-7.0, 7.0, 120)[:, None]
    world.x[~world.present] = 0.0
    config = make_config("meta_router.macro=1", "meta_router.horizons=[2, 5]")
    names = observation_names([f"{k}" for k in range(5)], (2, 5), macro=1)
    assert names[-1] == "macro/0"
    rows = np.array([40, 80, 119])
    view = MarketView(world, 20, (2, 5), macro=1)
    view.catch_up()
    expected = np.clip(np.linspace(-7.0, 7.0, 120)[rows], -5.0, 5.0)
    np.testing.assert_allclose(view.at(rows)[:, -1], expected, rtol=1e-6)
    surveyed = survey(fixed_experts(), world, [range(20, 120)], config)
    np.testing.assert_array_equal(surveyed.market[rows], view.at(rows))
    env = MetaEnv(fixed_experts(), world, [range(20, 120)], config, 1)
    assert env.observation_space.shape == (len(names),)
    np.testing.assert_array_equal(env.reset()[:, -1], surveyed.market[env._books.row, -1])


def test_more_series_than_features_are_refused() -> None:
    world, config = make_world(n_features=2), make_config("meta_router.macro=3")
    with pytest.raises(ConfigError, match=r"meta_router.macro = 3 is more than the 2 features"):
        survey(fixed_experts(), world, [range(20, 60)], config)
    with pytest.raises(ConfigError, match=r"number of series of data.exogenous"):
        MarketView(world, 20, (2, 5), macro=3)


def test_untrained_router_trades_as_the_rule_and_experts_do_not_see_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    forms = {form: replace(market, n_bars=260) for form, market in routing.FORMS.items()}
    monkeypatch.setattr(routing, "FORMS", forms)
    config = proof_config(make_config(*SMALL))
    part = RoutingPart(config, "hint", 1, decisions=0, counts=(1, 1))
    assert part.key == "routing-hint-1"
    finding = part.run(tmp_path, lambda *_: None, lambda: False)
    assert finding is not None
    sharpes = finding["sharpes"]
    assert sharpes["router"] == sharpes["hedge"]
    assert len(sharpes["filter"]) == 1
    draws = forms["hint"].pairs(1, "x")
    shown = hinted_worlds(
        draws,
        config.model_copy(
            update={"meta_router": config.meta_router.model_copy(update={"macro": 1})}
        ),
    )
    plain = hinted_worlds(draws, config)
    assert (shown[0].x.shape[2], plain[0].x.shape[2]) == (2, 1)
    for expert in fixed_experts():
        expert.start(shown[0], range(260))
        wanted = expert.decide(np.array([100]), None)  # type: ignore[arg-type]
        expert.start(plain[0], range(260))
        np.testing.assert_array_equal(wanted, expert.decide(np.array([100]), None))  # type: ignore[arg-type]
    assert isinstance(forms["steady"], RegimeMarket)
