"""What an ablation compares: variants of a base configuration.

A variant is a name and a list of overrides. There are three ways to a list of them:

- `one_at_a_time`: seed 003's matrix, each factor moved alone away from the base (the default);
- `full_grid`: every combination of the matrix's levels and the base's own;
- `read_variants`: whatever a YAML file says, name → list of `key=value`.

The base itself is always the first variant, and no other variant equals it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from echelon.config import Config, override_config
from echelon.config.yaml_reader import read_yaml
from echelon.errors import ConfigError

BASE = "base"

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,150}")
_INDICATORS = (
    "{sma: [10, 20, 50], ema: [12, 26], rsi: [14], macd: [12, 26, 9], atr: [14], "
    "bbands: [20, 2.0], ichimoku: [9, 26, 52], heikin_ashi: true, supertrend: [10, 3.0]}"
)


class Setting(NamedTuple):
    """What a variant changes: a factor (or a key of the configuration) and its value."""

    factor: str
    value: str


@dataclass(frozen=True)
class Variant:
    """A named set of overrides. settings: where it differs from the base; empty for the base."""

    name: str
    settings: tuple[Setting, ...]
    overrides: tuple[str, ...]

    @property
    def factor(self) -> str:
        """What it changes."""
        return " + ".join(setting.factor for setting in self.settings) or BASE

    @property
    def value(self) -> str:
        """What it changes it to."""
        return " + ".join(setting.value for setting in self.settings)


class Level(NamedTuple):
    """One value of a factor."""

    value: str
    overrides: tuple[str, ...]


def _features(indicators: str) -> tuple[str, ...]:
    """OHLCV and these indicators, and no other feature."""
    return (
        *("features.ohlcv=true", f"features.indicators={indicators}"),
        *("features.stationary.enabled=false", "features.modules=[]", "features.custom=[]"),
        "data.exogenous=[]",
    )


MATRIX: dict[str, tuple[Level, ...]] = {
    "window": tuple(Level(str(w), (f"window={w}",)) for w in (20, 30, 60)),
    "features": (
        Level("indicators", _features(_INDICATORS)),
        Level("ohlcv", _features("{}")),
    ),
    "encoder": tuple(Level(e, (f"model.encoder={e}",)) for e in ("TimeCNN", "Transformer")),
    "reward": tuple(Level(r, (f"reward.kind={r}",)) for r in ("return", "log_return")),
    "rule": (
        Level("20-50", ("buy_pct=0.2", "sell_pct=0.5")),
        Level("10-30", ("buy_pct=0.1", "sell_pct=0.3")),
    ),
    "entropy": tuple(Level(e, (f"train.entropy_coef={e}",)) for e in ("0", "0.05")),
}
"""Seed 003's section 7."""


class Choice(NamedTuple):
    """A factor around a base: the base's own value, and the levels that differ from it."""

    factor: str
    own: str
    others: tuple[Level, ...]


def choices(base: Config) -> list[Choice]:
    """The matrix as seen from `base`."""
    written = {
        "window": str(base.window),
        "features": "own",
        "encoder": base.model.encoder,
        "reward": base.reward.kind,
        "rule": f"{base.buy_pct * 100:g}-{base.sell_pct * 100:g}",
        "entropy": f"{base.train.entropy_coef:g}",
    }
    found = []
    for factor, levels in MATRIX.items():
        same = [level for level in levels if _same(base, level)]
        own = same[0].value if same else written[factor]
        found.append(Choice(factor, own, tuple(level for level in levels if level not in same)))
    return found


def _same(base: Config, level: Level) -> bool:
    changed = override_config(base, level.overrides)
    # "auto" and false are one thing where other features are asked for.
    if base.features.wants_stationary == changed.features.wants_stationary:
        stationary = {"stationary": base.features.stationary}
        changed = changed.model_copy(
            update={"features": changed.features.model_copy(update=stationary)}
        )
    return changed == base


def one_at_a_time(base: Config) -> list[Variant]:
    """The base, and each level of the matrix that differs from it, alone."""
    alone = [
        Variant(
            _name(choice.factor, level), (Setting(choice.factor, level.value),), level.overrides
        )
        for choice in choices(base)
        for level in choice.others
    ]
    return [Variant(BASE, (), ()), *alone]


def full_grid(base: Config) -> list[Variant]:
    """Every combination of the levels of the matrix and the base's own, the base first."""
    axes = [
        [(choice.factor, None), *((choice.factor, level) for level in choice.others)]
        for choice in choices(base)
    ]
    variants = []
    for combination in itertools.product(*axes):
        moved = [(factor, level) for factor, level in combination if level is not None]
        variants.append(
            Variant(
                "+".join(_name(factor, level) for factor, level in moved) or BASE,
                tuple(Setting(factor, level.value) for factor, level in moved),
                tuple(item for _, level in moved for item in level.overrides),
            )
        )
    return variants


def read_variants(path: Path) -> list[Variant]:
    """The base, and the variants of a YAML file, in its order."""
    variants = [Variant(BASE, (), ())]
    for name, items in read_yaml(path).items():
        if not isinstance(name, str) or not _SAFE_NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: {name!r} cannot name a variant, which names a directory. Use letters, "
                "digits, '.', '_', '+', '=' and '-', in quotes if it looks like a number."
            )
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ConfigError(
                f"{path}: variant {name!r}: expected a list of key=value, such as "
                f"[model.d_model=64, train.gamma=0.9], found {items!r}."
            )
        if name == BASE and items:
            raise ConfigError(
                f"{path}: variant {BASE!r} is the configuration itself and changes nothing. Choose "
                "another name."
            )
        if name != BASE:
            pairs = [item.partition("=") for item in items]
            settings = tuple(Setting(key.strip(), value.strip()) for key, _, value in pairs)
            variants.append(Variant(name, settings, tuple(items)))
    if len(variants) == 1:
        raise ConfigError(f"{path}: no variant in it. Write name: [key=value, …], one a line.")
    return variants


def unlike_base(base: Config, variants: Sequence[Variant]) -> list[Variant]:
    """The base, and the variants that are not the same as it.

    A file of levels serves several bases, each of which has one of the levels already.
    """
    return [v for k, v in enumerate(variants) if k == 0 or _applied(base, v) != base]


def variant_configs(base: Config, variants: Sequence[Variant]) -> list[Config]:
    """The configuration of each variant; the first mistake in one is raised with its name.

    Variants are compared on one validation window and on the same seeds, and no two are the same.
    """
    configs: list[Config] = []
    for variant in variants:
        config = _applied(base, variant)
        for key, mine, theirs in (
            ("split.valid", config.split.valid, base.split.valid),
            ("seed", config.seed, base.seed),
            ("train.seeds", config.train.seeds, base.train.seeds),
        ):
            if mine != theirs:
                raise ConfigError(
                    f"variant {variant.name!r} changes {key}: variants are compared on one "
                    "validation window and on the same seeds. Change it for all, with -o."
                )
        if config in configs:
            twin = variants[configs.index(config)].name
            raise ConfigError(
                f"variant {variant.name!r} is the same configuration as {twin!r}. Leave one out."
            )
        configs.append(config)
    return configs


def _applied(base: Config, variant: Variant) -> Config:
    try:
        return override_config(base, variant.overrides)
    except ConfigError as error:
        raise ConfigError(f"variant {variant.name!r}: {error}") from None


def _name(factor: str, level: Level) -> str:
    return f"{factor}-{level.value}".lower()
