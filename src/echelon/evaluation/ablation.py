"""An ablation: train every variant of a base configuration and compare them on validation.

    DIR/base.yaml             the base configuration
    DIR/ablation.json         the variants, for going on later
    DIR/variants/NAME/        a run directory like any other
    DIR/ablation.csv, .parquet, .png    the result

Variants, names with overrides, come from the matrix of design note 003 (`one_at_a_time`,
`full_grid`) or from a YAML file (`read_variants`). The base itself is always the first, and no
other one equals it. They are prepared, trained and evaluated by `evaluation.batch`, on the
validation window. The test window is never traded: who chooses by it has none left.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from echelon.config import Config, fingerprint, override_config
from echelon.config.yaml_reader import read_yaml
from echelon.errors import ConfigError
from echelon.evaluation.batch import (
    BatchMember,
    Course,
    MeasuredRow,
    RunBatch,
    evaluations_of,
    write_table,
)
from echelon.files import finite_values

BASE = "base"

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,150}")
_INDICATORS = (
    "{sma: [10, 20, 50], ema: [12, 26], rsi: [14], macd: [12, 26, 9], atr: [14], "
    "bbands: [20, 2.0], ichimoku: [9, 26, 52], heikin_ashi: true, supertrend: [10, 3.0]}"
)


class VariantSetting(NamedTuple):
    """What a variant changes: a factor (or a key of the configuration) and its value."""

    factor: str
    value: str


@dataclass(frozen=True)
class Variant:
    """A named set of overrides. settings: where it differs from the base; empty for the base."""

    name: str
    settings: tuple[VariantSetting, ...]
    overrides: tuple[str, ...]

    @property
    def factor(self) -> str:
        return " + ".join(setting.factor for setting in self.settings) or BASE

    @property
    def value(self) -> str:
        return " + ".join(setting.value for setting in self.settings)


class FactorLevel(NamedTuple):
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


MATRIX: dict[str, tuple[FactorLevel, ...]] = {
    "window": tuple(FactorLevel(str(w), (f"window={w}",)) for w in (20, 30, 60)),
    "features": (
        FactorLevel("indicators", _features(_INDICATORS)),
        FactorLevel("ohlcv", _features("{}")),
    ),
    "encoder": tuple(FactorLevel(e, (f"model.encoder={e}",)) for e in ("TimeCNN", "Transformer")),
    "reward": tuple(FactorLevel(r, (f"reward.kind={r}",)) for r in ("return", "log_return")),
    "rule": (
        FactorLevel("20-50", ("buy_pct=0.2", "sell_pct=0.5")),
        FactorLevel("10-30", ("buy_pct=0.1", "sell_pct=0.3")),
    ),
    "entropy": tuple(FactorLevel(e, (f"train.entropy_coef={e}",)) for e in ("0", "0.05")),
}
"""Section 7 of design note 003."""


class Choice(NamedTuple):
    """A factor around a base: the base's own value, and the levels that differ from it."""

    factor: str
    own: str
    others: tuple[FactorLevel, ...]


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
    factors = []
    for factor, levels in MATRIX.items():
        same = [level for level in levels if _is_in(base, level)]
        own = same[0].value if same else written[factor]
        others = tuple(level for level in levels if level not in same)
        factors.append(Choice(factor, own, others))
    return factors


def _is_in(base: Config, level: FactorLevel) -> bool:
    changed = override_config(base, level.overrides)
    features = changed.features
    # "auto" and false are one thing where other features are asked for.
    if base.features.wants_stationary == features.wants_stationary:
        features = features.model_copy(update={"stationary": base.features.stationary})
    return changed.model_copy(update={"features": features}) == base


def _variant(moved: Sequence[tuple[str, FactorLevel]]) -> Variant:
    """Factors moved away from the base, each to a level; the base where none is."""
    return Variant(
        "+".join(f"{factor}-{level.value}".lower() for factor, level in moved) or BASE,
        tuple(VariantSetting(factor, level.value) for factor, level in moved),
        tuple(item for _, level in moved for item in level.overrides),
    )


def one_at_a_time(base: Config) -> list[Variant]:
    """The base, and each level of the matrix that differs from it, alone."""
    moves = [(choice.factor, level) for choice in choices(base) for level in choice.others]
    return [_variant([]), *(_variant([move]) for move in moves)]


def full_grid(base: Config) -> list[Variant]:
    """Every combination of the levels of the matrix and the base's own, the base first."""
    axes = [[None, *((factor, level) for level in others)] for factor, _, others in choices(base)]
    return [_variant([move for move in moves if move]) for moves in itertools.product(*axes)]


def read_variants(path: Path) -> list[Variant]:
    """The base, and the variants of a YAML file, in its order."""
    variants = [_variant([])]
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
            settings = tuple(VariantSetting(key.strip(), value.strip()) for key, _, value in pairs)
            variants.append(Variant(name, settings, tuple(items)))
    if len(variants) == 1:
        raise ConfigError(f"{path}: no variant in it. Write name: [key=value, …], one a line.")
    return variants


def unlike_base(base: Config, variants: Sequence[Variant]) -> list[Variant]:
    """The base, and the variants that differ from it: a file of levels serves several bases."""
    return [v for k, v in enumerate(variants) if k == 0 or _apply(base, v) != base]


def variant_configs(base: Config, variants: Sequence[Variant]) -> list[Config]:
    """The configuration of each variant, no two alike; window and seeds are the base's."""
    configs: list[Config] = []
    for variant in variants:
        config = _apply(base, variant)
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


def _apply(base: Config, variant: Variant) -> Config:
    try:
        return override_config(base, variant.overrides)
    except ConfigError as error:
        raise ConfigError(f"variant {variant.name!r}: {error}") from None


@dataclass(frozen=True)
class Ablation(RunBatch):
    noun = stem = "ablation"
    command = "ablate"
    member = "variant"
    results = ("ablation.csv", "ablation.parquet", "ablation.png")
    planned = ("variants",)

    variants: tuple[Variant, ...]

    def make_members(self) -> Iterator[BatchMember]:
        configs = variant_configs(self.base, self.variants)
        for v, config in zip(self.variants, configs, strict=True):
            about = {"variant": v.name, "factor": v.factor, "value": v.value}
            yield BatchMember(v.name, config, about)

    def summarise(self, course: Course) -> AblationResult:
        evaluations = evaluations_of(self, course)
        rows = [
            VariantResult(
                name=variant.name,
                variant=variant,
                seeds=evaluations[variant.name].seeds if variant.name in evaluations else {},
                config_hash=fingerprint(self.members[k].config),
                problem=course.problem(k),
            )
            for k, variant in enumerate(self.variants)
        ]
        facts = [dict(evaluation.facts) for evaluation in evaluations.values()]
        return AblationResult(self.directory.name, tuple(rows), facts[-1] if facts else {})


@dataclass(frozen=True, kw_only=True)
class VariantResult(MeasuredRow):
    variant: Variant


@dataclass(frozen=True)
class AblationResult:
    """Every variant's result, the base's first. facts: of the window they were compared on."""

    name: str
    rows: tuple[VariantResult, ...]
    facts: Mapping[str, Any]

    @property
    def base(self) -> VariantResult:
        """The one the others are compared with."""
        return self.rows[0]

    def difference(self, row: VariantResult, measure: str) -> float:
        """Mean of a measure minus the base's; NaN where either has none."""
        return row.over_seeds(measure).mean - self.base.over_seeds(measure).mean

    def frame(self) -> pl.DataFrame:
        """One line per variant: mean, std (ddof 1, over seeds) and difference of every measure."""
        lines = []
        for row in self.rows:
            values = row.columns(diff=partial(self.difference, row))
            line = {
                "variant": row.name,
                "factor": row.variant.factor,
                "value": row.variant.value,
                "seeds": len(row.seeds),
                "problem": row.problem,
                **finite_values(values),
                "overrides": "; ".join(row.variant.overrides),
                "config_hash": row.config_hash,
            }
            lines.append(line)
        return pl.DataFrame(lines, infer_schema_length=None)

    def write(self, directory: Path) -> None:
        write_table(self.frame(), directory / "ablation")
