"""Make the numbers that V-trace and Retrace are held against: rlax's own, on random sequences.

    python scripts/make_rlax_reference.py [--venv DIR]

1. Makes a virtual environment of its own (default .venvs/rlax) with rlax and jax for the CPU:
   nothing of ours needs them.
2. In it, draws sequences of several lengths, with terminations and truncations, and calls rlax in
   float64: `vtrace`, `general_off_policy_returns_from_q_and_v` and `retrace_continuous`.
3. Stores inputs and answers in tests/fixtures/rlax/reference.json, with the versions.

rlax knows no truncation within a sequence: it is called on each piece between two cuts by itself,
which is what a cut means. Inputs are seeded and rounded to four decimals, so that the file states
them exactly; a second run gives the same file. Tests read only the fixture.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import subprocess
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

RLAX = "0.1.9"
JAX = "0.10.2"
SEED = 6
ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests" / "fixtures" / "rlax" / "reference.json"
SEQUENCES = 3
LENGTHS = (1, 2, 5, 16)
# (λ, ρ̄, spread of log π/μ): on-policy, near, far; λ of 0, in between, 1; ρ̄ below, at, above 1.
# rlax's c̄ is always 1.
SETTINGS = (
    (1.0, 1.0, 0.0),
    (1.0, 1.0, 0.5),
    (0.9, 1.0, 2.0),
    (0.7, 3.7, 1.0),
    (0.95, 1.3, 0.5),
    (0.0, 1.0, 1.0),
    (1.0, 1e9, 0.3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venvs" / "rlax")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        write_fixture()
        return
    python = args.venv / "bin" / "python"
    if not python.exists():
        venv.create(args.venv, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"rlax=={RLAX}", f"jax[cpu]=={JAX}"], check=True)
    subprocess.run([str(python), str(Path(__file__).resolve()), "--child"], check=True)
    size = FIXTURE.stat().st_size
    print(f"{FIXTURE.relative_to(ROOT)}: {size / 1024:.0f} KB, made with rlax {RLAX}")


def write_fixture() -> None:
    """Draw, ask and store; runs where rlax is installed."""
    import jax
    import numpy as np
    import rlax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    assert rlax.__version__ == RLAX, f"rlax {rlax.__version__} instead of {RLAX}"
    assert jax.__version__ == JAX, f"jax {jax.__version__} instead of {JAX}"
    rng = np.random.default_rng(SEED)
    cases = [
        _case(rng, length, *setting) for length, setting in itertools.product(LENGTHS, SETTINGS)
    ]
    reference = {
        "provenance": {
            "rlax": rlax.__version__,
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "script": "scripts/make_rlax_reference.py",
            "seed": SEED,
        },
        "cases": cases,
    }
    FIXTURE.parent.mkdir(parents=True, exist_ok=True)
    temporary = FIXTURE.with_suffix(".tmp")
    text = json.dumps(reference, separators=(",", ":"))
    temporary.write_text(text.replace('{"trace"', '\n{"trace"') + "\n", encoding="utf-8")
    temporary.replace(FIXTURE)


def _case(
    rng: np.random.Generator, length: int, trace: float, rho_bar: float, spread: float
) -> dict[str, Any]:
    """One setting: inputs [L,B] time first, and what rlax makes of them."""
    import numpy as np

    shape = (length, SEQUENCES)

    def drawn(scale: float) -> NDArray[np.float64]:
        return np.round(scale * rng.standard_normal(shape), 4) + 0.0  # no −0.0

    ended = rng.random(shape)
    terminated, truncated = ended < 0.12, (ended > 0.8) & (ended < 0.95)
    inputs: dict[str, NDArray[Any]] = {
        "r_t": drawn(1.0),
        "discount_t": np.where(terminated, 0.0, np.round(rng.uniform(0.8, 1.0, shape), 4)),
        "v_t": drawn(3.0),
        "v_next": drawn(3.0),
        "q_t": drawn(3.0),
        "log_ratio_t": drawn(spread),
        "truncated": truncated,
    }
    answers = {
        name: np.full(shape, np.nan) for name in ("vtrace_errors", "returns", "retrace_errors")
    }
    for b in range(SEQUENCES):
        for piece in _pieces(truncated[:, b]):
            of = {name: values[piece, b] for name, values in inputs.items()}
            for name, answer in _asked(of, trace, rho_bar).items():
                answers[name][piece, b] = answer
    stored = {name: values.tolist() for name, values in (inputs | answers).items()}
    return {"trace": trace, "rho_bar": rho_bar, **stored}


def _asked(
    of: dict[str, NDArray[Any]], trace: float, rho_bar: float
) -> dict[str, NDArray[np.float64]]:
    """Rlax's answers for one sequence [L] that nothing but a termination interrupts."""
    import numpy as np
    import rlax

    asked: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "vtrace_errors": (
            rlax.vtrace,
            (
                *(of["v_t"], of["v_next"], of["r_t"], of["discount_t"]),
                *(np.exp(of["log_ratio_t"]), np.float64(trace), rho_bar),
            ),
        ),
        "returns": (
            rlax.general_off_policy_returns_from_q_and_v,
            (
                *(of["q_t"][1:], of["v_next"], of["r_t"], of["discount_t"]),
                trace * np.minimum(1.0, np.exp(of["log_ratio_t"][1:])),
            ),
        ),
        "retrace_errors": (
            rlax.retrace_continuous,
            (
                *(of["q_t"], of["q_t"][1:], of["v_next"], of["r_t"], of["discount_t"]),
                *(of["log_ratio_t"][1:], np.float64(trace)),
            ),
        ),
    }
    found = {}
    for name, (operator, arguments) in asked.items():
        # Compiled once for each length: by itself, rlax would compile its scan at every call.
        answer = np.asarray(_compiled(operator)(*arguments))
        assert answer.dtype == np.float64, f"{name} is {answer.dtype}, not float64"
        found[name] = answer
    return found


@functools.cache
def _compiled(operator: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    compiled: Callable[..., Any] = jax.jit(operator)
    return compiled


def _pieces(truncated: NDArray[np.bool_]) -> Iterator[slice]:
    """Stretches that end with a truncated step, and what is left."""
    begin = 0
    for t, cut in enumerate(truncated):
        if cut or t == len(truncated) - 1:
            yield slice(begin, t + 1)
            begin = t + 1


if __name__ == "__main__":
    main()
