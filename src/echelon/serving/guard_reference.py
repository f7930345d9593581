"""What a bundle's guards compare live bars with: made at export, read with the bundle.

`guards.safetensors` holds what training rows are like (`monitoring.guard`) and what the policy did
over the validation window (`monitoring.drift`), both of the exported policy itself. Bundles without
the file open; their guards stay off.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from echelon.backtest.budget import decider
from echelon.backtest.ensemble import EnsemblePolicy
from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import DamagedError
from echelon.files import blaming, write_atomic
from echelon.market import Reason
from echelon.monitoring.drift import Expectation, Pairs, market_return, pairs_of_backtest
from echelon.monitoring.guard import MOST_ROWS, Reference
from echelon.population.policy import HierarchyPolicy
from echelon.serving.policies import OnnxPolicy, WindowEncoder
from echelon.states import below_prefix, with_prefix
from echelon.types import Bools, Floats32

GUARDS = "guards.safetensors"
_MOST_BARS = 5_000
"""Of the validation window's end that drift is held to."""
_WHOLE = (int(Reason.NONE), int(Reason.LOT))


class GuardReference(NamedTuple):
    rows: Reference
    drift: Expectation


def shared_encoder(policy: Policy) -> WindowEncoder | None:
    """The encoder whose embedding is at hand at a decision: of the policy, of an ensemble's first
    member, of a hierarchy whose experts share it; None: there is none.
    """
    policy = decider(policy)
    if isinstance(policy, EnsemblePolicy):
        return shared_encoder(policy.members[0])
    if isinstance(policy, HierarchyPolicy):
        learned = [expert for expert in policy.experts if isinstance(expert, OnnxPolicy)]
        encoders = [shared_encoder(expert) for expert in learned]
        return encoders[0] if encoders and all(own is encoders[0] for own in encoders) else None
    return policy.encoder if isinstance(policy, OnnxPolicy) else None


def mean_embedding(z: Floats32, shown: Bools) -> Floats32 | None:
    """[D] of z[1,N,D] over the symbols that are shown; None: there are none."""
    return _mean(z, shown) if shown.any() else None


@njit(cache=True, nogil=True)
def _mean(z: Floats32, shown: Bools) -> Floats32:
    total = np.zeros(z.shape[2], dtype=np.float32)
    for n in range(len(shown)):
        if shown[n]:
            total += z[0, n]
    return total / np.float32(shown.sum())


def fit_reference(policy: Policy, world: World, config: Config) -> GuardReference:
    """Of the exported policy in the world of its run."""
    train, valid = world.splits["train"], world.splits["valid"]
    shown = world.present & world.rows.tradable
    periods = world.periods_per_year
    span = world.span("valid")
    span = range(max(span.start, span.stop - _MOST_BARS), span.stop)
    traded = run_backtest(policy, world, span, config)
    embeddings = _embeddings(policy, world, shown, (train, valid))
    rows = Reference.fit(world.x, shown, train, valid, embeddings, periods)
    return GuardReference(rows, Expectation.fit(bar_pairs(traded, world, span.start), periods))


def bar_pairs(traded: Backtest, world: World, first: int) -> Pairs:
    """What a backtest from the row `first` of a world on did at each step."""
    fills, steps = traded.fills, len(traded.value) - 1
    rows = slice(first, first + steps + 1)
    close, growth = world.rows.close[rows], world.growth[rows]
    shown = (world.present & world.rows.tradable)[rows]
    asked = (fills.shares != 0.0) | (fills.reason != Reason.NONE)
    return pairs_of_backtest(
        traded.value,
        1.0 - traded.cash_share[:-1].astype(np.float64),
        np.array(
            [market_return(*two) for two in zip(growth[:-1], growth[1:], shown, strict=False)]
        ),
        {
            "shares": fills.shares,
            "price": fills.price,
            "cost": fills.commission + fills.stamp + fills.slippage,
            "arrival": np.nan_to_num(close[:-1]),
            "asked": asked,
        },
        (fills.shares != 0.0) & np.isin(fills.reason, _WHOLE),
    )


def _embeddings(
    policy: Policy, world: World, shown: Bools, spans: tuple[range, range]
) -> Floats32 | None:
    """[T,D] mean embeddings of the rows that the guard learns from, NaN of others."""
    encoder = shared_encoder(policy)
    if encoder is None:
        return None
    made: Floats32 | None = None
    for span in spans:
        newest = span is spans[0]  # the end of train, the beginning of validation
        rows = span[-MOST_ROWS:] if newest else span[:MOST_ROWS]
        for t in rows:
            z = mean_embedding(encoder.embed(world, t), shown[t]) if t + 1 >= world.window else None
            if z is not None:
                if made is None:
                    made = np.full((len(world.times), len(z)), np.nan, dtype=np.float32)
                made[t] = z
    return made


def write_guard_reference(path: Path, reference: GuardReference) -> None:
    from safetensors.numpy import save

    arrays = with_prefix("rows.", reference.rows.arrays())
    arrays["drift"] = np.array(reference.drift)
    write_atomic(path, save({name: np.ascontiguousarray(part) for name, part in arrays.items()}))


def read_guard_reference(path: Path, n_features: int, remedy: str) -> GuardReference:
    """What the file at `path` holds; DamagedError where that is not what guards need."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(path.read_bytes())
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(path, str(error), remedy) from None
    with blaming(path, remedy):
        rows = Reference.from_arrays(below_prefix("rows.", arrays), n_features)
        return GuardReference(rows, Expectation.from_array(arrays["drift"]))
