"""`echelon prove` and `echelon study`: markets with known answers, and which part of it helps."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli import options
from echelon.cli.console import (
    ProgressBar,
    add_row,
    clock,
    err,
    number_table,
    out,
    progress_bar,
    say_rules,
    text_table,
)
from echelon.errors import EchelonError
from echelon.runs import RunDirectory

if TYPE_CHECKING:
    from echelon.proving.certificate import Certificate
    from echelon.proving.parts import Part
    from echelon.proving.study import StudyResult
    from echelon.report.texts import Words


class MarketChoice(StrEnum):
    planted = "planted"
    regime = "regime"
    null = "null"
    leaky = "leaky"
    costly = "costly"
    momentum = "momentum"
    reversion = "reversion"
    cross_section = "cross_section"


_SIGNALS = {"momentum": "trend", "reversion": "reversion", "cross_section": "cross_section"}
"""Choices that are one signal of the planted market."""


def prove(
    markets: Annotated[
        list[MarketChoice] | None,
        typer.Argument(
            metavar="[MARKET]...",
            help="planted, regime, null, leaky, costly; default: all five. momentum, "
            "reversion, cross_section: one signal of planted alone.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="YAML configuration; default: the agent of qtmrl-fast.yaml."
        ),
    ] = None,
    override: options.Overrides = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A small proof: under 5 minutes on two cores, of experts and hierarchies more.",
        ),
    ] = False,
    output_dir: options.OutputDir = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Agents on the planted market.")
    ] = None,
    draws: Annotated[
        int | None, typer.Option("--draws", min=1, help="Unseen draws to test them on.")
    ] = None,
    bars: Annotated[
        int | None, typer.Option("--bars", min=1000, help="Bars of a planted draw.")
    ] = None,
    null_draws: Annotated[
        int | None, typer.Option("--null-draws", min=1, help="Draws of the null market.")
    ] = None,
    null_assets: Annotated[
        int | None,
        typer.Option(
            "--null-assets",
            min=2,
            max=1000,
            help="Assets of the null market, 8 by default; from 50 on it has fewer years, and the "
            "power is not counted.",
        ),
    ] = None,
    workers: options.Workers = None,
    on: options.On = None,
    overwrite: options.Overwrite = False,
    lang: Annotated[str, typer.Option("--lang", help="Language: en or zh.")] = "en",
    log_level: options.Level = "INFO",
) -> None:
    """Prove the pipeline where the answer is known, and write a certificate (HTML and JSON).

    The agents of the configuration are trained on markets with a planted answer, with none, with
    a feature that knows tomorrow, and with costs not worth paying. Ctrl-C keeps what is done; the
    same command in the same directory goes on. Leaves with 1 where a market is not passed.
    """
    from echelon.config.algorithms import FLAT_SETTINGS
    from echelon.market import drawn_market
    from echelon.proving.prove import PROOF_MARKETS, plan, sizes_for
    from echelon.proving.prove import prove as prove_markets
    from echelon.report.texts import Words

    words = Words(lang)
    shipped = () if config is not None else FLAT_SETTINGS
    overrides = options.with_engine([*shipped, *(override or ())], on)
    tree = options.read_config(config, overrides, log_level)
    options.reach_engine(tree)
    chosen = {choice.value for choice in markets or ()}
    sizes = sizes_for(tree, quick=quick)
    alone = tuple(signal for choice, signal in _SIGNALS.items() if choice in chosen)
    if alone and "planted" not in chosen:
        sizes = replace(sizes, signals=alone)
    sizes = sizes.adjust(
        planted_seeds=seeds,
        n_draws=draws,
        n_bars=bars,
        null_draws=null_draws,
        null_assets=null_assets,
    )
    parts = ("prove", config.stem if config is not None else "", "quick" if quick else "")
    directory = output_dir or tree.logging.output_dir / "-".join(filter(None, parts))
    RunDirectory.claim(directory)
    say_rules(drawn_market(tree).facts())
    named = {"planted" if choice in _SIGNALS else choice for choice in chosen}
    wanted = [name for name in PROOF_MARKETS if not named or name in named]
    with progress_bar("proving") as bar, options.working_on(tree, workers):
        certificate = prove_markets(
            tree,
            directory,
            markets=wanted,
            sizes=sizes,
            workers=options.worker_count(workers, tree),
            command=this_command(),
            overwrite=overwrite,
            on_report=PartsDisplay(bar, plan(tree, wanted, sizes).first),
        )
    _show(certificate, directory, words)


def _show(certificate: Certificate, directory: Path, words: Words) -> None:
    from echelon.report import certificate as pages

    page = pages.write_certificate(certificate, directory, words.lang)
    table = text_table(words("proof_title"), *(words(f"proof_{head}") for head in pages.HEADS))
    for row in pages.check_rows(certificate, words):
        add_row(table, *row)
    out.print(table)
    typer.echo(f"{pages.mode_text(certificate, words)} {pages.time_text(certificate.about, words)}")
    typer.echo(f"certificate: {directory / 'certificate.json'}")
    typer.echo(f"page: {page}")
    failed = [words(f"proof_market_{m.name}") for m in certificate.markets if not m.passed]
    if failed:
        raise EchelonError(
            f"not passed: {', '.join(failed)}. The certificate says by how much; do not trust "
            "results of this configuration on your data before it passes."
        )


class PartsDisplay:
    """One bar for all parts, by environment steps; a line a part where nobody watches a bar."""

    def __init__(self, bar: ProgressBar, parts: Sequence[Part], doing: str = "proving") -> None:
        self._bar = bar
        self._doing = doing
        self._steps = {part.key: 0 for part in parts}
        self._total = sum(part.steps for part in parts)
        self._done: set[str] = set()

    def __call__(self, part: Part, message: object) -> None:
        """Take a training's `Progress`, or the `Done` of a part."""
        from echelon.proving.parts import Done
        from echelon.training.loop import Progress

        if isinstance(message, Progress):
            self._steps[part.key] = message.step
        elif isinstance(message, Done):
            self._steps[part.key] = part.steps
            self._done.add(part.key)
            if not err.is_terminal:
                err.print(f"{part.key}: done in {clock(message.seconds)}", soft_wrap=True)
        self._bar.label(f"{self._doing}, {len(self._done)} of {len(self._steps)} parts done")
        self._bar.show(sum(self._steps.values()), self._total)


def study(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="YAML configuration of a hierarchy.")
    ] = Path("configs/hierarchical-tuned.yaml"),
    override: options.Overrides = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Of each variant.")] = 3,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Environment steps of one training; default: the configuration's.",
        ),
    ] = None,
    output_dir: options.OutputDir = None,
    workers: options.Workers = None,
    on: options.On = None,
    overwrite: options.Overwrite = False,
    log_level: options.Level = "INFO",
) -> None:
    """Compare one expert, a population, its bonuses, MF-PBT and responsibility weighting.

    Every variant is trained on the regime market of the proving ground with the same seeds and
    draws, and tested on unseen pairs; differences are paired by seed. Takes hours. Ctrl-C keeps
    what is done; the same command in the same directory goes on, more --seeds are added. Writes
    study.json and study.md.
    """
    from echelon.market import drawn_market
    from echelon.proving.study import plan_study, run_study

    shorter = () if steps is None else (f"train.total_env_steps={steps}",)
    overrides = options.with_engine([*(override or ()), *shorter], on)
    tree = options.read_config(config, overrides, log_level)
    options.reach_engine(tree)
    directory = output_dir or tree.logging.output_dir / f"study-{config.stem}"
    RunDirectory.claim(directory)
    say_rules(drawn_market(tree).facts())
    with progress_bar("studying") as bar, options.working_on(tree, workers):
        result = run_study(
            tree,
            directory,
            seeds=seeds,
            workers=options.worker_count(workers, tree),
            command=this_command(),
            overwrite=overwrite,
            on_report=PartsDisplay(bar, plan_study(tree, seeds), "studying"),
        )
    _print_study(result)
    typer.echo(f"study: {directory / 'study.json'}")
    typer.echo(f"tables: {directory / 'study.md'}")


def _print_study(result: StudyResult) -> None:
    from echelon.proving.study import STUDY_COLUMNS, study_cell

    table = number_table("study of the hierarchy", "variant", *STUDY_COLUMNS)
    for row in result.rows:
        add_row(table, row.title, *(study_cell(row, measure) for measure in STUDY_COLUMNS))
    out.print(table)
    for d in result.differences:
        typer.echo(f"{d.name}, {d.of}: {d.shown}: {d.verdict}")
    for note in result.notes:
        typer.echo(note)


def this_command() -> str:
    return shlex.join(["echelon", *sys.argv[1:]])
