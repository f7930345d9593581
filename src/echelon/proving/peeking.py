"""A factor file as a user might write one, with the oldest mistake in it: it knows tomorrow.

For the leaky market of `echelon prove` only; `echelon data check --leakage` refuses it.
"""

from __future__ import annotations

import numpy as np

from echelon.features import Bars, factor
from echelon.types import Floats


@factor(lookback=1, needs=("close",))
def tomorrows_return(bars: Bars) -> Floats:
    """The log return of the bar that follows."""
    out = np.zeros(len(bars))
    out[:-1] = np.diff(np.log(bars.close))
    return out
