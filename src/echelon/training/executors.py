"""From the configuration to an executor in a world: `market.executor` and what goes with it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, time

import numpy as np

from echelon.config import Config
from echelon.data.store import Store
from echelon.envs.world import World
from echelon.errors import ConfigError, StoreError, UniverseError
from echelon.execution.days import Days
from echelon.execution.extensions import load_extensions
from echelon.execution.features import FEATURES, public_features
from echelon.execution.loading import load_days
from echelon.execution.policies import ExecutionPolicy
from echelon.execution.portfolio import (
    ImmediateBeside,
    IntradayExecutor,
    align_days,
    execution_rules,
    take_days,
    ticks_in,
)
from echelon.execution.schedules import Twap, VolumeProfile, Vwap
from echelon.features.scaler import Scaler
from echelon.files import blaming


def with_executor(world: World, config: Config, *, costs: float = 1.0) -> World:
    """The world with the configuration's executor in it.

    Where that is immediate: the world itself, or with a dataset of intraday bars one that fills in
    the same way and tells what the fills cost against the day's TWAP and VWAP.
    costs: as in `world_of`; what execution costs by its own keys is multiplied, too
    """
    market = config.market
    if market.executor == "immediate" and market.executor_dataset is None:
        return world
    days, basis = _load(world, config)
    aligned = align_days(
        days,
        world.rows,
        world.times,
        world.symbols,
        # What is adjusted is so at some anchor, and the two need not have the same.
        same_prices=basis == world.ledger["prices"] != "adjusted",
        price_limits=world.rules.price_limits,
    )
    if market.executor == "immediate":
        return replace(world, executor=ImmediateBeside(aligned))
    rules = execution_rules(
        world.rules,
        ticks_in(days, market.executor_step_minutes),
        half_spread=_share(market.executor_spread_bps, costs),
        temporary=_share(market.executor_impact_bps, costs),
        permanent=market.executor_permanent_bps / 1e4 * costs,
    )
    policy = _policy(days, world, config, rules.ticks_per_step)
    executor = IntradayExecutor(aligned, policy, rules, whole=market.executor == "learned")
    fill = f"worked through the next day by {executor.name}, every {rules.ticks_per_step} ticks"
    return replace(world, executor=executor, ledger={**world.ledger, "fill": fill})


def verify_days(configs: Iterable[Config]) -> None:
    """Verify the bars that executors fill with in training, so that no worker process need.

    Of what is damaged, whoever trades on it says so.
    """
    for config in configs:
        name = config.market.executor_dataset
        if name is not None:
            first, last = config.split.train[0], config.split.valid[1]
            with suppress(StoreError):
                Store(config.data.store).verify(
                    name, datetime.combine(first, time.min), datetime.combine(last, time.max)
                )


def _share(basis_points: float | None, costs: float) -> float | None:
    return None if basis_points is None else basis_points / 1e4 * costs


def _load(world: World, config: Config) -> tuple[Days, str]:
    """(days of the world's dates, basis of their prices)."""
    name = config.market.executor_dataset
    assert name is not None, "the configuration checks that it is there"
    store = Store(config.data.store)
    manifest = store.manifest(name)
    have = set(store.symbols(name)["symbol"])
    symbols = [symbol for symbol in world.symbols if symbol in have]
    if not symbols:
        raise UniverseError(
            f"market.executor_dataset {name!r} has none of the portfolio's symbols "
            f"({', '.join(world.symbols[:5])}); it has {', '.join(sorted(have)[:5])}. Name a "
            "dataset with intraday bars of the same symbols."
        )
    first, last = (t.astype("datetime64[D]").item() for t in world.times[[0, -1]])
    days = load_days(store, name, symbols, first, last, price_source=config.market.executor_price)
    return days, manifest.info.price_basis


def _policy(days: Days, world: World, config: Config, ticks_per_step: int) -> ExecutionPolicy:
    market = config.market
    if market.executor == "twap":
        return Twap()
    if market.executor == "vwap":
        rows = world.splits["train"]
        train = np.isin(
            days.dates.astype("datetime64[D]"),
            world.times[rows.start : rows.stop].astype("datetime64[D]"),
        )
        if not train.any():
            raise ConfigError(
                "market.executor is 'vwap', whose volume profile is that of the train days, but "
                f"{market.executor_dataset!r} has none of them. Import bars of split.train too, "
                "or use 'twap'."
            )
        return Vwap(VolumeProfile.fit(take_days(days, train)))
    return _learned(days, config, ticks_per_step)


def _learned(days: Days, config: Config, ticks_per_step: int) -> ExecutionPolicy:
    """The stored policy, with the public features of these days.

    `facts.scaler` of the file has what they were scaled with in training (`Scaler.to_dict`), or
    null where they were not; `facts.rules`, where it is there, begins with the ticks of a step.
    """
    # The learners of execution need seconds to import.
    from echelon.agents.execution.files import load_policy
    from echelon.agents.execution.policy import LearnedPolicy

    path = config.market.executor_policy
    assert path is not None, "the configuration checks that it is there"
    stored = load_policy(path)
    if "scaler" not in stored.facts:
        raise StoreError(
            f"{path}: its facts have no 'scaler', expected what the features were scaled with in "
            "training, or null. Train the policy again with `echelon execution train`."
        )
    again = "Train the policy again with `echelon execution train`."
    with blaming(path, again):
        trained = stored.facts.get("rules", [ticks_per_step])[0]
        given = stored.facts["scaler"]
        scaler = None if given is None else Scaler.from_dict(given)
    if trained != ticks_per_step:
        raise ConfigError(
            f"{path} learned to decide every {trained} ticks, but market.executor_step_minutes is "
            f"{config.market.executor_step_minutes:g}, which is {ticks_per_step} ticks of "
            f"{config.market.executor_dataset!r}. Set it to {trained} ticks, or train another."
        )
    # A policy may have been trained with features of the user's own.
    # Files that it needs nothing of are not run.
    execution = config.execution
    files = execution.extensions if set(stored.features) - set(FEATURES) else ()
    names, own = load_extensions(files, execution.run_code).chosen(stored.features)
    public = public_features(days, own, scaler, names=names)
    return LearnedPolicy(stored.net, public)
