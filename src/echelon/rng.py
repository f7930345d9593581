"""Random streams: one seed for a run, an independent named stream for each use of randomness.

A stream depends on the seed and its own name only, so adding a consumer of randomness never
shifts the numbers another one sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_WORD = 2**64 - 1


def stream(seed: int, *name: str | int) -> np.random.Generator:
    """Return the generator of the stream called `name` under `seed`.

    >>> bool(stream(1, "prices").random() == stream(1, "prices").random())
    True
    """
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    words = np.frombuffer(digest, dtype="<u4")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words.tolist()])))


def pack_stream(rng: np.random.Generator) -> NDArray[np.uint64]:
    """[6] where a stream stands: state and increment in two words each, and its half-used word."""
    tree = rng.bit_generator.state
    words = [tree["state"][name] >> shift & _WORD for name in ("state", "inc") for shift in (64, 0)]
    return np.array([*words, tree["has_uint32"], tree["uinteger"]], dtype=np.uint64)


def unpack_stream(rng: np.random.Generator, words: NDArray[np.uint64]) -> None:
    """Put a stream where `pack_stream` said.

    >>> first, second = stream(1, "prices"), stream(2, "prices")
    >>> unpack_stream(second, pack_stream(first))
    >>> bool(first.random() == second.random())
    True
    """
    high, low, inc_high, inc_low, has_uint32, uinteger = (int(word) for word in words)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": inc_high << 64 | inc_low},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }


def torch_generator(seed: int, *name: str | int) -> torch.Generator:
    """A generator of torch's that begins where the stream called `name` says."""
    import torch

    return torch.Generator().manual_seed(int(stream(seed, *name).integers(2**62)))


@contextmanager
def global_draws(seed: int, *name: str | int) -> Iterator[None]:
    """Inside, torch's global generator begins where the stream says; then it is as it was before.

    For the first weights of modules, which are drawn from it.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(seed, *name).integers(2**62)))
        yield
