"""FinRL's StockTradingEnv on given closes; run by `bench/kernel.py` in FinRL's own environment.

    python bench/_finrl.py ENV_MODULE CLOSES.npy

ENV_MODULE is the file `env_stocktrading.py` of an unpacked wheel, loaded alone: the package itself
imports brokers, data vendors and agents, and does not import whole. Parameters are those of
FinRL's tutorials (hmax 100, a million, 0.1 % a side, reward scaling 1e-4). Prints a JSON object:
threshold ("none" as in training, "70" as in trading) → steps/s of each episode (processor time).
Making the frame, the environment and the actions does not count. Nothing of Echelon is imported.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

import numpy as np
import pandas as pd

EPISODES = 3
INDICATORS = ["macd", "rsi_30", "cci_30", "dx_30"]


def frame_of(close: np.ndarray, rng: np.random.Generator) -> pd.DataFrame:
    """Closes [T,N] in FinRL's long format, its index the number of the day."""
    days, assets = close.shape
    dates = pd.bdate_range("2010-01-04", periods=days).strftime("%Y-%m-%d")
    tics = [f"T{n:02d}" for n in range(assets)]
    frame = pd.DataFrame(
        {"date": np.repeat(dates, assets), "tic": np.tile(tics, days), "close": close.ravel()}
    )
    for name in INDICATORS:
        frame[name] = rng.standard_normal(close.size)
    # Below every threshold: the environment looks at it, and trades on.
    frame["turbulence"] = np.repeat(rng.uniform(0, 60, days), assets)
    frame.index = np.repeat(np.arange(days), assets)
    return frame


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("env_stocktrading", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def episode(env: Any, actions: np.ndarray) -> float:
    """Steps per second of processor time, in one episode."""
    env.reset()
    began = time.process_time()
    for action in actions:
        env.step(action)
    seconds = time.process_time() - began
    assert not env.terminal, "the episode ended early"
    assert env.trades > len(actions), "it did not trade"
    return len(actions) / seconds


def main() -> None:
    module, close = load(sys.argv[1]), np.load(sys.argv[2])
    days, assets = close.shape
    rng = np.random.default_rng(11)
    frame = frame_of(close, rng)
    rates = {}
    for threshold in (None, 70):
        env = module.StockTradingEnv(
            df=frame,
            stock_dim=assets,
            hmax=100,
            initial_amount=1_000_000,
            num_stock_shares=[0] * assets,
            buy_cost_pct=[0.001] * assets,
            sell_cost_pct=[0.001] * assets,
            reward_scaling=1e-4,
            state_space=1 + 2 * assets + len(INDICATORS) * assets,
            action_space=assets,
            tech_indicator_list=INDICATORS,
            turbulence_threshold=threshold,
        )
        actions = rng.uniform(-1, 1, (days - 2, assets)).astype(np.float32)
        episode(env, actions[:20])
        rates[str(threshold).lower()] = [episode(env, actions) for _ in range(EPISODES)]
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
