"""Backtests: one function that runs any policy over a span of bars, and what came of it."""

from echelon.backtest.baselines import make_baseline, run_baselines
from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest

__all__ = ["Backtest", "Policy", "make_baseline", "run_backtest", "run_baselines"]
