"""Options that several commands share, and how they become a configuration."""

from __future__ import annotations

import inspect
import os
import shlex
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, NamedTuple, ParamSpec

import typer

from echelon.cli.console import err, set_up_logging
from echelon.errors import UsageError
from echelon.files import json_line
from echelon.types import MOST_PROCESSES, MOST_SEEDS

if TYPE_CHECKING:
    from echelon.config import Config

P = ParamSpec("P")


LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
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
    typer.Option(
        "--resume",
        help="Go on in this directory, with the configuration in it; `train` also from one "
        "checkpoint (RUN/seeds/SEED/checkpoints/step-…).",
    ),
]
TrustCode = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust-code",
        metavar="FILE",
        help="Run this Python file, which the run directory's configuration names; without it, "
        "code that a run directory names does not run. Can be repeated.",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds", min=1, max=MOST_SEEDS, help="How many seeds to train; default: train.seeds."
    ),
]


def _refuse_workers(context: typer.Context, workers: int | None) -> int | None:
    """Before anything is made: `worker_count` knows the configuration too, a cluster its room."""
    from echelon.config.sizes import refuse_processes

    if workers is not None and context.params.get("on") is None:
        refuse_processes("--workers", workers)
    return workers


Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        max=MOST_PROCESSES,
        callback=_refuse_workers,
        help="How many to train at a time; default: one per core, as memory allows.",
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ray[:ADDRESS]",
        is_eager=True,  # before --workers, of which this machine need not have the memory
        help="Work on a Ray cluster: HOST:PORT of its head, local for one on this machine; "
        "default: what the section `compute` says, processes of this machine.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start again where the directory holds results.")
]
Quarantine = Annotated[
    bool, typer.Option("--quarantine", help="Set bad rows aside in a file instead of refusing all.")
]
DatasetName = Annotated[
    str | None, typer.Option("--dataset", help="Name in the store; default: made from the source.")
]


MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65535,
        help="Let Prometheus read, on this port of 127.0.0.1, how training goes; 0: any free port. "
        "Needs ECHELON_TOKEN.",
    ),
]


class RunOptions(NamedTuple):
    config: ConfigFile = None
    override: Overrides = None
    output_dir: OutputDir = None
    seeds: Seeds = None
    workers: Workers = None
    on: On = None
    resume: Resume = None
    trust_code: TrustCode = None
    overwrite: Overwrite = False
    quarantine: Quarantine = False
    metrics_port: MetricsPort = None
    log_level: Level = "INFO"

    @contextmanager
    def exporting_metrics(self, directory: Path) -> Iterator[None]:
        """Let Prometheus read about the trainings in a directory, where --metrics-port says so."""
        if self.metrics_port is None:
            yield
            return
        from echelon.config.secrets import require_token
        from echelon.live.http import Server, metrics_route
        from echelon.monitoring.training import training_metrics

        routes = metrics_route(training_metrics(directory))
        with Server(routes, require_token(), self.metrics_port) as server:
            err.print(f"metrics: {server.url}/metrics")
            yield
            with suppress(KeyboardInterrupt):
                server.wait_for_reader()  # who then knows that the training is finished

    def read_config(self, resume: Path | None) -> Config:
        """The configuration that they name, or that of the run directory `resume`."""
        overrides = with_engine(self.override, self.on)
        tree = read_config(
            self.config, overrides, self.log_level, resume, self.trust_code, self.seeds
        )
        reach_engine(tree)
        return tree


def with_run_options(command: Callable[Concatenate[RunOptions, P], None]) -> Callable[..., None]:
    """A command for Typer that has the options of `RunOptions` besides its own."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    types, defaults = typing.get_type_hints(RunOptions, include_extras=True), RunOptions()._asdict()
    kind = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(name, kind, default=value, annotation=types[name])
        for name, value in defaults.items()
    ]

    @wraps(command)
    def run(**values: Any) -> None:  # noqa: ANN401 (as Typer read them)
        given = RunOptions(*(values.pop(name) for name in RunOptions._fields))
        command(given, **values)  # type: ignore[call-arg]

    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in (*own, *shared)}
    return run


def read_config(
    config: Path | None,
    overrides: list[str] | None,
    level: LogLevel,
    resume: Path | None = None,
    trust_code: list[Path] | None = None,
    seeds: int | None = None,
) -> Config:
    """Load the configuration, or that of the run directory `resume`, and turn logging on.

    seeds: how many, where not as many as it says
    """
    from echelon.config import load_config, load_run_config, refuse_places
    from echelon.config.sizes import refuse_sizes
    from echelon.runs.registry import TrialRegistry

    set_up_logging(level)
    overrides = [*(overrides or ()), *(() if seeds is None else (f"train.seeds={seeds}",))]
    if resume is not None:
        tree = load_run_config(resume / "config.yaml", overrides, trust_code or ())
        refuse_places(tree, resume, overrides)
    else:
        if trust_code:
            raise UsageError(
                "--trust-code is for the code that the run of --resume names; what your own "
                "configuration names runs anyway. Leave it out."
            )
        tree = load_config(config, overrides)
        if tree.logging.registry is not None:
            TrialRegistry(tree.logging.registry).begin()
    refuse_sizes(tree)
    return tree


def with_engine(overrides: list[str] | None, on: str | None) -> list[str]:
    """The overrides, and what --on asks for."""
    if on is None:
        return list(overrides or ())
    name, _, address = on.partition(":")
    if name not in ("ray", "local") or (name == "local" and address):
        raise UsageError(f"--on {on!r}: expected ray, ray:HOST:PORT, ray:local or local.")
    engine = f"compute={{engine: {name}, address: {json_line(address or 'auto')}}}"
    return [*(overrides or ()), engine]


def reach_engine(config: Config) -> None:
    """Raise where the cluster of a configuration is not there, before anything is written."""
    if config.compute.engine == "ray":
        from echelon.cluster import reach_cluster

        reach_cluster(config.compute.address)


def on_engine(base: Config, given: RunOptions) -> Config:
    """The configuration with what --on says; that of a --resume does not hold it."""
    from echelon.config import override_config

    return base if given.on is None else override_config(base, with_engine(None, given.on))


@contextmanager
def working_on(config: Config, workers: int | None) -> Iterator[None]:
    """Have pools and jobs of the block work where the section `compute` says."""
    if config.compute.engine == "local":
        yield
        return
    from echelon.cluster import ray_engine
    from echelon.config.sizes import actor_memory, processes_of_job

    members = max(1, processes_of_job(config) - 1)
    memory, threads = actor_memory(config), config.train.threads
    with ray_engine(config.compute.address, threads, memory) as engine:
        engine.slots = workers or max(1, engine.room() // members)
        # One that has members works while they wait. More actors than fit share the processors.
        each = threads if engine.slots * members <= engine.room() else 0
        engine.inside = each
        engine.cpus = 0 if members > 1 else each
        yield


def worker_count(workers: int | None, config: Config | None = None) -> int:
    """How many to train at a time: --workers, or one per core, or per `train.threads` of them.

    On a cluster: --workers, or as many as it has room for.
    """
    from echelon.config.sizes import processes_of_job, refuse_processes, workers_that_fit
    from echelon.workers import engine

    if (slots := engine().slots) is not None:
        return slots
    each = 1 if config is None else processes_of_job(config)
    if workers is None:
        threads = 1 if config is None else config.train.threads
        return min(max(1, (os.cpu_count() or 1) // threads), workers_that_fit(each))
    refuse_processes("--workers", workers, each=each)
    return workers


def trust_flags(config: Config) -> str:
    """The options that name the same code again, for a command to copy."""
    from echelon.config import user_code

    return "".join(f" --trust-code {shlex.quote(str(file))}" for file in user_code(config))


def refuse_config_with_resume(config: Path | None, resume: Path | None) -> None:
    """Refuse --config with --resume, and a --resume that names no run directory."""
    if resume is None:
        return
    if config is not None:
        raise UsageError("--resume uses the configuration of its run; leave --config out.")
    if not (resume / "config.yaml").is_file():
        raise UsageError(f"--resume {resume}: no config.yaml there, so not a run directory.")


def run_directory(
    config_file: Path | None,
    output_dir: Path | None,
    resume: Path | None,
    parent: Path,
    ending: str = "",
) -> Path:
    """Where a run goes: --output-dir, that of --resume, or one named after the configuration."""
    if resume is not None:
        if output_dir is not None and output_dir != resume:
            raise UsageError("--resume goes on in its own directory; leave --output-dir out.")
        return resume
    if output_dir is not None:
        return output_dir
    name = config_file.stem if config_file is not None else "default"
    return parent / f"{name}{ending}"
