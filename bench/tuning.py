"""Whether `echelon tune` finds a learning rate that works: `python -m bench.tuning`.

A trend market whose drift can be known (`proving.planted`), as a file of bars; 20 trials of one
learning rate over four decades; then the same agent at twelve rates spread over them evenly. What
was found must do as well on the validation window as the best third of these.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from echelon.proving.pipeline import FIRST, write_bars
from echelon.proving.planted import PLANTED
from reliability._clusters import run

LOW, HIGH, RATES = 1e-5, 1e-1, 12
BARS = {"train": (70, 1200), "valid": (1205, 1600), "test": (1605, 1990)}


def main(argv: Sequence[str] = ()) -> int:
    """Tune, train at all the rates, and say in which third the best trial is; 1: not the first."""
    parser = argparse.ArgumentParser(prog="bench.tuning", description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8000, help="of a training")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        market = PLANTED["trend"](n_bars=2000, drift=0.006)  # type: ignore[call-arg]
        write_bars(place / "bars.parquet", market.draw(1, "tuning"), 1)
        (place / "agent.yaml").write_text(yaml.safe_dump(config(given.steps)))
        ranges = {"train.lr_actor": {"low": LOW, "high": HIGH, "log": True}}
        (place / "ranges.yaml").write_text(yaml.safe_dump(ranges))
        began = time.perf_counter()
        words = ("-c", "agent.yaml", "--output-dir")
        trials = ("--trials", str(given.trials))
        run(place, "tune", *words, "runs/tune", "--ranges", "ranges.yaml", *trials)
        seconds = time.perf_counter() - began
        rates = np.geomspace(LOW, HIGH, RATES)
        variants = {
            f"lr-{k:02d}": [f"train.lr_actor={rate!r}"] for k, rate in enumerate(rates.tolist())
        }
        (place / "variants.yaml").write_text(yaml.safe_dump(variants))
        run(place, "ablate", *words, "runs/ablate", "--variants", "variants.yaml")
        scores = [_best(place / "runs/ablate/variants" / name) for name in variants]
        done = [
            json.loads(path.read_text())["best_score"]
            for path in sorted((place / "runs/tune/trials").glob("*/seeds/*/result.json"))
        ]
    found, third = max(done), sorted(scores, reverse=True)[RATES // 3 - 1]
    lines = {
        "trials": len(done),
        "found": round(found, 3),
        "best_third_from": round(third, 3),
        "rates": {f"{rate:.1e}": round(s, 3) for rate, s in zip(rates, scores, strict=True)},
        "seconds": round(seconds, 1),
        "holds": found >= third,
    }
    print(json.dumps(lines, indent=1))
    return 0 if found >= third else 1


def _best(run_directory: Path) -> float:
    (result,) = run_directory.glob("seeds/*/result.json")
    return float(json.loads(result.read_text())["best_score"])


def config(steps: int) -> dict[str, object]:
    """A small flat agent on the market's bars."""
    spans = {
        name: np.busday_offset(np.datetime64(FIRST), [first, stop - 1]).astype(str).tolist()
        for name, (first, stop) in BARS.items()
    }
    return {
        "window": 10,
        "data": {"source": "parquet", "path": "bars.parquet", "calendar": "data", "store": "store"},
        "split": spans,
        "market": {"preset": "paper"},
        "features": {"stationary": {"enabled": True}},
        "model": {"d_model": 16, "n_layers": 1, "hidden": 16},
        "reward": {"scale": 100.0},
        "eval": {"baselines": ["equal_weight"]},
        "train": {
            **{
                "algo": "A2C",
                "gamma": 0.9,
                "books": 8,
                "rollout_steps": 25,
                "seeds": 1,
                "lr_actor": 3.1e-4,
            },
            **{"total_env_steps": steps, "validate_every_steps": steps // 4},
            **{"log_interval_steps": steps // 4, "checkpoint_every_steps": steps},
        },
        "logging": {"output_dir": "runs", "tensorboard": False},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
