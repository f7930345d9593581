"""Which expert a bar belongs to, known before the bar's outcome.

Experts trained on every bar alike end up alike. Here the bars are shared out: an expert whose own
book has done better than the others' of late answers for more of the next bar's loss (a mixture of
experts with responsibilities; Jacobs et al., 1991), so that it learns its own kind of market.

Responsibilities are causal: that of bar t is made of outcomes of the bars before it, as the router
itself must choose. Those made of the bar's own outcome would teach each expert its lucky bars.
"""

from __future__ import annotations

import numpy as np

from echelon.errors import TrainingError
from echelon.types import Floats

_LEAST_SPREAD = 1e-6
"""Added to the standard deviation of trailing returns: experts closer than this are equals."""


def responsibilities(
    returns: Floats, window: int = 40, temperature: float = 0.5, floor: float = 0.05
) -> Floats:
    """Share[K,T,...] of each bar that each expert answers for; sums to 1 over K.

        (1 − floor) · softmax_k(standardised Σ_{u=t−window}^{t−1} returns_u / temperature) + floor/K

    returns[K,T,...]: of each expert's own book, [:,t] what the decision at bar t earned, known at
    t+1 and hence of no part in the share at t; trailing axes (paths, markets) do not mix.
    Standardised over the experts, by the sample standard deviation: what counts is the order of
    experts at one time, not how wild the market is. Even shares until `window` bars are known.
    As a weight of the loss multiply by K, so that the weights have a mean of 1.
    """
    r = np.asarray(returns, dtype=np.float64)
    assert r.ndim >= 2, f"returns should be [K,T,...], are {r.shape}"
    assert len(r) >= 2, "one expert answers for all: there is nothing to share"
    assert window >= 1, f"window should be ≥ 1, is {window}"
    assert temperature > 0.0, f"temperature should be > 0, is {temperature}"
    if not np.isfinite(r).all():
        raise TrainingError(
            "expected finite returns of the experts' own books, found NaN or infinity in those of "
            f"expert {int(np.argwhere(~np.isfinite(r))[0, 0])}: put it in quarantine and re-seed it"
        )
    trailing = np.zeros_like(r)
    n_bars = r.shape[1]
    if n_bars > window:
        known = np.concatenate([np.zeros_like(r[:, :1]), np.cumsum(r, axis=1)], axis=1)
        trailing[:, window:] = known[:, window:n_bars] - known[:, : n_bars - window]
    spread = trailing.std(axis=0, ddof=1) + _LEAST_SPREAD
    scores = (trailing - trailing.mean(axis=0)) / (spread * temperature)
    odds = np.exp(scores - scores.max(axis=0))
    return apply_floor(odds / odds.sum(axis=0), floor)


def apply_floor(shares: Floats, floor: float = 0.05) -> Floats:
    """(1 − floor) · shares[K,...] + floor/K: no expert is cut off from any bar for good.

    Also for a router's probabilities, which take the place of trailing returns once it is trained.
    """
    assert 0.0 <= floor <= 1.0, f"floor should be in [0, 1], is {floor}"
    return (1.0 - floor) * shares + floor / len(shares)
