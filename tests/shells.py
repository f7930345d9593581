"""The command line in a test: run in-process as `main` would, on a market small enough to train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from markets import CONFIGS, SPLITS

from echelon.cli.app import main


class Shell:
    """Runs the command in-process, as `main` would, in a directory of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys = capsys
        self.monkeypatch = monkeypatch

    def __call__(self, *args: str, columns: int = 200) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `echelon args`."""
        self.monkeypatch.setattr(sys, "argv", ["echelon", *args])
        self.monkeypatch.setenv("COLUMNS", str(columns))
        try:
            main()
            code = 0
        except SystemExit as leave:
            code = int(leave.code or 0)
        out, err = self.capsys.readouterr()
        return code, out, err

    def works(self, *args: str, columns: int = 200) -> tuple[str, str]:
        """stdout and stderr of a command that must succeed."""
        code, out, err = self(*args, columns=columns)
        assert code == 0, err
        return out, err


TINY = (
    *("assets=[AAPL, MSFT, NVDA]", "window=5", "features.indicators={sma: [5]}"),
    *("model.d_model=8", "model.n_layers=2", "model.hidden=8"),
    *("train.books=4", "train.rollout_steps=10", "train.total_env_steps=800"),
    *("train.lr_actor=0.01", "train.lr_critic=0.01", "train.log_interval_steps=100"),
    *("train.validate_every_steps=200", "train.checkpoint_every_steps=200"),
    *("logging.tensorboard=false", "eval.baselines=[cash, equal_weight]"),
    "eval.deterministic=false",  # so that an agent that learned nothing trades too
)
"""qtmrl.yaml made small: three assets, a network of a few weights, a second of training."""


def tiny(bars: Path, *more: str) -> list[str]:
    """Options of a command: the tiny configuration on a file of bars, with more overrides."""
    overrides = ("data.source=parquet", f"data.path={bars}", SPLITS, *TINY, *more)
    words = [word for item in overrides for word in ("-o", item)]
    return ["--config", str(CONFIGS / "qtmrl.yaml"), *words]
