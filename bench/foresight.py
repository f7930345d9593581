"""Does the encoder order assets as well as boosted trees do, on the same inputs, year by year?

    python -m bench.wide cn_wide_2010_2020.parquet wide.parquet
    python -m bench.foresight wide.parquet                       # 2014 to 2020
    python -m bench.foresight wide.parquet --years 2013          # what settings were chosen on

1. The bars are prepared once as `configs/wide.yaml` says: ranks across the assets of a bar, for
   which no scaler has to be fitted.
2. For each year Y an encoder learns on the years up to Y − 2 and stops by the first half of Y − 1,
   once for every seed; its scores are the mean of the seeds'. Trees grow on the same rows and the
   same features of the bar, all of them.
3. Both score every day of Y. Compared are the daily rank ICs against the return over five days from
   the next open, paired by day, over all the years, with an interval by blocks.

It fails where the lower end of the difference is at or below −0.006, at either block length.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from echelon.agents.encoder_training import draw_encoder
from echelon.agents.outcomes import Targets, fit_scale, outcomes
from echelon.agents.pretraining import Pretraining
from echelon.agents.tables import encode_span
from echelon.config import Config, load_config
from echelon.config.tree import SplitConfig
from echelon.envs.world import World, world_of
from echelon.features import prepare
from echelon.ops.ranks import compare_ic, ic_summary, rank_ic
from echelon.ops.trees import fit_trees, predict_trees
from echelon.rng import global_draws, stream
from echelon.types import Bools, Floats

CONFIG = Path(__file__).parent.parent / "configs" / "wide.yaml"
YEARS, SEEDS, GOAL, BLOCKS = range(2014, 2021), 3, -0.006, (5, 60)


class Year(NamedTuple):
    """Daily rank ICs[T] of a year, and seconds of one core for an encoder and for the trees.

    encoder: of the mean of the seeds' scores; single: the mean of what each seed's alone have
    """

    encoder: Floats
    single: Floats
    trees: Floats
    encoder_seconds: float
    trees_seconds: float


def development_world(config: Config, directory: Path) -> World:
    """All years in one world, without a test window: it is cut by `of_year`."""
    days = {"train": ("2010-01-04", "2019-12-31"), "valid": ("2020-01-02", "2020-12-29")}
    split = SplitConfig.model_validate(days | {"test": ("2020-12-30", "2020-12-31")})
    config = config.model_copy(update={"split": split})
    return world_of(prepare(config, directory).prepared, config)


def of_year(world: World, year: int) -> tuple[World, range]:
    """The world whose validation window is the year before, and the rows of the year."""
    years = world.times.astype("datetime64[Y]").astype(int) + 1970
    first, valid, test, end = np.searchsorted(years, [0, year - 1, year, year + 1]).tolist()
    splits = {"train": range(first, valid), "valid": range(valid, test)}
    return replace(world, splits=splits), range(test, end)


def score_year(config: Config, world: World, year: int, seeds: int) -> Year:
    world, rows = of_year(world, year)
    targets, pieces = Targets(("rank",), config.pretrain.horizons[:1]), world.spans("train")
    scale = fit_scale(world, pieces, targets)
    y = outcomes(world, pieces, targets, scale)[..., 0]
    # What comes of the year's last rows lies in the next one; nobody learns from it.
    reach = range(rows.start, min(rows.stop + targets.reach, len(world.times)))
    came = outcomes(world, (reach,), targets, scale)[rows.start : rows.stop, :, 0]
    present = world.present[rows.start : rows.stop]
    spent = time.process_time()
    each = [_encoder_scores(config, world, rows, present, seed) for seed in range(seeds)]
    grown = time.process_time()
    known = np.isfinite(y)
    trees = fit_trees(
        world.x[known], y[known].astype(np.float64), trees=config.forecast.trees, seed=0
    )
    rivals = np.stack([predict_trees(world.x[row], trees) for row in rows])
    ended = time.process_time()
    came = came.astype(np.float64)
    return Year(
        rank_ic(np.mean(each, axis=0), came),
        np.mean([rank_ic(scores, came) for scores in each], axis=0),
        rank_ic(np.where(present, rivals, np.nan), came),
        (grown - spent) / seeds,
        ended - grown,
    )


def _encoder_scores(config: Config, world: World, rows: range, present: Bools, seed: int) -> Floats:
    """[R,N] of one encoder, standardised across the assets of a row."""
    with global_draws(seed, "pretrain"):
        encoder = draw_encoder(config, world, world.spans("train"))
        training = Pretraining(config, world, world, encoder, seed)
        training.fit(lambda: False)
    training.net.eval()
    said = encode_span(training.net.forecast, world, rows)[..., 0].double().numpy()
    said = np.where(present, said, np.nan)
    said -= np.nanmean(said, axis=1, keepdims=True)
    return np.asarray(said / np.nanstd(said, axis=1, keepdims=True))


def show_year(year: int, own: Year) -> None:
    means = [float(np.nanmean(ic)) for ic in (own.encoder, own.single, own.trees)]
    seconds = f"{own.encoder_seconds:12.1f} {own.trees_seconds:10.1f}"
    print(f"{year:6d}" + "".join(f"{mean:10.4f}" for mean in means) + seconds, flush=True)


def report(scored: Sequence[Year]) -> bool:
    """Print means and differences; whether the goal is met."""
    daily = {
        name: np.concatenate([getattr(own, name) for own in scored])
        for name in ("encoder", "single", "trees")
    }
    for name, ic in daily.items():
        whole = ic_summary(ic, stream(0, "bench", name), horizon=BLOCKS[0])
        print(
            f"{name}: mean daily rank IC {whole.mean.estimate:.4f} ({whole.mean.low:.4f} to "
            f"{whole.mean.high:.4f}), ICIR {whole.icir:.2f}, {whole.days} days"
        )
    lows = []
    for name, block in product(("encoder", "single"), BLOCKS):
        draws = stream(0, "bench", "difference")
        gain = compare_ic(daily[name], daily["trees"], draws, horizon=block)
        if name == "encoder":
            lows.append(gain.low)
        print(
            f"{name} minus trees, blocks of {gain.block} days: {gain.estimate:+.4f} "
            f"({gain.low:+.4f} to {gain.high:+.4f})"
        )
    print(f"lower end above {GOAL}: {'yes' if min(lows) > GOAL else 'NO'}")
    return min(lows) > GOAL


def study(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parquet", type=Path, help="development bars, by bench.wide")
    parser.add_argument("--years", type=int, nargs="+", default=[*YEARS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        config = load_config(CONFIG, [f"data.path={options.parquet}", *options.set])
        world = development_world(config, Path(directory))
        print("  year   encoder    single     trees   s / encoder  s / trees")
        scored = []
        for year in options.years:
            scored.append(score_year(config, world, year, options.seeds))
            show_year(year, scored[-1])
    return 0 if report(scored) else 1


if __name__ == "__main__":
    sys.exit(study(sys.argv[1:]))
