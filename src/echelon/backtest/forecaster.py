"""A supervised forecaster, as a quant would use one in place of an agent: the baseline `forecast`.

1. On the train window, and nothing else, boosted trees (or a ridge) learn from the features of a
   row, X[t], the rank of each asset's return over the next `forecast.horizon` bars, from the fill
   of a decision at t on (`envs.targets`). Where rows are many, every so many of them are taken:
   targets of neighbouring rows overlap, and say nearly the same.
2. The assets that score best are held, in staggered tranches (`top_k`). How many of them, and how
   far one may fall before it is sold, is chosen on the validation window: by the information ratio
   of the return over that of equal weight, net of costs, among a few shares of the universe.
3. Model, choice and everything that was tried are kept in the run, for whoever asks next:

    RUN/forecast/model.safetensors    the arrays of the trees, or the ridge's weights
    RUN/forecast/forecast.json        what it was made of, what was chosen among what, hashes

Axes: `T` rows of the world, `N` assets, `F` features, `S` cells that are learned from.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from echelon.backtest.baselines import FORECAST, make_baseline
from echelon.backtest.policy import Policy
from echelon.backtest.run import run_backtest
from echelon.backtest.top_k import RowScores, Scorer, TopKPolicy, TopKRule
from echelon.config import Config
from echelon.config.market import EXECUTOR_KEYS
from echelon.envs.targets import forward_returns, section_ranks
from echelon.envs.world import World
from echelon.errors import DamagedError, StoreError
from echelon.files import (
    check_tree,
    exclusive_lock,
    finite_or_none,
    json_line,
    recover_directory,
    standing_directory,
)
from echelon.ops.measures import sharpe_annual
from echelon.ops.ranks import ic_summary, rank_ic
from echelon.ops.ridge import Moments, fit_ridge
from echelon.ops.trees import Trees, fit_trees, predict_trees
from echelon.rng import stream
from echelon.runs.tensor_files import TensorFiles
from echelon.types import Floats, Floats32

log = logging.getLogger(__name__)

_FILES = TensorFiles("model.safetensors", "forecast.json", "forecaster", 1, "another directory")
_SHARES = (10, 5, 3)
"""One in so many assets is held, at choice."""
_BUFFERS = (2.0, 3.0)
_MOST_CELLS = 250_000
"""Beyond as many, rows are left out, until no targets overlap any more."""
_LEAST_CELLS = 100
"""Fewer say nothing of what comes."""


class Ridge(NamedTuple):
    weights: Floats  # [F+1], the last one the bias


Model = Trees | Ridge


def model_of_arrays(arrays: Mapping[str, NDArray[Any]], n_features: int) -> Model:
    """What `_asdict` of a model gave, or a stranger; ValueError: these are no such model."""
    parts = {name: np.array(part) for name, part in arrays.items()}
    if set(parts) == set(Trees._fields):
        trees = Trees(**parts)
        if problem := trees.problem(n_features):
            raise ValueError(problem)
        return trees
    weights = parts.get("weights")
    if len(parts) != 1 or weights is None:
        raise ValueError(f"{sorted(parts)} are the arrays of no model")
    if weights.shape != (n_features + 1,) or weights.dtype != np.float64:
        raise ValueError(f"{list(weights.shape)} weights for {n_features} features")
    if not np.isfinite(weights).all():
        raise ValueError("a weight is not a number")
    return Ridge(weights)


def scorer_of(model: Model) -> Scorer:
    """Forecasts of ranks[N] from x[N,F], bit for bit the same wherever they are made."""
    if isinstance(model, Trees):
        return partial(predict_trees, trees=model)
    slopes, bias = model.weights[:-1], model.weights[-1]
    return lambda x: np.asarray((x * slopes).sum(axis=1) + bias)


@dataclass(frozen=True)
class Forecaster:
    """A fitted model and how it is traded. facts: what was chosen among what, as JSON has it"""

    model: Model
    rule: TopKRule
    facts: Mapping[str, Any]

    @cached_property
    def row_scores(self) -> RowScores:
        """Of the last world asked about, for all policies of it."""
        return RowScores(scorer_of(self.model))

    def policy(self) -> Policy:
        return TopKPolicy(self.row_scores, self.rule, FORECAST)


def refusal(config: Config, world: World) -> str | None:
    """Why the data cannot support a forecaster; None: they can."""
    missing = [name for name in ("train", "valid") if name not in world.splits]
    if missing:
        return f"there is no {' and no '.join(missing)} window to learn and to choose on"
    if world.n_assets < 2:
        return "of a single asset there is no cross-section to rank"
    returns = [forward_returns(world, r, config.forecast.horizon) for r in world.spans("train")]
    cells = sum(int(np.isfinite(section_ranks(part)).sum()) for part in returns)
    if cells < _LEAST_CELLS:
        return (
            f"the train window has {cells} ranks of returns over forecast.horizon="
            f"{config.forecast.horizon} bars to learn from, of {_LEAST_CELLS} at least"
        )
    return None


def fit_forecaster(config: Config, world: World) -> Forecaster | None:
    """Fit on the train window, choose on the validation window; None, and a log line: no data."""
    if why := refusal(config, world):
        log.warning("the baseline forecast is left out: %s", why)
        return None
    world = replace(world, executor=None)  # chosen with fills at once, as agents learn
    settings = config.forecast
    x, y, rows = _cells(world, settings.horizon)
    model: Model
    if settings.model == "boosting":
        seed = int(stream(config.seed, FORECAST).integers(2**31))
        model = fit_trees(x, y, trees=settings.trees, seed=seed)
    else:
        model = _fit_ridge(x, y, rows, settings.horizon)
    facts = {"model": settings.model, "cells": len(y), "rows": len(np.unique(rows))}
    return _choose(model, facts, config, world)


class Cells(NamedTuple):
    """What is learned from: features, ranks, and the row of each cell."""

    x: Floats32  # [S,F]
    y: Floats  # [S]
    row: NDArray[np.int64]  # [S]


def _cells(world: World, horizon: int) -> Cells:
    """Of the train window; every so many rows where they are many."""
    spans = world.spans("train")
    step = min(horizon, -(-sum(map(len, spans)) * world.n_assets // _MOST_CELLS))
    parts = []
    for span in spans:
        ranks = section_ranks(forward_returns(world, span, horizon))
        ranks[np.arange(len(span)) % max(step, 1) > 0] = np.nan
        row, asset = np.nonzero(np.isfinite(ranks))
        parts.append(Cells(world.x[row + span.start, asset], ranks[row, asset], row + span.start))
    return Cells(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _fit_ridge(x: Floats32, y: Floats, rows: NDArray[np.int64], horizon: int) -> Ridge:
    """The strength is chosen on the last fifth of the rows."""
    cut = int(np.quantile(rows, 0.8))
    parts = (rows < cut - horizon, (rows >= cut - horizon) & (rows < cut), rows >= cut)
    sums = []
    for part in parts:
        moments = Moments(x.shape[1] + 1, 1)
        flat = np.concatenate([x[part], np.ones((int(part.sum()), 1), np.float32)], axis=1)
        moments.add(flat, y[part].astype(np.float32)[:, None])
        sums.append(moments)
    return Ridge(fit_ridge(*sums)[:, 0])


def _choose(model: Model, facts: Mapping[str, Any], config: Config, world: World) -> Forecaster:
    """With the rule that was best on the validation window, net of costs."""
    settings = config.forecast
    every = [
        TopKRule(top, buffer, settings.tranches, settings.horizon) for top, buffer in _grid(world)
    ]
    scores = RowScores(scorer_of(model))  # whose rows all rules share
    usual = _validate(make_baseline("equal_weight", config), world, config)
    choices, best = [], 0
    for k, rule in enumerate(every):
        returns = _validate(TopKPolicy(scores, rule, FORECAST), world, config)
        active = sharpe_annual(returns - usual, world.periods_per_year)
        choices.append(
            {
                "top": rule.top,
                "buffer": rule.buffer,
                "sharpe_annual": finite_or_none(sharpe_annual(returns, world.periods_per_year)),
                "information_ratio": finite_or_none(active),
            }
        )
        if _ratio_of(choices[k]) > _ratio_of(choices[best]):
            best = k
    return Forecaster(model, every[best], {**facts, "choices": choices})


def _ratio_of(choice: Mapping[str, Any]) -> float:
    ratio = choice["information_ratio"]
    return -math.inf if ratio is None else float(ratio)


def _validate(policy: Policy, world: World, config: Config) -> Floats:
    """Returns on the validation window; a ruined book earns nothing more."""
    parts = []
    for span in world.spans("valid"):
        returns = run_backtest(policy, world, span, config).returns
        parts.append(np.pad(returns, (0, len(span) - 1 - len(returns))))
    return np.concatenate(parts)


def _grid(world: World) -> list[tuple[int, float]]:
    """(top, buffer) to choose among, by how many assets there are on the validation window."""
    rows = np.concatenate([np.arange(span.start, span.stop) for span in world.spans("valid")])
    there = (world.present[rows] & world.member[rows] & world.rows.tradable[rows]).sum(axis=1)
    usual = float(np.median(there))
    tried = {
        (min(max(1, round(usual / share)), world.n_assets), buffer)
        for share, buffer in product(_SHARES, _BUFFERS)
        if buffer < share  # a buffer as wide as the universe sells nothing
    }
    return sorted(tried)


def forecast_ic(
    forecaster: Forecaster, world: World, span: range, seed: int
) -> dict[str, float | None]:
    """How well it ranked the returns within a span: mean daily IC, interval, ICIR, days."""
    rule, scores = forecaster.rule, forecaster.row_scores
    outcomes = forward_returns(world, span, rule.horizon)
    table = np.stack([scores.at(world, row) for row in span])
    rng = stream(seed, FORECAST, "ic")
    summary = ic_summary(rank_ic(table, outcomes), rng, horizon=rule.horizon)
    named = {"ic": summary.mean.estimate, "low": summary.mean.low, "high": summary.mean.high}
    return {
        **{name: finite_or_none(value) for name, value in named.items()},
        "icir": finite_or_none(summary.icir),
        "days": summary.days,
    }


class _Document(TypedDict):
    """What forecast.json says besides versions and hashes."""

    made_of: str
    rule: TopKRule
    facts: dict[str, Any]


def forecaster_hash(config: Config, data: str) -> str:
    """Of everything that a forecaster depends on; data: hash of the prepared set."""
    market = config.market.model_dump(mode="json")
    for key in (*EXECUTOR_KEYS, "market.preset_confirmed"):
        del market[key.partition(".")[2]]
    parts = {
        "data": data,
        "seed": config.seed,
        "forecast": config.forecast.model_dump(mode="json"),
        "market": market,
        "fee_rate": config.fee_rate,
        "use_fee": config.eval.use_fee,
        "rebalance_bars": config.eval.rebalance_bars,
    }
    return hashlib.sha256(json_line(parts, sort_keys=True).encode()).hexdigest()


def ensure_forecaster(
    config: Config, world: World, directory: Path, *, data: str
) -> Forecaster | None:
    """The forecaster kept in a run's directory, fitted now if there is none of the same making.

    Of `world` the train and validation windows are looked at. data: hash of what it was made from
    Processes that ask for the same one wait for whoever is at it.
    """
    target, made_of = directory / FORECAST, forecaster_hash(config, data)
    with exclusive_lock(directory / ".forecast.lock", f"the forecaster in {directory}", wait=True):
        kept = _read(target, made_of, world.x.shape[2])
        if kept is not None:
            return kept
        made = fit_forecaster(config, world)
        if made is not None:
            _write(target, made_of, made)
        return made


def _write(target: Path, made_of: str, made: Forecaster) -> None:
    import torch

    tensors = {
        name: torch.from_numpy(np.array(part)) for name, part in made.model._asdict().items()
    }
    document = {"made_of": made_of, "rule": list(made.rule), "facts": dict(made.facts)}
    try:
        recover_directory(target)
        _FILES.write(target, tensors, document, allow_nan=False)
    except OSError as error:
        raise StoreError(
            f"{target}: the forecaster cannot be written ({error.strerror or error}). Make room or "
            "mend the disk, then run the same command again."
        ) from error


def _read(target: Path, made_of: str, n_features: int) -> Forecaster | None:
    """What is kept, if it was made of the same; what is damaged is refused."""
    path = standing_directory(target)
    if path is None:
        return None
    remedy = f"Remove the directory {path}, and the forecaster is fitted again."
    tree, data = _FILES.read(path, remedy)
    document = check_tree(tree, _Document, path / _FILES.document, remedy)
    if document["made_of"] != made_of:
        return None
    arrays = {name: part.numpy() for name, part in _FILES.unpack(data, path, remedy).items()}
    try:
        model = model_of_arrays(arrays, n_features)
    except ValueError as error:
        raise DamagedError(path / _FILES.tensors, str(error), remedy) from None
    return Forecaster(model, TopKRule(*document["rule"]), document["facts"])
