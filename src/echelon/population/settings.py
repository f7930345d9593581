"""What of a configuration evolves, and with what settings nothing could be learned.

Read before anything is done, so that a configuration can be checked without a learner's libraries.
"""

from __future__ import annotations

from echelon.agents.mfpbt import Hyperparameters, PopulationPlan, Range
from echelon.config import Config
from echelon.errors import ConfigError
from echelon.rng import stream

_KEYS = {
    "lr": "train.lr_actor",
    "target_entropy": "expert.target_entropy",
    "mi_reward_weight": "experts.mi_reward_weight",
    "gamma": "train.gamma",
    "router_lr": "meta_router.lr",
    "kl_lambda": "meta_router.kl_lambda",
}
"""Of what evolves: where the configuration sets it."""
_SPREAD = 2.0
"""Founders of a niche beyond the first begin with up to this factor more or less."""


def space(config: Config) -> dict[str, Range]:
    """The hyperparameters of experts that evolve, with their bounds.

    Without evolution (`trainer.evolution.enabled`) each is bound to the configuration's value. A
    weight of the mutual-information reward that is 0 is a switch, and an entropy that is not aimed
    at has no target: neither evolves.
    """
    bounds = config.trainer.evolution
    values = _values(config)
    if not bounds.enabled:
        return {name: Range(value, value) for name, value in values.items()}
    ranges = {
        "lr": Range(*bounds.lr),
        "target_entropy": Range(*bounds.target_entropy),
        "mi_reward_weight": Range(*bounds.mi_reward_weight),
        "gamma": Range(*bounds.gamma, of_rest=True),
    }
    return {name: ranges[name] for name in values}


def router_space(config: Config) -> dict[str, Range]:
    """The router's hyperparameters that evolve, with their bounds; none without evolution.

    A λ of 0 is a switch and does not evolve; none exceeds `meta_router.kl_lambda_max`.
    """
    bounds, meta = config.trainer.evolution, config.meta_router
    if not bounds.enabled:
        return {}
    found = {"router_lr": Range(*bounds.router_lr)}
    if meta.kl_lambda > 0.0:
        low, high = (min(end, meta.kl_lambda_max) for end in bounds.kl_lambda)
        found["kl_lambda"] = Range(low, high)
    return found


def refuse_outside(config: Config) -> None:
    """Raise where evolution would begin outside its own bounds: it would change what was set."""
    if not config.trainer.evolution.enabled:
        return
    spaces = space(config) | router_space(config)
    for name, value in (_values(config) | router_values(config)).items():
        bounds = spaces.get(name)
        if bounds is None or bounds.low <= value <= bounds.high:
            continue
        raise ConfigError(
            f"{_KEYS[name]} = {value:g} is outside of trainer.evolution.{name} = [{bounds.low:g}, "
            f"{bounds.high:g}], within which it evolves. Change either, or turn evolution off "
            "(trainer.evolution.enabled: false)."
        )


def plan_of(config: Config) -> PopulationPlan:
    """The population's form."""
    wanted = config.trainer.evolution
    return PopulationPlan(
        niches=config.experts.n_experts,
        per_niche=wanted.members_per_niche,
        frequencies=wanted.paces,
        space=space(config),
    )


def founders(config: Config, plan: PopulationPlan, seed: int) -> list[Hyperparameters]:
    """Hyperparameters[M] to begin with: the configuration's, brought inside the bounds.

    Those of a niche's first member; the others' are ×½ to ×2 of them, by lot.
    """
    values = {
        name: min(max(value, plan.space[name].low), plan.space[name].high)
        for name, value in _values(config).items()
    }
    return [
        dict(values)
        if member % plan.per_niche == 0
        else {
            name: plan.space[name].times(
                value, _SPREAD ** stream(seed, "founder", member, name).uniform(-1.0, 1.0)
            )
            for name, value in values.items()
        }
        for member in range(plan.members)
    ]


def router_values(config: Config) -> dict[str, float]:
    """The configuration's values of the router's settings that may evolve."""
    return {"router_lr": config.meta_router.lr, "kl_lambda": config.meta_router.kl_lambda}


def _values(config: Config) -> dict[str, float]:
    """The configuration's values of what may evolve.

    lr: the actor's; the critics' rate keeps its ratio to it
    """
    values = {
        "lr": config.train.lr_actor,
        "target_entropy": config.expert.target_entropy,
        "mi_reward_weight": config.experts.mi_reward_weight,
        "gamma": config.train.gamma,
    }
    if config.expert.entropy != "auto":
        del values["target_entropy"]
    if config.experts.mi_reward_weight == 0.0:
        del values["mi_reward_weight"]
    return values


def refuse_hierarchy(config: Config) -> None:
    """Raise where a hierarchy would learn nothing, or where evolution could not begin."""
    refuse_outside(config)
    members = plan_of(config).members
    _refuse_updates(config)
    _refuse_sharing(config, members)
    _refuse_schedule(config, members)


def _refuse_updates(config: Config) -> None:
    schedule, trainer = config.trainer.training_schedule, config.trainer
    if schedule.experts.steps * config.expert.updates_per_step < 1:
        raise ConfigError(
            f"trainer.training_schedule.experts.steps = {schedule.experts.steps:,} at "
            f"expert.updates_per_step = {config.expert.updates_per_step:g} is less than one "
            "update. Take more of either."
        )
    if config.experts.sharing.sequence_steps > config.expert.batch_size:
        raise ConfigError(
            f"experts.sharing.sequence_steps = {config.experts.sharing.sequence_steps} is more "
            f"than a batch (expert.batch_size = {config.expert.batch_size})."
        )
    if trainer.round_steps < config.train.books:
        raise ConfigError(
            f"trainer.round_steps = {trainer.round_steps:,} is less than one bar of train.books = "
            f"{config.train.books:,} books. Take more steps or fewer books."
        )


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
    for who, round_, keys in (
        (
            "the experts learn",
            first,
            f"expert.learning_starts = {starts:,}, trainer.training_schedule.experts.freq = "
            f"{every:,}",
        ),
        (
            "the router learns",
            schedule.router.freq,
            f"trainer.training_schedule.router.freq = {schedule.router.freq:,}",
        ),
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
