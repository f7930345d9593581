"""`echelon prove`: markets with known answers, and the certificate."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.console import Bar, add_row, err, out, progress_bar, titled
from echelon.cli.options import (
    Level,
    LogLevel,
    OutputDir,
    Overrides,
    configured,
)
from echelon.cli.rules import say_rules
from echelon.cli.train import Workers
from echelon.cli.watch import clock
from echelon.errors import EchelonError
from echelon.runs import RunDirectory

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.proving.certificate import Certificate
    from echelon.proving.parts import Part
    from echelon.proving.sizes import Sizes
    from echelon.report.certificate_words import CertificateWords


class MarketChoice(StrEnum):
    """Markets with a known answer."""

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
    override: Overrides = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A small proof: under 5 minutes on two cores, of experts and hierarchies more.",
        ),
    ] = False,
    output_dir: OutputDir = None,
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
    workers: Workers = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Prove anew where the directory holds a proof.")
    ] = False,
    lang: Annotated[str, typer.Option("--lang", help="Language: en or zh.")] = "en",
    log_level: Level = LogLevel.INFO,
) -> None:
    """Prove the pipeline where the answer is known, and write a certificate (HTML and JSON).

    The agents of the configuration are trained on markets with a planted answer, with none, with
    a feature that knows tomorrow, and with costs not worth paying. Ctrl-C keeps what is done; the
    same command in the same directory goes on. Leaves with 1 where a market is not passed.
    """
    from echelon.proving.sizes import sizes_for
    from echelon.report.certificate_words import CertificateWords

    words = CertificateWords(lang)
    tree = _configured(config, override, log_level)
    chosen = {choice.value for choice in markets or ()}
    sizes = _only_named(sizes_for(tree, quick=quick), chosen).changed(
        planted_seeds=seeds, n_draws=draws, n_bars=bars, null_draws=null_draws
    )
    directory = output_dir or tree.logging.output_dir / _name(config, quick)
    RunDirectory.claim(directory)
    certificate = _prove(tree, directory, chosen, sizes, workers, overwrite)
    _show(certificate, directory, words)


def _prove(
    tree: Config,
    directory: Path,
    chosen: set[str],
    sizes: Sizes,
    workers: int | None,
    overwrite: bool,
) -> Certificate:
    """The markets chosen, or all, with a bar to watch."""
    from echelon.market import drawn_market
    from echelon.proving.prove import MARKETS, plan
    from echelon.proving.prove import prove as prove_markets

    say_rules(drawn_market(tree).facts())
    named = {"planted" if choice in _SIGNALS else choice for choice in chosen}
    wanted = [name for name in MARKETS if not named or name in named]
    with progress_bar("proving") as bar:
        return prove_markets(
            tree,
            directory,
            markets=wanted,
            sizes=sizes,
            workers=workers or max(1, (os.cpu_count() or 1) // tree.train.threads),
            command=shlex.join(["echelon", *sys.argv[1:]]),
            overwrite=overwrite,
            on_report=PartsDisplay(bar, plan(tree, wanted, sizes).first),
        )


def _show(certificate: Certificate, directory: Path, words: CertificateWords) -> None:
    """Write the page, print the checks, and raise where a market is not passed."""
    from echelon.report.certificate import write_certificate

    page = write_certificate(certificate, directory, words.lang)
    _print(certificate, words)
    typer.echo(f"certificate: {directory / 'certificate.json'}")
    typer.echo(f"page: {page}")
    failed = [words(f"market_{m.name}") for m in certificate.markets if not m.passed]
    if failed:
        raise EchelonError(
            f"not passed: {', '.join(failed)}. The certificate says by how much; do not trust "
            "results of this configuration on your data before it passes."
        )


class PartsDisplay:
    """One bar for all parts, by environment steps; a line a part where nobody watches a bar."""

    def __init__(self, bar: Bar, parts: Sequence[Part], doing: str = "proving") -> None:
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
        self._bar.of(sum(self._steps.values()), self._total)


def _configured(config: Path | None, override: list[str] | None, level: LogLevel) -> Config:
    """The configuration named, or the shipped agent; overrides go over either."""
    from echelon.config.algorithms import FLAT_SETTINGS

    if config is not None:
        return configured(config, override, level)
    return configured(None, [*FLAT_SETTINGS, *(override or ())], level)


def _only_named(sizes: Sizes, chosen: set[str]) -> Sizes:
    """Signals that are named alone are the only ones."""
    named = tuple(signal for choice, signal in _SIGNALS.items() if choice in chosen)
    return replace(sizes, signals=named) if named and "planted" not in chosen else sizes


def _name(config: Path | None, quick: bool) -> str:
    """Of the directory: after the configuration and the mode."""
    parts = ["prove", *([config.stem] if config is not None else []), *(["quick"] if quick else [])]
    return "-".join(parts)


def _print(certificate: Certificate, words: CertificateWords) -> None:
    """Every check, and what the whole came to."""
    from echelon.report.certificate import rows_of

    heads = ("market", "check", "result", "interval_95", "bar", "verdict")
    table = titled(words("title"), *(words(head) for head in heads))
    for row in rows_of(certificate, words):
        add_row(table, *row)
    out.print(table)
    about = certificate.about
    spent = words(
        "time",
        seconds=f"{about['seconds']:,.0f}",
        cpu=f"{about['cpu_seconds']:,.0f}",
        cores=about["cores"],
    )
    typer.echo(f"{words.mode(certificate)} {spent}")
