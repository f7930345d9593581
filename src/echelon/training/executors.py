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
from echelon.execution.days import Days, load_days
from echelon.execution.features import FEATURES, load_extensions
from echelon.execution.policies import SCHEDULES, ExecutionPolicy, ScheduleInputs
from echelon.execution.portfolio import (
    ImmediateWithBenchmarks,
    IntradayExecutor,
    align_days,
    execution_rules,
    ticks_in,
)
from echelon.files import blaming


def with_executor(world: World, config: Config, *, costs: float = 1.0) -> World:
    """The world with the configuration's executor in it.

    Immediate: the world itself, or with intraday bars one that also reports what the fills cost
    against the day's TWAP and VWAP. costs: as in `world_of`, of what execution costs too
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
        return replace(world, executor=ImmediateWithBenchmarks(aligned))
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
    """Verify the bars of executors once; of what is damaged, whoever trades on it says so."""
    for config in configs:
        name = config.market.executor_dataset
        if name is not None:
            first = datetime.combine(config.split.train[0], time.min)
            last = datetime.combine(config.split.valid[1], time.max)
            with suppress(StoreError):
                Store(config.data.store).verify(name, first, last)


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
    """The schedule, or the stored policy that the configuration names."""
    if config.market.executor != "learned":
        rows = world.splits["train"]
        dates = world.times[rows.start : rows.stop].astype("datetime64[D]")
        train = np.isin(days.dates.astype("datetime64[D]"), dates)
        n_steps = -(-days.shape[1] // ticks_per_step)
        given = ScheduleInputs(days.take(train), n_steps, config.execution.kappa)
        return SCHEDULES[config.market.executor](given)
    # The learners of execution need seconds to import.
    from echelon.agents.execution.policy import load_execution_policy, policy_for_days

    path = config.market.executor_policy
    assert path is not None, "the configuration checks that it is there"
    stored = load_execution_policy(path)
    with blaming(path, "Train the policy again with `echelon execution train`."):
        # Where there are rules, they begin with the ticks of a step that it learned with.
        trained = stored.facts.get("rules", [ticks_per_step])[0]
    if trained != ticks_per_step:
        raise ConfigError(
            f"{path} learned to decide every {trained} ticks, but market.executor_step_minutes is "
            f"{config.market.executor_step_minutes:g}, which is {ticks_per_step} ticks of "
            f"{config.market.executor_dataset!r}. Set it to {trained} ticks, or train another."
        )
    # Files of the user's own features that the policy needs nothing of are not run.
    execution = config.execution
    files = execution.extensions if set(stored.features) - set(FEATURES) else ()
    return policy_for_days(path, stored, days, load_extensions(files, execution.run_code))
