"""`echelon prove`: does the agent learn where the answer is known?"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.console import add_row, out, titled
from echelon.cli.options import (
    ConfigFile,
    Level,
    LogLevel,
    OutputDir,
    Overrides,
    configured,
    run_directory,
)
from echelon.cli.train import Seeds, Workers
from echelon.cli.watch import watching
from echelon.errors import Stopped


class MarketChoice(StrEnum):
    """Markets with a known answer."""

    momentum = "momentum"


def prove(
    market: Annotated[MarketChoice, typer.Argument(help="Market with a known answer.")],
    config: ConfigFile = None,
    override: Overrides = None,
    output_dir: OutputDir = None,
    seeds: Seeds = 5,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Unseen draws to test on.")] = 16,
    bars: Annotated[int, typer.Option("--bars", min=1000, help="Bars of a draw.")] = 6000,
    workers: Workers = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Train on a market with planted momentum; compare with the best filter of past returns.

    The score is the agent's share of the Bayes filter's Sharpe ratio on draws it has not seen,
    under the same rules, costs and clock; momentum rules are shown beside it.
    """
    from echelon.proving.momentum import RULES, Verdict, prove_momentum
    from echelon.proving.planted import PlantedMarket

    tree = configured(config, override, log_level)
    directory = run_directory(
        Path(f"prove-{market.value}"), output_dir, None, tree.logging.output_dir
    )
    wanted = [tree.seed + k for k in range(seeds or 1)]
    count = workers or max(1, (os.cpu_count() or 1) // tree.train.threads)
    labels = [f"seed {seed}" for seed in wanted]
    with watching(labels, [tree.train.total_env_steps] * len(wanted)) as display:
        done = prove_momentum(
            tree,
            directory,
            seeds=wanted,
            n_draws=draws,
            workers=count,
            market=PlantedMarket(n_bars=bars),
            on_progress=lambda now: display.progress(wanted.index(now.seed), now),
        )
    scores = done.all_or_raise()
    if done.stopped:
        raise Stopped("the proof was not finished; run it again.")
    names = ["agent", *(f"momentum {bars}" for bars in RULES)]
    table = titled(
        f"Share of the Bayes filter's Sharpe ratio on {draws} unseen draws",
        *("seed", "best at", "Sharpe, Bayes", "agent"),
        *(f"share, {name}" for name in names),
    )
    for score in scores:
        sharpes = [f"{score.sharpes[name].mean():.2f}" for name in ("bayes", "agent")]
        shares = [f"{score.share(name):.1%}" for name in names]
        add_row(table, str(score.seed), f"{score.best_step:,}", *sharpes, *shares)
    out.print(table)
    verdict = Verdict.of([score.share() for score in scores])
    interval = (
        "" if len(scores) < 2 else f", 95 % t-interval {verdict.low:.1%} to {verdict.high:.1%}"
    )
    typer.echo(f"agent: {verdict.mean:.1%} of the Bayes filter's Sharpe ratio{interval}")
