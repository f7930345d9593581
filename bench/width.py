"""What an asset costs a learner and a policy of wide universes: at 50, 500 and 1,000 assets.

    python -m bench width
    python -m bench.width --rounds 9

An update of APG with `expert.actor: top_k` (16 books × 40 bars), the backtest of its policy, and a
decision of one book, on drawn markets under the A-share preset. What counts is processor time a
bar, book and asset, the best of some rounds, the widths taking turns. Memory is the peak that a
process of its own adds with one update. It fails where an asset costs more than twice as much
among 500 as among 50: nothing on this path may be larger than books × assets.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.agents.apg import APG
from echelon.backtest.run import run_backtest
from echelon.config import Config, load_config
from echelon.envs.world import World
from echelon.models.encoders import Encoder
from echelon.proving.worlds import drawn_world

WIDTHS = (50, 500, 1_000)
BARS, BOOKS, HORIZON, SCORES, TESTED = 400, 16, 40, 3, 120
LARGEST_RATIO = 2.0
SETTINGS = (
    *("window=1", "train.algo=APG", "expert.actor=top_k", "pretrain.cross_fit=2"),
    *("reward.kind=active", f"train.books={BOOKS}", f"expert.horizon={HORIZON}"),
    *("market.preset=cn", "market.initial_cash=10_000_000"),
)


class ScoresThemselves(Encoder):
    """Embeds a bar as its features, so that no encoder is measured."""

    def __init__(self, config: Config, n_features: int) -> None:
        super().__init__(config, n_features)
        self.d_model = n_features

    def _encode(self, x: Tensor) -> Tensor:
        return x[..., self.window - 1 :, :, :]


class Cost(NamedTuple):
    """Microseconds of processor time a bar, book and asset; a decision in milliseconds."""

    update: float
    backtest: float
    decision: float


def make_world(n_assets: int, config: Config) -> World:
    rng = np.random.default_rng(1)
    steps = rng.normal(0.0, 0.02, (BARS, n_assets))
    close = 20.0 * np.exp(np.cumsum(steps, axis=0))
    opens = np.concatenate([close[:1], close[:-1]])
    x = rng.standard_normal((BARS, n_assets, SCORES)).astype(np.float32)
    return drawn_world(opens, close, x, np.ones(close.shape, dtype=bool), config)


def make_learner(n_assets: int, config: Config) -> APG:
    return APG(config, make_world(n_assets, config), 1, ScoresThemselves(config, SCORES))


def measure(learner: APG, config: Config) -> Cost:
    n, world = learner.world.n_assets, learner.world
    began = time.process_time()
    learner.train_once()
    updated = time.process_time()
    first = world.span("train").start
    run_backtest(learner.policy(), world, range(first, first + TESTED), config)
    done = time.process_time()
    tested = (done - updated) / TESTED
    return Cost((updated - began) / (BOOKS * HORIZON * n) * 1e6, tested / n * 1e6, tested * 1e3)


def peak_memory(n_assets: int) -> float:
    """MB that a learner of so many assets and one update add to a process of their own."""
    command = [sys.executable, "-m", "bench.width", "--memory", str(n_assets)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def print_memory(n_assets: int, config: Config) -> None:
    make_learner(2, config).train_once()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _peak()
    make_learner(n_assets, config).train_once()
    print(_peak() - before)


def _peak() -> float:
    """MB this process had at most, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1e3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, metavar="N", help="print the MB of so many assets")
    args = parser.parse_args(argv or [])
    torch.set_num_threads(1)
    config = load_config(None, list(SETTINGS))
    if args.memory is not None:
        print_memory(args.memory, config)
        return 0
    learners = {n: make_learner(n, config) for n in WIDTHS}
    best: dict[int, Cost] = {}
    for k in range(args.rounds + 1):
        for n, learner in learners.items():
            cost = measure(learner, config)
            if k:  # the first compiles
                best[n] = Cost(*map(min, cost, best.get(n, cost)))
    print(f"{'assets':>8}{'update':>12}{'backtest':>12}{'decision':>12}{'memory':>10}")
    for n, cost in best.items():
        print(
            f"{n:>8,}{cost.update:>9.2f} µs{cost.backtest:>9.2f} µs{cost.decision:>9.2f} ms"
            f"{peak_memory(n):>7.0f} MB"
        )
    narrow, wide = (best[n] for n in WIDTHS[:2])
    ratio = max(wide.update / narrow.update, wide.backtest / narrow.backtest)
    print(f"an asset among {WIDTHS[1]} costs {ratio:.2f} × what it costs among {WIDTHS[0]}")
    return int(ratio > LARGEST_RATIO)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
