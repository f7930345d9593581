"""Does a router over fixed experts learn more than the fixed-share rule knows? On drawn markets.

    python -m bench routing
    python -m bench.routing --forms hint --seeds 5 --decisions 76800 -o meta_router.command=blend

The markets and experts are those of `echelon.proving.routing`: a steady regime, one whose rate of
flips changes, and that with a series which shows the regime before returns can. For each form a
router per seed learns from `configs/hierarchical-tuned.yaml` with `meta_router.prior=fixed_share`,
on draws of its own, and trades test pairs that all seeds share, next to the rule over the same
experts and the exact filter. Printed are Sharpe ratios and, of their difference to the rule and of
the share of the filter, the mean over seeds with its 95 % interval.

Fails where the router is not above the rule, by the interval's lower end, on a form in which there
is something to learn ("rates" and "hint"). What is done is kept in `--output-dir`, and not again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from echelon.config import load_config
from echelon.evaluation.statistics import seed_interval
from echelon.proving.parts import run_all
from echelon.proving.routing import Form, RoutingPart
from echelon.proving.worlds import proof_config

TUNED_YAML = Path(__file__).parents[1] / "configs" / "hierarchical-tuned.yaml"
LEARNED: tuple[Form, ...] = ("rates", "hint")


def compare(parts: Sequence[RoutingPart], directory: Path, workers: int) -> bool:
    """Every form's table; whether the router is above the rule wherever it should be."""
    done, met = run_all(parts, directory, workers=workers), True
    for form in dict.fromkeys(part.form for part in parts):
        findings = [done[part.key].finding for part in parts if part.form == form]
        means = {
            name: np.array([np.mean(finding["sharpes"][name]) for finding in findings])
            for name in ("router", "hedge", "filter")
        }
        gap, share = means["router"] - means["hedge"], means["router"] / means["filter"]
        apart, part_of = seed_interval(gap), seed_interval(share)
        kl = float(np.mean([finding["kl_prior"] or 0.0 for finding in findings]))
        worth = ", ".join(f"{name} {values.mean():.2f}" for name, values in means.items())
        print(
            f"{form}: {worth}; router minus hedge {apart.mean:+.3f} "
            f"({apart.low:+.3f} … {apart.high:+.3f}), of the filter {part_of.mean:.1%} "
            f"({part_of.low:.1%} … {part_of.high:.1%}); {len(gap)} seeds, KL to the rule {kl:.3f}; "
            f"by seed {np.round(gap, 3).tolist()}",
            flush=True,
        )
        met &= form not in LEARNED or len(gap) < 2 or apart.low > 0.0
    return met


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--forms", nargs="+", choices=get_args(Form), default=get_args(Form))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--decisions", type=int, default=76_800)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path("routing"))
    parser.add_argument("-o", "--override", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args(argv or [])
    torch.set_num_threads(1)
    chosen = ["meta_router.prior=fixed_share", *args.override]
    config = proof_config(load_config(TUNED_YAML, chosen))
    parts = [
        RoutingPart(config, form, seed, args.decisions)
        for form in args.forms
        for seed in range(1, args.seeds + 1)
    ]
    return 0 if compare(parts, args.output_dir, args.workers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
