"""A walk-forward directory as `echelon walk-forward` leaves it, with rules in the place of agents.

Every file comes from its own writer; only training is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from test_report import BASES, days, make_run
from worlds import make_config, make_world

from echelon.evaluation.evaluate import load_evaluation
from echelon.evaluation.folds import Fold, FoldBars
from echelon.evaluation.trust import load_trust
from echelon.evaluation.walkforward import WalkForward, WalkForwardResult, statistics, stitch

ASSETS = ("A0", "A1", "A2", "A3")


def make_walk(
    path: Path,
    *,
    folds: int = 3,
    bars: tuple[int, int, int] = (120, 60, 80),
    seeds: tuple[int, ...] = (42, 43),
    overrides: tuple[str, ...] = (),
    failed: str = "",
    policy: Callable[[int], Any] | None = None,
    ensemble: bool = False,
    volume: float | None = None,
) -> Path:
    """A rolling walk-forward of so many folds. bars: train, validation and test windows of each

    failed: name of a fold that did not come to an end; nothing is stitched then
    policy: of a seed, in place of momentum rules; ensemble: of them too, where they set weights
    volume: shares traded in every bar; None: the market has none
    """
    train, valid, test = bars
    n_rows = train + valid + folds * test
    traded = {} if volume is None else {"volume_close": np.full((n_rows, 4), volume)}
    world = make_world(n_rows=n_rows, n_assets=4, times=days(n_rows), **traded)
    dates = [t.astype("datetime64[D]").item() for t in world.times]
    planned, found = [], {}
    for k in range(folds):
        edges = k * test + np.cumsum([0, train, valid, test])
        spans = {
            name: range(int(first), int(stop))
            for name, first, stop in zip(
                ("train", "valid", "test"), edges[:-1], edges[1:], strict=True
            )
        }
        named = {name: (dates[rows[0]], dates[rows[-1]]) for name, rows in spans.items()}
        fold = Fold(f"fold-{k}", **named, bars=FoldBars(*bars), assets=ASSETS)
        planned.append(fold)
        if fold.name == failed:
            continue
        run = make_run(
            path / "folds" / fold.name,
            world=replace(world, splits=spans),
            seeds=seeds,
            splits=("test",),
            ensemble=ensemble,
            overrides=overrides,
            **({} if policy is None else {"policy": policy}),
        )
        found[fold.name] = load_evaluation(run, "test")
    walk = WalkForward(path, make_config(BASES, *overrides), tuple(planned))
    stitched, sure = None, {}
    if not failed:
        stitched = stitch(found)
        trusts = [load_trust(walk.run(k), "test") for k in range(folds)]
        known = [trust for trust in trusts if trust is not None]
        sure = statistics(stitched, 42, looks=1, trusts=known)
    problems = {failed: "the disk is full"} if failed else {}
    result = WalkForwardResult(walk.folds, found, problems, stitched, sure)
    result.write(path)
    walk.save_result(result)
    return path
