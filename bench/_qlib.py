"""Qlib's order-execution simulator and policy loop; run by `bench/execution.py` in Qlib's own
environment.

    python bench/_qlib.py PRICES.npy VOLUMES.npy WHEEL_DIRECTORY …

WHEEL_DIRECTORY: unpacked wheels of Qlib and of what it imports. Days are handed over in memory, so
that none of Qlib's loading counts. Two loops over the same orders, a half-hour a step:

    simulator   `SingleAssetOrderExecutionSimple` alone, a fixed share of the order a step
    policy      the same with `FullHistoryStateInterpreter`, `Recurrent` under a categorical head,
                `CategoricalActionInterpreter` and `PAPenaltyReward`, as its PPO collects; without
                the collector of the training library, which would add to it

Prints a JSON object: loop → steps/s of each round (processor time), and what the simulator executed
in its first order, for the comparison. Nothing of Echelon is imported.
"""

from __future__ import annotations

import json
import sys
import time
import types
from typing import Any

import numpy as np
import pandas as pd
import torch

ROUNDS, SIMULATED, DECIDED = 3, 60, 24
"""Orders of a round of each loop."""
TICKS, FEATURES = 30, 6


def orders_of(qlib: Any, index: pd.DatetimeIndex, count: int) -> list[Any]:
    """Whole-day sells of 30 shares."""
    end = index[-1] + pd.Timedelta(minutes=1)
    return [qlib.Order("SYM", 30.0, qlib.OrderDir.SELL, index[0], end) for _ in range(count)]


def main() -> None:
    """Both loops, in turn."""
    torch.set_num_threads(1)
    prices, volumes = np.load(sys.argv[1]), np.load(sys.argv[2])
    sys.path[:0] = sys.argv[3:]
    from qlib.backtest.decision import Order, OrderDir
    from qlib.rl.data.base import BaseIntradayProcessedData, ProcessedDataProvider
    from qlib.rl.data.native import DataframeIntradayBacktestData
    from qlib.rl.order_execution.interpreter import (
        CategoricalActionInterpreter,
        FullHistoryStateInterpreter,
    )
    from qlib.rl.order_execution.network import Recurrent
    from qlib.rl.order_execution.reward import PAPenaltyReward
    from qlib.rl.order_execution.simulator_simple import SingleAssetOrderExecutionSimple

    index = pd.date_range("2020-01-06 09:30", periods=prices.shape[1], freq="min")
    frames = [
        pd.DataFrame({"$close0": price, "$volume0": volume}, index=index)
        for price, volume in zip(prices, volumes, strict=True)
    ]

    class Simulator(SingleAssetOrderExecutionSimple):  # type: ignore[misc]
        day = 0

        def get_backtest_data(self) -> Any:
            return DataframeIntradayBacktestData(frames[Simulator.day % len(frames)])

    class Provider(ProcessedDataProvider):  # type: ignore[misc]
        def get_data(self, stock_id: str, date: Any, feature_dim: int, time_index: Any) -> Any:
            data = BaseIntradayProcessedData()
            data.today = pd.DataFrame(features, index=index)
            data.yesterday = pd.DataFrame(features, index=index)
            return data

    features = np.random.default_rng(0).standard_normal((len(index), FEATURES)).astype(np.float32)
    n_steps = len(index) // TICKS
    qlib = types.SimpleNamespace(Order=Order, OrderDir=OrderDir)
    interpreter = FullHistoryStateInterpreter(n_steps, len(index), FEATURES, Provider())
    act, reward = CategoricalActionInterpreter(4, n_steps), PAPenaltyReward(100.0)
    silent = types.SimpleNamespace(add_scalar=lambda *_, **__: None)
    reward.env = types.SimpleNamespace(logger=silent)
    network = Recurrent(interpreter.observation_space)
    head = torch.nn.Linear(network.output_dim, act.action_space.n)

    def simulate() -> tuple[float, list[float]]:
        steps, executed = 0, []
        began = time.process_time()
        for order in orders_of(qlib, index, SIMULATED):
            Simulator.day += 1
            simulator = Simulator(order, None, ticks_per_step=TICKS)
            while not simulator.done():
                simulator.step(order.amount / n_steps)
                steps += 1
        executed = simulator.history_steps["deal_amount"].tolist()
        return steps / (time.process_time() - began), executed

    def decide() -> float:
        steps = 0
        began = time.process_time()
        for order in orders_of(qlib, index, DECIDED):
            Simulator.day += 1
            simulator = Simulator(order, None, ticks_per_step=TICKS)
            while not simulator.done():
                seen = interpreter(simulator.get_state())
                batch = {
                    name: torch.as_tensor(np.asarray(value))[None] for name, value in seen.items()
                }
                with torch.no_grad():
                    chosen = torch.multinomial(torch.softmax(head(network(batch)), dim=-1), 1)
                asked = act(simulator.get_state(), int(chosen))
                simulator.step(float(asked))
                reward(simulator.get_state())
                steps += 1
        return steps / (time.process_time() - began)

    found: dict[str, Any] = {"simulator": [], "policy": []}
    for _ in range(ROUNDS):
        rate, found["executed"] = simulate()
        found["simulator"].append(rate)
        found["policy"].append(decide())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
