"""Options that several commands share, and how they become a configuration."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.console import set_up_logging
from echelon.config import Config, load_config
from echelon.errors import UsageError


class LogLevel(StrEnum):
    """How much to say."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML configuration; defaults apply without one."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-o",
        help="key=value over the file, e.g. -o train.gamma=0.9. Market rules: -o market.preset=… "
        "auto (by the calendar of the data), cn (or ashare), us, crypto, paper, hierarchical.",
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        "--output-dir",
        help="Run directory; default: in logging.output_dir, named after the configuration.",
    ),
]
Level = Annotated[
    LogLevel, typer.Option("--log-level", case_sensitive=False, help="How much to say.")
]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", help="Go on in this run directory, with the configuration in it."),
]
Quarantine = Annotated[
    bool,
    typer.Option("--quarantine", help="Set bad rows aside in a file instead of refusing all."),
]
DatasetName = Annotated[
    str | None, typer.Option("--dataset", help="Name in the store; default: made from the source.")
]


def configured(config: Path | None, overrides: list[str] | None, level: LogLevel) -> Config:
    """Load the configuration and turn logging on."""
    set_up_logging(level.value)
    return load_config(config, overrides or ())


def config_of(config: Path | None, resume: Path | None) -> Path | None:
    """The configuration file: --config, or the one in the directory of --resume."""
    if resume is None:
        return config
    if config is not None:
        raise UsageError("--resume uses the configuration of its run; leave --config out.")
    if not (resume / "config.yaml").is_file():
        raise UsageError(f"--resume {resume}: no config.yaml there, so not a run directory.")
    return resume / "config.yaml"


def run_directory(
    config_file: Path | None, output_dir: Path | None, resume: Path | None, parent: Path
) -> Path:
    """Where a run goes: --output-dir, the directory of --resume, or one named after the config."""
    if resume is not None:
        if output_dir is not None and output_dir != resume:
            raise UsageError("--resume goes on in its own directory; leave --output-dir out.")
        return resume
    if output_dir is not None:
        return output_dir
    return parent / (config_file.stem if config_file is not None else "default")
