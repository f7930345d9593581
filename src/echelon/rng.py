"""Random streams: one seed for a run, an independent named stream for each use of chance.

A stream depends on the seed and its own name only, so adding a consumer of randomness never
shifts the numbers another one sees.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, *name: str | int) -> np.random.Generator:
    """Return the generator of the stream called `name` under `seed`.

    >>> bool(stream(1, "prices").random() == stream(1, "prices").random())
    True
    """
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    words = np.frombuffer(digest, dtype="<u4")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words.tolist()])))
