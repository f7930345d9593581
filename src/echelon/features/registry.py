"""Which features a configuration asks for, how users add theirs, and how one is computed.

1. `select` turns a configuration into an ordered list of features and leaves out, by name, those
   that need a field the source does not have.
2. `load_modules` runs the user's Python files; each `@factor` in them becomes a feature.
3. `run` computes a feature on one symbol's bars and holds it to what it declared.

There is no global list of factors: a file's factors go to the call of `load_modules` that runs the
file, so two configurations in one process never see each other's.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from echelon.config.code import RunCode, line_in, read_user_file, run_user_file
from echelon.config.features import CrossSectionConfig, FeaturesConfig
from echelon.errors import FeatureError
from echelon.features.base import Bars, Compute, CrossSection, Feature, FeatureSpec, Field, Group
from echelon.features.indicators import shipped_features
from echelon.types import Floats


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A column that was asked for and cannot be computed, for want of the fields `missing`."""

    name: str
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} is left out: the source has no {', '.join(self.missing)}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The features of a configuration, in the order of their columns, and what was left out."""

    specs: tuple[FeatureSpec, ...]
    left_out: tuple[LeftOut, ...]


_collect: ContextVar[Callable[[Feature], None] | None] = ContextVar("_collect", default=None)
"""Takes the factors of the file that is being loaded."""


def factor(
    *,
    lookback: int,
    needs: Sequence[Field] = ("close",),
    names: Sequence[str] | None = None,
    group: Group = "custom",
    on_gap: Literal["carry", "zero"] = "carry",
) -> Callable[[Compute], Feature]:
    """Declare the function below as a feature; `features.base` has an example.

    lookback: bars up to and including the current one that the value needs; after them every
        value must be a finite number
    needs: the fields it reads, of open, high, low, close, volume, vwap, limits and time; each is an
        attribute of `bars` under that name, the others are None
    names: its columns, if there are several or the function's name will not do
    on_gap: what a day without a bar gets: the last value again ("carry") or "zero"

    Returns the Feature, which belongs to the file being loaded, if any. Its `compute` is the
    function, shown only the fields it declared, its failures turned into a FeatureError.
    """

    def declare(compute: Compute) -> Feature:
        function = cast(str, getattr(compute, "__name__", type(compute).__name__))
        if isinstance(needs, str) or not needs:
            raise FeatureError(
                f"factor {function!r}: needs is {needs!r}, expected fields such as ('close', "
                "'volume')."
            )
        columns, fields = (function,) if names is None else tuple(names), frozenset(needs)
        feature = Feature(columns, _guard(compute, fields), lookback, fields, group, on_gap)
        _check_declaration(function, feature)
        collect = _collect.get()
        if collect is not None:
            collect(feature)
        return feature

    return declare


def select(config: FeaturesConfig, fields: frozenset[str]) -> Selection:
    """Return the features `config` asks for that a source with `fields` can give.

    What compares symbols comes last.
    """
    shipped = shipped_features(config)
    names = _columns(shipped)
    for name in names:
        if names.count(name) > 1:
            raise FeatureError(
                f"feature {name!r} occurs twice. List each period once in `features`."
            )
    custom = _choose_factors(load_modules(config.modules, names, config.run_code), config.custom)
    kept: list[FeatureSpec] = []
    missing: dict[str, tuple[str, ...]] = {}
    for spec in sorted([*shipped, *custom], key=lambda spec: isinstance(spec, CrossSection)):
        if isinstance(spec, CrossSection):
            lacks = missing.get(spec.base, ())
        else:
            lacks = tuple(f for f in get_args(Field) if f in spec.needs and f not in fields)
        if lacks:
            missing.update(dict.fromkeys(column_names(spec), lacks))
        else:
            kept.append(spec)
    left_out = tuple(LeftOut(name, lacks) for name, lacks in missing.items())
    kept = _compare_symbols(config.cross_section, kept, [*names, *_columns(custom)])
    if not kept:
        if left_out:
            why = "; ".join(map(str, left_out))
            raise FeatureError(
                f"no feature can be computed: {why}. Choose others, or a source with these fields."
            )
        raise FeatureError(
            "the configuration names no feature. Set features.ohlcv, features.indicators, "
            "features.stationary.enabled, features.alpha158 or features.modules."
        )
    return Selection(tuple(kept), left_out)


def _columns(specs: Iterable[FeatureSpec]) -> list[str]:
    return [name for spec in specs for name in column_names(spec)]


def _compare_symbols(
    config: CrossSectionConfig, specs: list[FeatureSpec], known: Sequence[str]
) -> list[FeatureSpec]:
    """Add what `config` compares, where it is not compared already; known: all columns' names.

    Those of its columns that do not stay give their place in X to their comparison.
    """
    if config.method == "none":
        return specs
    for name in config.of:
        if name not in known:
            raise FeatureError(
                f"features.cross_section.of names {name!r}, which is no column. "
                f"{_near(name, known)}"
            )
    chosen: dict[str, CrossSection] = {}
    for spec in specs:
        if isinstance(spec, Feature) and (config.of or spec.group != "calendar"):
            for base in spec.names:
                if not config.of or base in config.of:
                    name = f"{config.method}_{base}"
                    parts = spec.group, config.method, not config.keep
                    chosen[name] = CrossSection(name, base, *parts)
    clash = sorted(
        name for spec in specs if isinstance(spec, Feature) for name in spec.names if name in chosen
    )
    if clash:
        raise FeatureError(
            f"feature {clash[0]!r} occurs twice: features.cross_section makes a column of that "
            "name. Rename the factor, or leave its base out of features.cross_section.of."
        )
    return [*(spec for spec in specs if column_names(spec)[0] not in chosen), *chosen.values()]


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known) or 'none'}."


def column_names(spec: FeatureSpec) -> tuple[str, ...]:
    """Names of the columns of `spec`."""
    return (spec.name,) if isinstance(spec, CrossSection) else spec.names


def load_modules(
    paths: Iterable[str | Path], taken: Iterable[str] = (), run_code: RunCode | None = None
) -> tuple[Feature, ...]:
    """Run the Python files `paths` and return the factors they declare, in order.

    This executes the files with the rights of the caller. A file may import installed packages,
    not its neighbours. `source_id` covers the whole file, so that a change in a helper counts.

    taken: column names that exist already; run_code: where a run directory names the files
    """
    known, loaded, new = set(taken), list[Feature](), list[Feature]()

    def collect(feature: Feature) -> None:
        for name in feature.names:
            if name in known:
                raise FeatureError(
                    f"factor {name!r}: another feature already has this name. "
                    "Rename it, or pass other `names` to @factor."
                )
            known.add(name)
        new.append(feature)

    for path in map(Path, paths):
        content = read_user_file(path, "factor", "features.modules", run_code)
        new.clear()
        token = _collect.set(collect)
        try:
            place = hashlib.sha256(str(path).encode() + content).hexdigest()[:16]
            run_user_file(path, content, f"_echelon_factors_{place}", "factor")
        finally:
            _collect.reset(token)
        if not new:
            raise FeatureError(
                f"{path}: the file declares no factor. Put @factor(lookback=…) above the function "
                "that computes it."
            )
        digest = hashlib.sha256(content).hexdigest()
        loaded += [replace(f, source_id=f"{digest}:{','.join(f.names)}") for f in new]
    return tuple(loaded)


def run(feature: Feature, bars: Bars, symbol: str = "") -> Floats:
    """Compute `feature` on one symbol's bars: a new array [L, len(feature.names)].

    Rows before the lookback are NaN, whatever the feature put there; all others are finite.
    A broken promise is a FeatureError that names the factor, `symbol` and the first bad row.
    """
    assert feature.lookback >= 1, f"{feature.names[0]} has a lookback of {feature.lookback}"
    who = f"factor {feature.names[0]!r}" + (f" on {symbol}" if symbol else "")
    try:
        values = np.asarray(feature.compute(bars))
    except FeatureError as error:
        raise FeatureError(f"{who} failed: {error}") from error
    if values.dtype.kind not in "fiub":
        raise FeatureError(
            f"{who} returned {values.dtype}, expected an array of numbers (float64)."
        )
    shape = (len(bars), len(feature.names))
    if values.shape != shape and not (values.shape == shape[:1] and shape[1] == 1):
        raise FeatureError(
            f"{who} returned shape {values.shape}, expected {shape}: one row per bar and one "
            f"column per name ({', '.join(feature.names)})."
        )
    out = np.array(values, dtype=np.float64).reshape(shape)
    warm = feature.lookback - 1
    out[:warm] = np.nan
    finite = np.isfinite(out[warm:])
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        row += warm
        raise FeatureError(
            f"{who} returned {out[row, column]} in column {feature.names[column]!r} at row {row} "
            f"({bars.times[row]}), after its lookback of {feature.lookback} bars. Declare a longer "
            "lookback, or say what the value is there."
        )
    return out


def _choose_factors(features: tuple[Feature, ...], wanted: tuple[str, ...]) -> tuple[Feature, ...]:
    if not wanted:
        return features
    known = {name: f for f in features for name in (getattr(f.compute, "__name__", ""), *f.names)}
    for name in wanted:
        if name not in known:
            raise FeatureError(
                f"features.custom names {name!r}, which no file of features.modules has. "
                f"{_near(name, known)}"
            )
    chosen = [known[name] for name in wanted]
    return tuple(f for f in features if any(f is c for c in chosen))


def _check_declaration(function: str, feature: Feature) -> None:
    who, lookback, names = f"factor {function!r}", feature.lookback, feature.names
    if isinstance(lookback, bool) or not isinstance(lookback, int) or lookback < 1:
        raise FeatureError(
            f"{who}: lookback is {lookback!r}, expected a whole number of at least 1, "
            "the current bar included."
        )
    for what, given, allowed in (
        ("needs", feature.needs, get_args(Field)),
        ("group", (feature.group,), get_args(Group)),
        ("on_gap", (feature.on_gap,), ("carry", "zero")),
    ):
        for value in given:
            if value not in allowed:
                raise FeatureError(
                    f"{who}: {what} has {value!r}, which is none of {', '.join(allowed)}."
                )
    if not names or not all(isinstance(n, str) and n.isprintable() and n for n in names):
        raise FeatureError(f"{who}: names is {names!r}, expected the name of each column.")


_HELD_BY: Mapping[Field, Sequence[str]] = {
    **{"open": ("open",), "high": ("high",), "low": ("low",)},
    **{"volume": ("value",), "vwap": ("vwap",), "limits": ("limit_up", "limit_down")},
}
"""What a feature may need → the fields of `Bars` it reads then."""


def _guard(compute: Compute, needs: frozenset[Field]) -> Compute:
    """Show a user's function only the fields it declared, and say where it failed if it did."""

    @functools.wraps(compute)
    def compute_guarded(bars: Bars) -> Floats:
        hidden: dict[str, Any] = {
            name: None for need, names in _HELD_BY.items() if need not in needs for name in names
        }
        seen = replace(bars, **hidden)
        try:
            return compute(seen)
        except (Exception, SystemExit) as error:
            # Anything can go wrong in someone else's code; the user must learn whose and where.
            code = getattr(compute, "__code__", None)
            file = Path(code.co_filename) if code is not None else Path()
            raise FeatureError(
                f"{file}{line_in(file, error)}: {type(error).__name__}: {error}. It declares "
                f"needs={sorted(needs)}; fields it does not declare are None, and a symbol may "
                "have fewer bars than the lookback."
            ) from error

    return compute_guarded
