"""Train Stable-Baselines3's PPO on Echelon's market, on the bundled sample of 20 US stocks.

    python examples/train_with_sb3.py --steps 50000

Sixteen books trade the train window side by side, each started anywhere in it; the trained policy
then trades the validation window once, from its first bar to its last. Other learners take PPO's
place as they are: A2C, sb3-contrib's MaskablePPO, or, with actions="weights", SAC.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from stable_baselines3 import PPO

from echelon.config import load_config
from echelon.envs import BatchedVecEnv, TradingEnv, world_of
from echelon.features import prepare

DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo.yaml"


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, trade the validation window, and return how that went."""
    parser = argparse.ArgumentParser(description="PPO on the bundled sample")
    parser.add_argument("--steps", type=int, default=50_000, help="environment steps")
    parser.add_argument("--books", type=int, default=16, help="books trained on side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/sb3"))
    given = parser.parse_args(arguments)

    config = load_config(DEMO, ["reward.scale=100"])
    world = world_of(prepare(config, given.output_dir).prepared, config)

    env = BatchedVecEnv(world, config, given.books, episode_steps=252)
    model = PPO(
        "MultiInputPolicy",
        env,
        n_steps=128,
        batch_size=256,
        gamma=0.96,
        policy_kwargs={"net_arch": [64, 64]},
        seed=given.seed,
        device="cpu",
    )
    model.learn(given.steps)
    model.save(given.output_dir / "ppo.zip")

    book = TradingEnv(world, config, split="valid")
    seen, info = book.reset()
    over = False
    while not over:
        action, _ = model.predict(seen, deterministic=True)
        seen, _, terminated, truncated, info = book.step(action)
        over = terminated or truncated
    result = {
        "total_return": info["pv"] / world.initial_cash - 1.0,
        "sharpe_annual": info["sharpe_annual"],
        "max_drawdown": info["max_drawdown"],
        "costs": sum(info["costs"]["total"].values()),
    }
    console = Console()
    console.print(f"validation window, up to {info['time']:%Y-%m-%d}:")
    for name, value in result.items():
        console.print(f"  {name:<14} {value:,.3f}")
    return result


if __name__ == "__main__":
    main()
