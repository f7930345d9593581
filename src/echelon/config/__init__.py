"""The configuration: one tree of frozen models, its loader and its secrets."""

from echelon.config.data import DataConfig, SyntheticConfig
from echelon.config.features import FeaturesConfig
from echelon.config.load import (
    fingerprint,
    load_config,
    load_run_config,
    override_config,
    refuse_places,
    to_yaml,
    user_code,
)
from echelon.config.tree import Config

__all__ = [
    "Config",
    "DataConfig",
    "FeaturesConfig",
    "SyntheticConfig",
    "fingerprint",
    "load_config",
    "load_run_config",
    "override_config",
    "refuse_places",
    "to_yaml",
    "user_code",
]
