"""Settings that a hierarchy cannot be trained with."""

from __future__ import annotations

from echelon.config import Config
from echelon.errors import ConfigError


def refuse_settings(config: Config) -> None:
    """Raise where nothing could be learned."""
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
