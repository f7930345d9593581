"""What of a configuration evolves, and with what settings nothing could be learned.

Read before anything is done, so that a configuration can be checked without a learner's libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from echelon.agents.mfpbt import PopulationPlan, Range
from echelon.config import Config
from echelon.errors import ConfigError
from echelon.rng import stream

_SPREAD = 2.0  # founders of a niche beyond the first begin with up to this factor more or less


class _Tuned(NamedTuple):
    """A hyperparameter that may evolve; router: the router's; of_rest: factors act on 1 − value."""

    key: str
    value: Callable[[Config], float]
    enabled: Callable[[Config], bool] = lambda _: True
    router: bool = False
    of_rest: bool = False


# A weight or a λ of 0 is a switch, and an entropy that is not aimed at has no target: those do not
# evolve. lr: the actor's; the critics' rate keeps its ratio to it.
_TUNED = {
    "lr": _Tuned("train.lr_actor", lambda c: c.train.lr_actor),
    "target_entropy": _Tuned(
        "expert.target_entropy",
        lambda c: c.expert.target_entropy,
        lambda c: c.expert.entropy == "auto",
    ),
    "mi_reward_weight": _Tuned(
        "experts.mi_reward_weight",
        lambda c: c.experts.mi_reward_weight,
        lambda c: c.experts.mi_reward_weight != 0.0,
    ),
    "gamma": _Tuned("train.gamma", lambda c: c.train.gamma, of_rest=True),
    "router_lr": _Tuned("meta_router.lr", lambda c: c.meta_router.lr, router=True),
    "kl_lambda": _Tuned(
        "meta_router.kl_lambda",
        lambda c: c.meta_router.kl_lambda,
        lambda c: c.meta_router.kl_lambda > 0.0,
        router=True,
    ),
}
"""By the name of their bounds in `trainer.evolution`."""


def router_space(config: Config) -> dict[str, Range]:
    """The router's hyperparameters that evolve, with their bounds; none without evolution."""
    if not config.trainer.evolution.enabled:
        return {}
    return {name: _bounds(config, name) for name in config_values(config, router=True)}


def refuse_outside(config: Config) -> None:
    """Raise where evolution would begin outside its own bounds: it would change what was set."""
    if not config.trainer.evolution.enabled:
        return
    for name, value in (config_values(config) | config_values(config, router=True)).items():
        bounds = _bounds(config, name)
        if not bounds.low <= value <= bounds.high:
            raise ConfigError(
                f"{_TUNED[name].key} = {value:g} is outside of trainer.evolution.{name} = "
                f"[{bounds.low:g}, {bounds.high:g}], within which it evolves. Change either, or "
                "turn evolution off (trainer.evolution.enabled: false)."
            )


def config_values(config: Config, *, router: bool = False) -> dict[str, float]:
    return {
        name: tuned.value(config)
        for name, tuned in _TUNED.items()
        if tuned.router == router and tuned.enabled(config)
    }


def _bounds(config: Config, name: str) -> Range:
    low, high = getattr(config.trainer.evolution, name)
    if name == "kl_lambda":  # λ adapts, up to this
        most = config.meta_router.kl_lambda_max
        low, high = min(low, most), min(high, most)
    return Range(low, high, of_rest=_TUNED[name].of_rest)


def plan_of(config: Config) -> PopulationPlan:
    """The population's form; without evolution each value is bound to the configuration's."""
    wanted, values = config.trainer.evolution, config_values(config)
    space = {
        name: _bounds(config, name) if wanted.enabled else Range(value, value)
        for name, value in values.items()
    }
    return PopulationPlan(config.experts.n_experts, wanted.members_per_niche, wanted.paces, space)


def founders(config: Config, plan: PopulationPlan, seed: int) -> list[dict[str, float]]:
    """Hyperparameters[M] to begin with: the configuration's, brought inside the bounds.

    Those of a niche's first member; the others' are ×½ to ×2 of them, by lot.
    """
    values = {
        name: min(max(value, plan.space[name].low), plan.space[name].high)
        for name, value in config_values(config).items()
    }
    chosen = [dict(values) for _ in range(plan.members)]
    for member, name in product(range(plan.members), values):
        if member % plan.per_niche:
            factor = _SPREAD ** stream(seed, "founder", member, name).uniform(-1.0, 1.0)
            chosen[member][name] = plan.space[name].times(values[name], factor)
    return chosen


def refuse_hierarchy(config: Config) -> None:
    """Raise where nothing could be learned, or where evolution could not begin."""
    refuse_outside(config)
    trainer, expert, length = config.trainer, config.expert, _length(config)
    steps = trainer.training_schedule.experts.steps
    if steps * expert.updates_per_step < 1:
        raise ConfigError(
            f"trainer.training_schedule.experts.steps = {steps:,} at expert.updates_per_step = "
            f"{expert.updates_per_step:g} is less than one update. Take more of either."
        )
    if length > expert.batch_size:
        raise ConfigError(
            f"experts.sharing.sequence_steps = {length} is more than a batch (expert.batch_size = "
            f"{expert.batch_size})."
        )
    if trainer.round_steps < config.train.books:
        raise ConfigError(
            f"trainer.round_steps = {trainer.round_steps:,} is less than one bar of train.books = "
            f"{config.train.books:,} books. Take more steps or fewer books."
        )
    members = plan_of(config).members
    _refuse_sharing(config, members)
    _refuse_schedule(config, members)


def _refuse_sharing(config: Config, members: int) -> None:
    """Of a replay from which no sequence could be drawn."""
    sharing, books, length = config.experts.sharing, config.train.books, _length(config)
    sequence = f"a sequence of {length} steps (experts.sharing.sequence_steps)"
    each, least = sharing.buffer_size // members, length * books
    if each < least:
        raise ConfigError(
            f"experts.sharing.buffer_size = {sharing.buffer_size:,} gives each of {members} "
            f"members of the population {each:,} steps, less than {sequence} of each of "
            f"train.books = {books:,} books. Take at least {least * members:,}."
        )
    own = round(sharing.own_share * max(1, config.expert.batch_size // length))
    if sharing.enabled and own and sharing.fresh_steps < least:
        raise ConfigError(
            f"experts.sharing.fresh_steps = {sharing.fresh_steps:,} holds less than {sequence} of "
            f"each of train.books = {books:,} books. Take at least {least:,}."
        )
    episode = config.train.episode_steps
    if episode is not None and episode < length:
        raise ConfigError(
            f"train.episode_steps = {episode:,} is less than {sequence}. Take longer episodes or "
            "shorter sequences."
        )


def _refuse_schedule(config: Config, members: int) -> None:
    """Of a training that ends before experts or router have learned anything."""
    train, meta, schedule = config.train, config.meta_router, config.trainer.training_schedule
    bars = -(-config.trainer.round_steps // train.books)
    rollouts = -(-schedule.router.steps // meta.n_steps)
    routed = rollouts * meta.n_steps * meta.every_bars

    def steps_before(round_: int) -> int:
        collected = (round_ - 1) * bars * train.books * members
        return collected + (round_ - 1) // schedule.router.freq * routed

    every, starts = schedule.experts.freq, config.expert.learning_starts
    first = -(-starts // (bars * train.books * every)) * every
    pace = "trainer.training_schedule.{}.freq = {:,}".format
    experts_keys = f"expert.learning_starts = {starts:,}, {pace('experts', every)}"
    router_every = schedule.router.freq
    for who, round_, keys in (
        ("the experts learn", first, experts_keys),
        ("the router learns", router_every, pace("router", router_every)),
    ):
        if steps_before(round_) >= train.total_env_steps:
            raise ConfigError(
                f"train.total_env_steps = {train.total_env_steps:,} ends before {who} for the "
                f"first time, in round {round_:,} ({keys}). Train for more than "
                f"{steps_before(round_):,} steps, or begin earlier."
            )
    if first * bars < _length(config):
        raise ConfigError(
            f"experts.sharing.sequence_steps = {_length(config)} is more than the {first * bars} "
            f"bars that each book has behind it when the experts first learn, in round {first} "
            f"(trainer.round_steps = {config.trainer.round_steps:,}, expert.learning_starts = "
            f"{starts:,}). Take shorter sequences, or more of either."
        )


def _length(config: Config) -> int:
    return config.experts.sharing.sequence_steps
