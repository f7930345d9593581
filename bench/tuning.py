"""Whether `echelon tune` finds a learning rate that works: `python -m bench.tuning`.

A trend market whose drift can be known (`proving.planted`), as a file of bars; 20 trials of one
learning rate over four decades; then, with seeds that the search did not see, the same agent at
the rate of its best trial and at twelve rates spread over them evenly. Of the twelve, the one next
to the found rate must be among the best third by the mean over seeds on the validation window. The
found rate's own mean is shown beside it: many rates do about equally well, so it may fall short of
the third's edge by less than seeds differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from math import log
from pathlib import Path

import numpy as np
import yaml

from echelon.evaluation.tuning import Tuning
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
    parser.add_argument("--seeds", type=int, default=5, help="of the comparison")
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
        best = Tuning.open(place / "runs/tune").read_result().best
        assert best is not None, "no trial came to its end"
        chosen = float(best.settings["train.lr_actor"])
        rates = [chosen, *np.geomspace(LOW, HIGH, RATES).tolist()]
        variants = {f"lr-{k:02d}": [f"train.lr_actor={rate!r}"] for k, rate in enumerate(rates)}
        (place / "variants.yaml").write_text(yaml.safe_dump(variants))
        fresh = ("--seeds", str(given.seeds), "-o", "seed=1000")
        run(place, "ablate", *words, "runs/ablate", "--variants", "variants.yaml", *fresh)
        own, *others = [_score(place / "runs/ablate/variants" / name) for name in variants]
    third = sorted(others, reverse=True)[RATES // 3 - 1]
    score, nearest = min(zip(others, rates[1:], strict=True), key=lambda o: abs(log(o[1] / chosen)))
    lines = {
        "trials": given.trials,
        "rate": chosen,
        "score": round(own, 3),
        "next_to_it": f"{nearest:.1e}",
        "best_third_from": round(third, 3),
        "rates": {f"{r:.1e}": round(s, 3) for r, s in zip(rates[1:], others, strict=True)},
        "seconds": round(seconds, 1),
        "holds": score >= third,
    }
    print(json.dumps(lines, indent=1))
    return 0 if score >= third else 1


def _score(run_directory: Path) -> float:
    """Mean over seeds of the best validation."""
    results = run_directory.glob("seeds/*/result.json")
    return float(np.mean([json.loads(result.read_text())["best_score"] for result in results]))


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
