"""What an encoder costs per bar and asset: forward alone, and forward with backward.

    python -m bench encoders
    python -m bench.encoders --rounds 9

Windows of 20 bars, 30 features, width 64, 2 layers; 200 bars of 16 assets at once, one thread. What
counts is the processor time of the best round, the encoders taking turns, so that a busy machine
favours none. The first check is that all of them encode a bar alone as they encode it among the
others; it fails where one does not. No goal is set for the times: they say what `model.encoder`
costs. A live bar of all assets is the last column, in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from echelon.config import Config
from echelon.models.encoders import Encoder, build_encoder

BARS, ASSETS, FEATURES, WINDOW, WIDTH, LAYERS = 200, 16, 30, 20, 64, 2
KINDS = ("TimeCNN", "Transformer", "TimesNet")
ROUNDS = 5


def make(kind: str, x: torch.Tensor) -> Encoder:
    """The encoder of that name, fitted."""
    model = {"encoder": kind, "d_model": WIDTH, "n_layers": LAYERS}
    torch.manual_seed(1)
    encoder = build_encoder(Config.model_validate({"window": WINDOW, "model": model}), FEATURES)
    encoder.fit(x)
    return encoder


def refuse_another_answer(encoder: Encoder, x: torch.Tensor) -> None:
    """A bar alone is encoded as among the others."""
    with torch.no_grad():
        z = encoder(x)
        for k in (0, BARS // 2, BARS - 1):
            alone = encoder(x[k : k + WINDOW])[0]
            torch.testing.assert_close(alone, z[k], atol=1e-5, rtol=1e-5)


def forward(encoder: Encoder, x: torch.Tensor) -> None:
    with torch.no_grad():
        encoder(x)


def both(encoder: Encoder, x: torch.Tensor) -> None:
    encoder.zero_grad()
    encoder(x).square().sum().backward()  # type: ignore[no-untyped-call]


def seconds(work: Callable[[Encoder, torch.Tensor], None], of: Encoder, x: torch.Tensor) -> float:
    began = time.process_time()
    work(of, x)
    return time.process_time() - began


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Encoder → the best seconds of each kind of work, after one round that does not count."""
    torch.manual_seed(0)
    x = torch.randn(BARS + WINDOW - 1, ASSETS, FEATURES).cumsum(0)
    x = (x - x.mean((0, 1))) / x.std((0, 1))
    encoders = {kind: make(kind, x) for kind in KINDS}
    for encoder in encoders.values():
        refuse_another_answer(encoder, x)
    best: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for k in range(rounds + 1):
        for kind, encoder in encoders.items():
            found = {
                "forward": seconds(forward, encoder, x),
                "both": seconds(both, encoder, x),
                "live": seconds(forward, encoder, x[:WINDOW]),
            }
            if k:
                best[kind] = {n: min(v, best[kind].get(n, v)) for n, v in found.items()}
    for kind, encoder in encoders.items():
        best[kind]["weights"] = sum(p.numel() for p in encoder.parameters())
    return best


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(argv or [])
    torch.set_num_threads(1)
    found = measure(args.rounds)
    size = f"W={WINDOW}, D={WIDTH}, {LAYERS} layers"
    print(f"{BARS} bars × {ASSETS} assets × {FEATURES} features, {size}")
    print(f"{'':<14}{'weights':>9}{'forward':>12}{'+ backward':>12}{'live bar':>11}")
    for kind, best in found.items():
        forward_us, both_us = (best[name] / (BARS * ASSETS) * 1e6 for name in ("forward", "both"))
        print(
            f"{kind:<14}{best['weights']:>9,.0f}{forward_us:>9.1f} µs{both_us:>9.1f} µs"
            f"{best['live'] * 1e3:>8.2f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
