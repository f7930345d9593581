"""`echelon train`: from a configuration to trained agents, with a display to watch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from echelon.cli import options
from echelon.cli.console import add_row, clock, err, open_alerter, out, text_table, watching
from echelon.cli.prepare import prepare_run
from echelon.errors import EchelonError, Stopped, UsageError, shorten
from echelon.files import exclusive_lock
from echelon.runs import RunDirectory

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.features import PrepareReport
    from echelon.training.loop import Outcome, Progress
    from echelon.training.run import SeedJob
    from echelon.workers import Report, ShouldStop


@options.with_run_options
def train(given: options.RunOptions) -> None:
    """Train one or more seeds, and choose the best checkpoint of each on the validation window.

    Features are prepared first where they are not there yet. Ctrl-C writes a checkpoint and stops;
    `--resume` goes on as if nothing had happened.
    """
    run, checkpoint = _split_resume(given.resume)
    if run is not None and (given.config is not None or given.overwrite):
        raise UsageError("--resume goes on with its own run; leave --config and --overwrite out.")
    tree = given.read_config(run)
    directory = options.run_directory(given.config, given.output_dir, run, tree.logging.output_dir)
    with given.exporting_metrics(directory):
        outcomes = train_run(tree, directory, "train", given, checkpoint)
    print_outcomes(outcomes, tree.train.select_by)
    from echelon.cli.evaluate import evaluate_run
    from echelon.config import user_code

    evaluate_run(directory, "valid", trust_code=user_code(tree))
    typer.echo(f"run: {directory}")
    typer.echo(f"next: echelon evaluate {directory} --split test")


def train_run(
    config: Config,
    directory: Path,
    command: str,
    given: options.RunOptions,
    checkpoint: Path | None = None,
    on_prepared: Callable[[PrepareReport, Path, Config], None] = lambda *_: None,
) -> list[Outcome]:
    """Prepare and train in a run directory, with a display; write down what it was made from."""
    from echelon.config.sizes import refuse_settings
    from echelon.envs.world import rules_of

    refuse_settings(config)
    RunDirectory.claim(directory)
    if given.resume is not None:
        _refuse_change(config, directory)
    else:
        make_room(directory, given.overwrite)
    report = prepare_run(config, directory, command, quarantine=given.quarantine)
    on_prepared(report, directory, config)
    outcomes = train_all_seeds(
        config,
        directory,
        "train",
        given,
        total=config.train.total_env_steps,
        checkpoint=checkpoint,
        tell=_tell_once(directory),
    )
    manifest = report.prepared.manifest
    RunDirectory(directory).record(
        config,
        command,
        data=manifest["dataset"],
        prepared=manifest["content_hash"],
        rules=rules_of(report.prepared, config).facts(),
        outcomes=[outcome.__dict__ for outcome in _with_others(outcomes, config, directory)],
    )
    return outcomes


def train_all_seeds(
    config: Config,
    directory: Path,
    command: str,
    given: options.RunOptions,
    *,
    total: int,
    checkpoint: Path | None = None,
    train: Callable[[SeedJob, Report, ShouldStop], Outcome] | None = None,
    load: Callable[[SeedJob], object] | None = None,
    tell: Callable[[int], None] = lambda _seed: None,
) -> list[Outcome]:
    """Train the run's seeds side by side, with a display; raises `Stopped` after Ctrl-C.

    command: that goes on with --resume; total: steps of a seed; checkpoint: of one, which alone
    goes on from it; train: one seed in a process of its own, None: a portfolio agent
    load: what a seed learns from, None: a portfolio agent's worlds
    tell: called with a seed that has made progress
    """
    from echelon.monitoring.alerts import Alert
    from echelon.training.run import SeedJob, train_seed, train_seeds
    from echelon.workers import Failure

    wanted = [config.seed + k for k in range(config.train.seeds)]
    if checkpoint is not None:
        wanted = [int(checkpoint.parent.parent.name)]
    resume = given.resume is not None
    jobs = [SeedJob(config, directory, seed, resume, checkpoint) for seed in wanted]
    number = {seed: k for k, seed in enumerate(wanted)}
    labels = [f"seed {seed}" for seed in wanted]
    with (
        open_alerter(config.alerts, directory.name) as alert,
        watching(labels, [total] * len(jobs)) as watch,
    ):

        def on_progress(now: Progress) -> None:
            tell(now.seed)
            watch.progress(number[now.seed], now)
            for risk in now.alerts:
                alert(risk)

        with options.working_on(config, given.workers):
            done = train_seeds(
                jobs,
                workers=options.worker_count(given.workers, config),
                on_progress=on_progress,
                train=train or train_seed,
                load=load,
            )
        for label, result in zip(labels, done.results, strict=True):
            if isinstance(result, Failure):
                why = shorten(f"{type(result.error).__name__}: {result.error}", 600)
                alert(Alert("training_failed", "critical", label, values={"detail": why}))
            elif result is not None and result.ending != "stopped":
                values = {"steps": result.step, "score": result.best_score}
                alert(Alert("training_ended", "info", label, values=values))
    for seed, result in zip(wanted, done.results, strict=True):
        # A failure says which seed it concerns; the traceback of a bug stays as it is.
        error = result.error if isinstance(result, Failure) else None
        if len(jobs) > 1 and isinstance(error, EchelonError) and f"seed {seed}: " not in str(error):
            error.args = (f"seed {seed}: {error}",)
    outcomes = done.all_or_raise()
    if done.stopped:
        where = ", ".join(f"seed {o.seed} at step {o.step:,}" for o in outcomes)
        raise Stopped(
            f"{where or 'before the start'}; checkpoints are written. Go on with: "
            f"echelon {command} --resume {directory}{options.trust_flags(config)}"
        )
    return outcomes


def _tell_once(run: Path) -> Callable[[int], None]:
    """Say of a run's experts what is the same for all, as soon as the first of them trains."""
    said: list[int] = []

    def tell(seed: int) -> None:
        from echelon.agents.foresight import summary
        from echelon.agents.pretraining import read_encoder_document
        from echelon.training.run import read_learner_facts, seed_directory

        if not said:
            said.append(seed)
            encoder = read_encoder_document(run)
            lines = [] if encoder is None else summary(encoder["facts"])
            for line in (*lines, *read_learner_facts(seed_directory(run, seed)).lines()):
                err.print(Text(line), soft_wrap=True)

    return tell


def _with_others(outcomes: Sequence[Outcome], config: Config, directory: Path) -> list[Outcome]:
    from echelon.training.run import finished_outcome, seed_directory

    known = {outcome.seed: outcome for outcome in outcomes}
    for seed in range(config.seed, config.seed + config.train.seeds):
        ended = finished_outcome(config, seed_directory(directory, seed))
        if ended is not None:
            known.setdefault(seed, ended)
    return [known[seed] for seed in sorted(known)]


def print_outcomes(outcomes: Sequence[Outcome], measure: str) -> None:
    """How training ended, seed by seed; measure: of the validation, that the best is chosen by."""
    heads = ("seed", "steps", "ended", "best at", f"validation {measure}", "time")
    table = text_table("Training", *heads)
    endings = {"done": "all steps done", "patience": "no progress", "stopped": "stopped"}
    for o in outcomes:
        best = f"{o.best_step:,}", f"{o.best_score:.3f}"
        add_row(table, str(o.seed), f"{o.step:,}", endings[o.ending], *best, clock(o.seconds))
    out.print(table)


def _split_resume(path: Path | None) -> tuple[Path | None, Path | None]:
    if path is None:
        return None, None
    if (path / "state.json").is_file() and path.parent.name == "checkpoints":
        run = path.parents[3]
        if path.name == "best":
            raise UsageError(
                f"--resume {path}: the best checkpoint has the weights only. Name a step-… one."
            )
        if (run / "config.yaml").is_file():
            return run, path
    if not (path / "config.yaml").is_file():
        raise UsageError(
            f"--resume {path}: neither a run directory (no config.yaml there) nor a checkpoint."
        )
    return path, None


def _refuse_change(config: Config, directory: Path) -> None:
    from echelon.config import load_run_config
    from echelon.training.run import training_hash

    before = load_run_config(directory / "config.yaml")
    if training_hash(config) != training_hash(before):
        raise UsageError(
            f"--resume {directory}: an override changes what the agents learn from or how, so they "
            "cannot go on. Leave it out, or start a new run with it. What may change: "
            "train.seeds, train.patience, train.keep_checkpoints, train.checkpoint_every_steps, "
            "logging, and train.total_env_steps under a constant learning rate."
        )


def make_room(directory: Path, overwrite: bool, *, trained: bool = True) -> None:
    """Refuse to train over a trained run, or remove it. trained: whether its seeds hold anything"""
    from echelon.training.run import seed_directory, trained_seeds

    if not RunDirectory(directory).is_trained:
        return
    if trained and not overwrite:
        raise UsageError(
            f"{directory}: holds a trained run. Go on with it (--resume {directory}), name another "
            "directory (--output-dir), or train again in its place (--overwrite)."
        )
    with ExitStack() as locks:
        for seed in trained_seeds(directory):
            place = seed_directory(directory, seed)
            locks.enter_context(exclusive_lock(place / ".train.lock", f"the training in {place}"))
        for part in ("seeds", "encoder", "evaluations", "report"):
            shutil.rmtree(directory / part, ignore_errors=True)
