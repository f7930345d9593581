"""The configuration: one tree of frozen models, its loader and its secrets."""

from echelon.config.data import CacheConfig, DataConfig, ExogenousConfig, SyntheticConfig
from echelon.config.features import (
    FeaturesConfig,
    IndicatorsConfig,
    NormalizationConfig,
    StationaryConfig,
)
from echelon.config.load import (
    fingerprint,
    load_config,
    load_run_config,
    override_config,
    refuse_places,
    to_yaml,
    user_code,
)
from echelon.config.tree import Config, SplitConfig

__all__ = [
    "CacheConfig",
    "Config",
    "DataConfig",
    "ExogenousConfig",
    "FeaturesConfig",
    "IndicatorsConfig",
    "NormalizationConfig",
    "SplitConfig",
    "StationaryConfig",
    "SyntheticConfig",
    "fingerprint",
    "load_config",
    "load_run_config",
    "override_config",
    "refuse_places",
    "to_yaml",
    "user_code",
]
