"""An ablation: train every variant of a base configuration and compare them on validation.

    DIR/base.yaml             the base configuration
    DIR/ablation.json         the variants, for going on later
    DIR/variants/NAME/        a run directory like any other
    DIR/ablation.csv, .parquet, .png    the result

Variants are prepared, trained and evaluated by `evaluation.batch`, on the validation window. The
test window is never traded: who chooses by it has none left. `summarise` then gives mean and
standard deviation over seeds, and the difference to the base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from echelon.config import Config, fingerprint
from echelon.evaluation.batch import (
    Batch,
    Course,
    Kind,
    Member,
    evaluation_of,
    reading,
    saved_base,
    write_table,
)
from echelon.evaluation.variants import Setting, Variant, variant_configs
from echelon.ops.measures import LABELS, mean_std

KIND = Kind(
    title="an ablation",
    command="ablate",
    member="variant",
    split="valid",
    trust=False,
    results=("ablation.csv", "ablation.parquet", "ablation.png"),
)


@dataclass(frozen=True)
class Ablation:
    """Variants of a base, the first of which is the base itself, and their runs."""

    variants: tuple[Variant, ...]
    batch: Batch

    @staticmethod
    def of(directory: Path, base: Config, variants: Sequence[Variant]) -> Ablation:
        """The ablation of these variants; raises where the configuration of one is no good."""
        members = tuple(
            Member(v.name, config, {"variant": v.name, "factor": v.factor, "value": v.value})
            for v, config in zip(variants, variant_configs(base, variants), strict=True)
        )
        return Ablation(tuple(variants), Batch(KIND, directory, base, members))

    @staticmethod
    def open(
        directory: Path, *, seeds: int | None = None, trust_code: Sequence[Path] = ()
    ) -> Ablation:
        """Go on with the one in a directory.

        seeds: another number of them than before; trust_code: files of code that may run
        """
        with reading(KIND, directory) as tree:
            variants = [
                Variant(
                    entry["name"],
                    tuple(Setting(*pair) for pair in entry["settings"]),
                    tuple(entry["overrides"]),
                )
                for entry in tree["variants"]
            ]
        return Ablation.of(directory, saved_base(directory, seeds, trust_code), variants)

    def save(self) -> None:
        """Write down what is to be done."""
        variants = [
            {"name": v.name, "settings": v.settings, "overrides": v.overrides}
            for v in self.variants
        ]
        self.batch.save({"variants": variants})


@dataclass(frozen=True)
class VariantResult:
    """What a variant came to.

    seeds: measures by seed, as in `Measures`; empty where no training ended
    problem: what went wrong, empty if nothing did
    """

    variant: Variant
    config_hash: str
    seeds: Mapping[int, Mapping[str, float]]
    problem: str

    def values(self, measure: str) -> list[float]:
        """A measure of each seed."""
        return [values[measure] for values in self.seeds.values()]


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
        """Mean of a measure less the base's; NaN where either has none."""
        if not row.seeds or not self.base.seeds:
            return math.nan
        return mean_std(row.values(measure)).mean - mean_std(self.base.values(measure)).mean

    def frame(self) -> pl.DataFrame:
        """One line per variant: mean, std (ddof 1, over seeds) and difference of every measure."""
        return pl.DataFrame([self._line(row) for row in self.rows], infer_schema_length=None)

    def _line(self, row: VariantResult) -> dict[str, object]:
        line: dict[str, object] = {
            "variant": row.variant.name,
            "factor": row.variant.factor,
            "value": row.variant.value,
            "seeds": len(row.seeds),
            "problem": row.problem,
        }
        for measure in LABELS:
            found = mean_std(row.values(measure)) if row.seeds else (math.nan, math.nan)
            line[f"{measure}_mean"], line[f"{measure}_std"] = map(_or_none, found)
            line[f"{measure}_diff"] = _or_none(self.difference(row, measure))
        line["overrides"] = "; ".join(row.variant.overrides)
        line["config_hash"] = row.config_hash
        return line

    def write(self, directory: Path) -> None:
        """Write ablation.csv and ablation.parquet."""
        write_table(self.frame(), directory / "ablation")


def summarise(ablation: Ablation, course: Course) -> AblationResult:
    """Gather the variants' evaluations."""
    rows, facts = [], {}
    for k, variant in enumerate(ablation.variants):
        seeds: Mapping[int, Mapping[str, float]] = {}
        evaluation = evaluation_of(ablation.batch, course, k)
        if evaluation is not None:
            seeds, facts = evaluation.seeds, dict(evaluation.facts)
        digest = fingerprint(ablation.batch.members[k].config)
        rows.append(VariantResult(variant, digest, seeds, course.problem(k)))
    return AblationResult(ablation.batch.directory.name, tuple(rows), facts)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
