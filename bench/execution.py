"""The execution simulator and a learned policy's rollout, steps per second, against Qlib's.

    python -m bench execution
    python -m bench.execution --rounds 5

Days of 240 minutes, 30 ticks a step, the same prices and volumes, one core each. A step is one
order's: ours are of E orders at once, with all their ticks recorded, against Qlib's
`SingleAssetOrderExecutionSimple`; and with a policy that reads the day and its own position,
samples an action and is paid, against Qlib's interpreters, recurrent network and reward (of Qlib's
training loop only what a step cannot do without, see `bench/_qlib.py`). Both simulators must have
executed the same. Making orders and days does not count; processor time of the best round does.

Qlib's wheel and its training library's are unpacked, not installed (`bench/_peers.py`).

Fails under 500× (simulator, E=1,024) or 50× (policy, E=1,024).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench import _peers
from echelon.agents.execution.learner import ExecutionTask
from echelon.agents.execution.network import NetworkSettings
from echelon.agents.execution.ppo import PPO
from echelon.config.execution import ExecutionLearnerConfig
from echelon.execution import (
    Days,
    ExecutionRules,
    PAPenalty,
    ParentOrders,
    Simulator,
    parent_orders,
)
from echelon.execution.features import PublicArrays

DAYS, TICKS, SEED = 64, 240, 7
SIMULATORS = (1, 64, 1024, 8192)
POLICIES = (1, 64, 1024, 4096)
FEATURES = 6
GOALS = {"simulator": 500.0, "policy": 50.0}
AT = 1024
"""Orders side by side at which the goals are measured."""
QLIB, TRAINER = "pyqlib==0.9.7", "tianshou==0.4.10"
"""Qlib imports its training library, of which these loops use nothing."""
NEEDS = (
    *("numpy", "pandas", "torch", "gym==0.26.2", "h5py", "numba", "ruamel.yaml"),
    *(
        "joblib",
        "tensorboard",
        "python-redis-lock",
        "requests",
        "filelock",
        "dill",
        "tqdm",
        "pyyaml",
        "loguru",
        "fire",
    ),
    *("cachetools", "mlflow-skinny", "pydantic-settings", "scipy", "redis", "setuptools_scm"),
)


def market() -> Days:
    """Days of one symbol that wander, with volumes that differ."""
    rng = np.random.default_rng(SEED)
    price = 100.0 * np.exp(rng.normal(0.0, 0.001, (DAYS, TICKS)).cumsum(axis=1))
    return Days.from_prices(price, np.floor(rng.exponential(1000.0, price.shape)) + 100.0)


def whole_days(n_orders: int) -> ParentOrders:
    """Sells of 30 shares, over the whole of a day each."""
    return parent_orders(np.arange(n_orders) % DAYS, 30.0, False, 0, TICKS)


def simulator_rate(days: Days, n_orders: int) -> float:
    """Steps of orders per second."""
    rules, orders = ExecutionRules(), whole_days(n_orders)
    n_steps = TICKS // rules.ticks_per_step
    even = np.full(n_orders, 30.0 / n_steps)
    rates = []
    for _ in range(3):
        repeats = max(1, 4096 // n_orders)
        began = time.process_time()
        for _ in range(repeats):
            simulator = Simulator(days, orders, rules)
            while not simulator.over:
                simulator.step(even)
        rates.append(repeats * n_orders * n_steps / (time.process_time() - began))
    return max(rates)


def policy_rate(days: Days, n_orders: int) -> float:
    """Steps of orders per second: look, decide, trade, be paid; the days are encoded in it."""
    rng = np.random.default_rng(SEED)
    today = rng.standard_normal((*days.buy.shape, FEATURES)).astype(np.float32)
    task = ExecutionTask(
        days, PublicArrays(today, today), whole_days(n_orders), ExecutionRules(), PAPenalty()
    )
    learner = PPO(ExecutionLearnerConfig(orders=n_orders), NetworkSettings(), task, SEED)
    rates = []
    for _ in range(3):
        began = time.process_time()
        steps = int(learner.collect().taken.sum())
        rates.append(steps / (time.process_time() - began))
    return max(rates)


def qlib_rates(days: Days) -> dict[str, list[float]]:
    """Rates of Qlib's loops, and what its simulator executed."""
    python = _peers.environment("qlib", NEEDS)
    wheels = [_peers.unpacked("Qlib", one) for one in (QLIB, TRAINER)]
    script = Path(__file__).with_name("_qlib.py")
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / name for name in ("prices.npy", "volumes.npy")]
        for file, array in zip(files, (days.sell, days.volume), strict=True):
            np.save(file, array)
        done = subprocess.run(
            [str(python), str(script), *map(str, (*files, *wheels))],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"Qlib's side failed:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main(argv: list[str] | None = None) -> int:
    """Print rates and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    # `python -m bench execution` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    torch.set_num_threads(1)
    days = market()
    theirs = dict.fromkeys(GOALS, 0.0)
    ours: dict[tuple[str, int], float] = {}
    for _ in range(max(1, args.rounds)):
        found = qlib_rates(days)
        np.testing.assert_allclose(found["executed"], [30.0 / 8] * 8)
        for name in GOALS:
            theirs[name] = max(theirs[name], *found[name])
        for n_orders in SIMULATORS:
            key = ("simulator", n_orders)
            ours[key] = max(ours.get(key, 0.0), simulator_rate(days, n_orders))
        for n_orders in POLICIES:
            key = ("policy", n_orders)
            ours[key] = max(ours.get(key, 0.0), policy_rate(days, n_orders))
    print(f"{DAYS} days of {TICKS} ticks, 30 a step, one core, best of {args.rounds} rounds")
    print(f"{'':<34}{'steps/s':>14}{'ratio':>10}{'goal':>8}")
    good = True
    for name, goal in GOALS.items():
        print(f"{f'Qlib, {name}':<34}{theirs[name]:>14,.0f}{1:>9}×")
        for (kind, n_orders), rate in ours.items():
            if kind != name:
                continue
            ratio = rate / theirs[name]
            wanted = f"{goal:>7,.0f}×" if n_orders == AT else ""
            good &= n_orders != AT or ratio >= goal
            print(f"{f'ours, {name}, E={n_orders:,}':<34}{rate:>14,.0f}{ratio:>9,.0f}×{wanted}")
    print(f"goals: {'met' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
