"""What `reliability.kill` kills: the commands, on the smallest worlds in which each does its work.

Every command runs in a directory of its own with relative paths only, so that what two runs leave
can be compared. It begins with what another command left (`after`), or with the bare world:

    bars.csv, later.csv    three stocks on two years of days, and from their last day on
    *.yaml                 configurations of agents so small that they train in a second
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

SYMBOLS = ("AAPL", "MSFT", "NVDA")
FIRST, SEAM, LAST = date(2015, 1, 2), date(2016, 12, 30), date(2017, 3, 31)

TRAIN: dict[str, Any] = {
    "books": 4,
    "rollout_steps": 10,
    "total_env_steps": 320,
    "lr_actor": 0.01,
    "lr_critic": 0.01,
    "log_interval_steps": 80,
    "validate_every_steps": 80,
    "checkpoint_every_steps": 80,
    "keep_checkpoints": 2,
    "seeds": 1,
}
FLAT: dict[str, Any] = {
    "seed": 42,
    "assets": list(SYMBOLS),
    "window": 5,
    "data": {
        "source": "csv",
        "path": "bars.csv",
        "dataset": "market",
        "store": "store",
        "cache": {"dir": "cache"},
    },
    "split": {
        "train": ["2015-01-02", "2016-01-29"],
        "valid": ["2016-02-01", "2016-06-30"],
        "test": ["2016-07-01", "2016-12-30"],
    },
    "features": {"indicators": {"sma": [5]}},
    "model": {"encoder": "TimeCNN", "d_model": 8, "n_layers": 1, "hidden": 8},
    "train": TRAIN,
    "eval": {"baselines": ["cash", "equal_weight"], "deterministic": False},
    "logging": {"output_dir": "runs", "tensorboard": False},
}
EXPERT: dict[str, Any] = FLAT | {
    "model": {"encoder": "TimeCNN", "d_model": 8, "n_layers": 1},
    "pretrain": {"epochs": 1, "pass_rows": 64},
    "expert": {
        "hidden": 8,
        "batch_size": 16,
        "learning_starts": 40,
        "updates_per_step": 0.1,
        "warmup_updates": 0,
    },
    "train": TRAIN | {"algo": "SAC", "episode_steps": 40},
}
HIERARCHY: dict[str, Any] = EXPERT | {
    "expert": EXPERT["expert"] | {"learning_starts": 16},
    "experts": {
        "n_experts": 2,
        "skill_dim": 4,
        "responsibility_bars": 5,
        "sharing": {"buffer_size": 3000, "sequence_steps": 3, "fresh_steps": 200},
    },
    "meta_router": {
        "n_steps": 32,
        "n_envs": 4,
        "batch_size": 16,
        "episode_decisions": 4,
        "every_bars": 2,
        "horizons": [2, 5],
    },
    "lora": {"enabled": False},
    "trainer": {
        "round_steps": 16,
        "probe_states": 12,
        "workers": 2,
        "evolution": {"windows": 2},
        "training_schedule": {
            "experts": {"freq": 2, "steps": 16},
            "router": {"freq": 4, "steps": 32},
            "population": {"freq": 3, "mutation_rate": 0.1},
        },
    },
    "train": TRAIN
    | {
        "algo": "HIERARCHY",
        "episode_steps": 12,
        "gamma": 0.9,
        "lr_actor": 0.003,
        "lr_critic": 0.003,
        "total_env_steps": 192,
        "validate_every_steps": 96,
        "checkpoint_every_steps": 48,
    },
}
WALK: dict[str, Any] = FLAT | {
    "train": TRAIN | {"total_env_steps": 160},
    "walk_forward": {
        "unit": "month",
        "train": 9,
        "valid": 3,
        "test": 2,
        "first_test": None,
        "last_test": "2016-04-30",
        "embargo_bars": 3,
    },
}
EXECUTION: dict[str, Any] = {
    "seed": 42,
    "data": {
        "source": "synthetic",
        "freq": "5min",
        "store": "store",
        "cache": {"dir": "cache"},
        "synthetic": {
            "n_symbols": 2,
            "n_days": 60,
            "minutes_per_day": 390,
            "delistings": 0.0,
            "late_listings": 0.0,
            "suspension_rate": 0.0,
        },
    },
    "split": {
        "train": ["2015-01-05", "2015-02-13"],
        "valid": ["2015-02-16", "2015-03-06"],
        "test": ["2015-03-09", "2015-03-31"],
    },
    "execution": {
        "ticks_per_step": 15,
        "hidden": 8,
        "orders": {"per_day": 2},
        "learner": {
            "memory": 64,
            "minibatches": 2,
            "total_steps": 600,
            "validate_every": 200,
            "orders": 48,
            "epochs": 2,
        },
    },
    "logging": {"output_dir": "runs", "tensorboard": False},
}
CONFIGS = {
    "flat": FLAT,
    "expert": EXPERT,
    "hierarchy": HIERARCHY,
    "walk": WALK,
    "execution": EXECUTION,
}


@dataclass(frozen=True)
class Command:
    """A command to kill.

    after: the command whose result it begins with; None: with the bare world
    resume: how to go on once the file `begun` is there; empty: by the same command again
    exits: codes of a run that came to its end (a tiny agent does not pass a proof: 1)
    prepare: done in the process before the command; a proof of seconds has to be asked for so
    has_workers: it starts processes, which are killed too
    """

    name: str
    argv: tuple[str, ...]
    after: str | None = None
    begun: str = ""
    resume: tuple[str, ...] = ()
    exits: tuple[int, ...] = (0,)
    prepare: Callable[[], None] | None = field(default=None, compare=False)
    has_workers: bool = False

    def argv_again(self, directory: Path) -> tuple[str, ...]:
        """What a user types after a kill: --resume where there is something to go on with."""
        return self.resume if self.resume and (directory / self.begun).exists() else self.argv


def shrink_proof() -> None:
    """Give `prove --quick` sizes of seconds; they travel to the workers with each part."""
    from echelon.proving import prove
    from echelon.proving.null import NullMarket, NullWindows

    tiny = replace(
        prove.QUICK,
        planted_seeds=2,
        planted_steps=400,
        validations=1,
        null_draws=4,
        claim_draws=2,
        costly_seeds=1,
        costly_steps=(400, 200),
        n_draws=2,
        n_bars=200,
        null_market=NullMarket(windows=NullWindows(120, 80, 80)),
        null_steps=200,
        costly_valid_bars=150,
        chunk=2,
    )
    prove.QUICK = tiny


def _training(
    name: str, config: str, *more: str, after: str = "import", workers: bool = False
) -> Command:
    run = f"runs/{name}"
    return Command(
        name,
        ("train", "-c", f"{config}.yaml", "--output-dir", run, *more),
        after=after,
        begun=f"{run}/config.yaml",
        resume=("train", "--resume", run, *more),
        has_workers=workers,
    )


def _batch(verb: str, stem: str, *more: str, config: str = "flat") -> Command:
    run = f"runs/{verb}"
    options = ("--workers", "1")
    return Command(
        verb,
        (verb, "-c", f"{config}.yaml", "--output-dir", run, *more, *options),
        after="import",
        begun=f"{run}/{stem}.json",
        resume=(verb, "--resume", run, *options),
    )


_PROOF = ("window=8", "train.rollout_steps=10", "train.books=4", "train.offset_groups=2")
_PROOF_AGENT = ("model.d_model=8", "model.n_layers=1", "model.hidden=8", "train.episode_steps=40")
_PROOF_LOG = ("train.log_interval_steps=200", "logging.tensorboard=false")
_PROOF_OPTIONS = tuple(
    word for item in (*_PROOF, *_PROOF_AGENT, *_PROOF_LOG) for word in ("-o", item)
)

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command("import", ("data", "import", "csv", "bars.csv", "-c", "flat.yaml")),
        Command(
            "update",
            ("data", "import", "csv", "later.csv", "-c", "flat.yaml", "--update"),
            after="import",
        ),
        Command("prepare", ("prepare", "-c", "flat.yaml", "--output-dir", "runs/prepare")),
        _training("train-flat", "flat", "--workers", "1"),
        _training("train-seeds", "flat", "--workers", "2", "--seeds", "2", workers=True),
        _training("train-expert", "expert", "--workers", "1"),
        _training("train-hierarchy", "hierarchy", "--workers", "1", workers=True),
        Command("evaluate", ("evaluate", "runs/train-flat", "--split", "test"), after="train-flat"),
        Command("report", ("report", "runs/train-flat"), after="evaluate"),
        _batch("walk-forward", "walk_forward", config="walk"),
        _batch("ablate", "ablation", "--variants", "variants.yaml"),
        _batch("compare", "comparison", "--agents", "a2c,sac", config="expert"),
        Command(
            "prove",
            (
                *("prove", "planted", "null", "--quick", "--workers", "1"),
                *("--output-dir", "runs/prove", *_PROOF_OPTIONS),
            ),
            exits=(0, 1),
            prepare=shrink_proof,
        ),
        Command(
            "execution",
            (
                *("execution", "train", "-c", "execution.yaml"),
                *("--output-dir", "runs/x", "--workers", "1"),
            ),
            begun="runs/x/config.yaml",
            resume=("execution", "train", "--resume", "runs/x", "--workers", "1"),
        ),
    )
}


def write_world(directory: Path) -> None:
    """The bare world: bars of two years and of three months more, and the configurations."""
    import numpy as np
    import yaml

    from echelon.data.calendars import sessions

    rng = np.random.default_rng(7)
    days = [time.item() for time in sessions("XNYS", FIRST, LAST).astype("datetime64[D]")]
    rows = []
    for symbol in SYMBOLS:
        close = 20 * np.exp(np.cumsum(rng.normal(0.0005, 0.012, len(days))))
        spread = 1 + rng.exponential(0.004, (2, len(days)))
        volume = rng.integers(1_000, 100_000, len(days))
        rows += [
            (day, symbol, c, c * up, c / down, c, v)
            for day, c, up, down, v in zip(days, close, *spread, volume, strict=True)
        ]
    header = ("date", "symbol", "open", "high", "low", "close", "volume")
    for name, first, last in (("bars.csv", FIRST, SEAM), ("later.csv", SEAM, LAST)):
        with (directory / name).open("w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(header)
            writer.writerows(row for row in rows if first <= row[0] <= last)
    for name, tree in CONFIGS.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    variants = "gamma: [train.gamma=0.5]\n"
    (directory / "variants.yaml").write_text(variants, encoding="utf-8")
