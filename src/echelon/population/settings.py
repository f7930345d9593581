"""Settings that a hierarchy cannot be trained with: said before anything is done."""

from __future__ import annotations

from echelon.config import Config
from echelon.errors import ConfigError
from echelon.population.evolution import plan_of, refuse_outside


def refuse_settings(config: Config) -> None:
    """Raise where nothing could be learned, or where evolution could not begin."""
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
