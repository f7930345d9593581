"""SAC and TD3 against Stable-Baselines3's on Gymnasium's Pendulum: the same return within noise?

    python -m bench pendulum
    python -m bench.pendulum --directory DIR --algo SAC --side ours --seed 0
    python -m bench.pendulum --directory DIR --summary

Both sides have the same networks (two layers of 64), the same settings (learning rate 1e-3, batches
of 256, γ 0.99, τ 0.005, one update a step after 1,000 steps by lot; TD3 with exploration noise
0.1), the same number of steps and one thread; ours without warm-up and clipping, which SB3 has
not. Each final policy is judged without noise from the same 20 starting states.

A run writes one file, DIR/ALGO-SIDE-SEED.json, whole or not at all; one that is there is not run
again, so runs can be spread over processes and taken up later. `--algo`, `--side` and `--seed` may
be repeated and default to all of them; without `--directory` everything is run afresh.

Fails where, over the seeds, the 95 % interval (Welch) of the difference in mean return lies below
zero: ours would be worse.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import stable_baselines3 as sb3
import torch
from numpy.typing import NDArray
from scipy import stats
from stable_baselines3.common.noise import NormalActionNoise
from torch import Tensor

from bench._control import GaussianMLP, Ring, TwinMLP, core_settings
from echelon.agents.offpolicy import OffPolicy
from echelon.agents.sac import SAC
from echelon.agents.td3 import TD3
from echelon.files import write_atomic
from echelon.rng import stream

ALGOS: dict[str, type[OffPolicy]] = {"SAC": SAC, "TD3": TD3}
SIDES = ("ours", "sb3")
SEEDS = 5
STEPS = 10_000
TASK, N_OBS, N_ACTIONS, STRONGEST = "Pendulum-v1", 3, 1, 2.0
HIDDEN, LR, BATCH, GAMMA, TAU, NOISE, STARTS = (64, 64), 1e-3, 256, 0.99, 0.005, 0.1, 1_000
JUDGED_FROM = range(10_000, 10_020)
"""Seeds of the starting states on which policies are judged."""

Policy = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""Observations [B,O] → torques [B,A]."""


class Outcome(NamedTuple):
    """A trained policy, the processor time it took, and the return from each starting state."""

    policy: Policy
    seconds: float
    returns: list[float]


def train_ours(algo: str, seed: int, steps: int) -> Policy:
    """Collect a step, learn from a batch, and again."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(seed, "weights").integers(2**62)))
        actor = GaussianMLP(N_OBS, N_ACTIONS, HIDDEN)
        critic = TwinMLP(N_OBS, N_ACTIONS, HIDDEN)
    settings = core_settings(
        lr_actor=LR,
        lr_critic=LR,
        tau=TAU,
        exploration_noise=NOISE,
        grad_clip=math.inf,
        warmup_updates=0,
    )
    core = ALGOS[algo](actor, critic, *settings, seed)
    acting = torch.Generator().manual_seed(int(stream(seed, "actions").integers(2**62)))
    lots = stream(seed, "lots")
    ring = Ring(steps, N_OBS, N_ACTIONS)
    env = gymnasium.make(TASK)
    obs, _ = env.reset(seed=seed)
    for step in range(steps):
        if step < STARTS:
            action = lots.uniform(-1.0, 1.0, N_ACTIONS).astype(np.float32)
        else:
            action = core.act(torch.from_numpy(obs)[None], acting, explore=True).action[0].numpy()
        after, reward, terminated, truncated, _ = env.step(STRONGEST * action)
        ring.add(obs, action, float(reward), 0.0 if terminated else GAMMA, after)
        obs = env.reset()[0] if terminated or truncated else after
        if step >= STARTS:
            core.update(ring.sample(BATCH, lots), want_metrics=False)
    env.close()

    def policy(seen: NDArray[np.float32]) -> NDArray[np.float32]:
        action: Tensor = core.act(torch.from_numpy(seen), acting, explore=False).action
        return STRONGEST * action.numpy()

    return policy


def train_sb3(algo: str, seed: int, steps: int) -> Policy:
    """The same by Stable-Baselines3."""
    env = gymnasium.make(TASK)
    noise = NormalActionNoise(np.zeros(N_ACTIONS), np.full(N_ACTIONS, NOISE))
    learner: Any = getattr(sb3, algo)(
        "MlpPolicy",
        env,
        learning_rate=LR,
        batch_size=BATCH,
        gamma=GAMMA,
        tau=TAU,
        learning_starts=STARTS,
        buffer_size=steps,
        train_freq=1,
        gradient_steps=1,
        action_noise=noise if algo == "TD3" else None,
        policy_kwargs={"net_arch": list(HIDDEN)},
        seed=seed,
        device="cpu",
    )
    learner.learn(steps)
    env.close()
    return lambda seen: learner.predict(seen, deterministic=True)[0]


def judge(policy: Policy, seeds: Sequence[int] = JUDGED_FROM) -> list[float]:
    """Return of an episode from each starting state, all of them side by side."""
    envs = [gymnasium.make(TASK) for _ in seeds]
    obs = np.stack([env.reset(seed=k)[0] for env, k in zip(envs, seeds, strict=True)])
    total = np.zeros(len(envs))
    over = False
    while not over:
        results = [env.step(a) for env, a in zip(envs, policy(obs), strict=True)]
        obs = np.stack([result[0] for result in results])
        total += [float(result[1]) for result in results]
        over = any(result[2] or result[3] for result in results)  # all last equally long
    for env in envs:
        env.close()
    return [float(value) for value in total]


def run(algo: str, side: str, seed: int, steps: int) -> Outcome:
    """Train and judge one policy."""
    started = time.process_time()
    policy = (train_ours if side == "ours" else train_sb3)(algo, seed, steps)
    seconds = time.process_time() - started
    return Outcome(policy, seconds, judge(policy))


def run_into(directory: Path, algo: str, side: str, seed: int, steps: int) -> None:
    """Run what is not there yet, and write its line."""
    path = directory / f"{algo}-{side}-{seed}.json"
    if path.exists():
        return
    outcome = run(algo, side, seed, steps)
    line = {
        "algo": algo,
        "side": side,
        "seed": seed,
        "steps": steps,
        "seconds": outcome.seconds,
        "mean": float(np.mean(outcome.returns)),
        "returns": outcome.returns,
    }
    write_atomic(path, json.dumps(line) + "\n")
    print(
        f"{algo} {side} seed {seed}: return {line['mean']:.1f}, {outcome.seconds:.0f} s", flush=True
    )


def summary(directory: Path, algos: Sequence[str]) -> bool:
    """Print the table of what is there; whether ours is nowhere worse."""
    lines = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    print(f"{TASK}, mean return of {len(JUDGED_FROM)} episodes, ± standard deviation over seeds")
    print(f"{'':4} {'seeds':>7} {'steps':>7} {'ours':>16} {'SB3':>16} ", end="")
    print(f"{'difference [95 %]':>28} {'time ours':>10} {'SB3':>7} {'ratio':>6}")
    good = True
    for algo in algos:
        sides = [[x for x in lines if x["algo"] == algo and x["side"] == side] for side in SIDES]
        if not all(sides):
            missing = " and ".join(s for s, x in zip(SIDES, sides, strict=True) if not x)
            raise SystemExit(f"{directory}: no run of {algo} by {missing}. Run it first.")
        steps = {x["steps"] for side in sides for x in side}
        if len(steps) > 1:
            raise SystemExit(f"{directory}: runs of {algo} have different lengths: {steps}.")
        ours, theirs = (np.array([x["mean"] for x in side]) for side in sides)
        low, high = _difference(ours, theirs)
        spent = [float(np.mean([x["seconds"] for x in side])) for side in sides]
        shown = [f"{x.mean():.1f} ± {_deviation(x):.1f}" for x in (ours, theirs)]
        print(f"{algo:4} {len(ours):>3}+{len(theirs):<3} {steps.pop():>7,} ", end="")
        print(f"{shown[0]:>16} {shown[1]:>16} ", end="")
        print(f"{ours.mean() - theirs.mean():>9.1f} [{low:>7.1f}, {high:>7.1f}] ", end="")
        print(f"{spent[0]:>8.0f} s {spent[1]:>5.0f} s {spent[1] / spent[0]:>5.2f}×")
        good &= not high < 0.0
    return good


def _deviation(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def _difference(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the difference of means (Welch); without two seeds each, unknown."""
    if min(len(ours), len(theirs)) < 2:
        return math.nan, math.nan
    interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return float(interval.low), float(interval.high)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where runs are kept")
    parser.add_argument("--algo", action="append", choices=[*ALGOS])
    parser.add_argument("--side", action="append", choices=SIDES)
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--summary", action="store_true", help="print the table of what is there")
    # `python -m bench pendulum` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    if args.summary and args.directory is None:
        parser.error("--summary needs --directory")
    torch.set_num_threads(1)
    algos, sides = args.algo or [*ALGOS], args.side or SIDES
    seeds = args.seed if args.seed is not None else range(SEEDS)
    with tempfile.TemporaryDirectory() as afresh:
        directory = args.directory or Path(afresh)
        if not args.summary:
            for seed in seeds:
                for algo in algos:
                    for side in sides:
                        run_into(directory, algo, side, seed, args.steps)
        whole = args.side is None and args.seed is None
        return 0 if not (args.summary or whole) or summary(directory, algos) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
