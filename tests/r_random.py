"""R's normal draws: what `set.seed(seed); rnorm(count)` gives, so that published R examples repeat.

R's default since 1.7 (its help page "Random"): Mersenne Twister, normals by inversion.

1. The seed runs through the generator 69069·x + 1 modulo 2³² for 50 steps; 625 more fill the state,
   of which the first is the position and is set to "used up".
2. A uniform is a 32-bit word over 2³², kept off 0 and 1.
3. A normal takes two: 27 bits of the first and the whole second, through the normal quantile.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtri

from echelon.types import Floats

_WORDS = 624
_UNIFORM = 2.3283064365386963e-10  # R's constants: 2⁻³², and half of 1 / (2³² - 1) from the ends
_END = 0.5 * 2.328306437080797e-10
_HIGH = 2.0**27


def r_normals(seed: int, count: int) -> Floats:
    """Return the first `count` standard normals of R after set.seed(seed)."""
    uniforms = _words(seed, 2 * count) * _UNIFORM
    uniforms = uniforms.clip(_END, 1.0 - _END)
    normals: Floats = ndtri((np.floor(_HIGH * uniforms[0::2]) + uniforms[1::2]) / _HIGH)
    return normals


def _words(seed: int, count: int) -> Floats:
    state = seed
    filled = []
    for step in range(50 + 1 + _WORDS):
        state = (69069 * state + 1) % 2**32
        if step > 50:
            filled.append(state)
    twister = np.random.MT19937()
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": np.array(filled, dtype=np.uint32), "pos": _WORDS},
    }
    return twister.random_raw(count).astype(np.float64)
