"""`echelon execution`: train, evaluate and compare policies that work orders into the market."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.console import Bar, add_row, err, numbers, out, progress_bar, titled
from echelon.cli.options import (
    ConfigFile,
    Level,
    LogLevel,
    OutputDir,
    Overrides,
    Resume,
    TrustCode,
    configured,
    refuse_beside_run,
    run_directory,
    trust_flags,
)
from echelon.cli.prove import PartsDisplay
from echelon.cli.rules import say_execution_rules, say_proof_rules
from echelon.cli.train import Overwrite, Seeds, Workers, default_workers
from echelon.cli.watch import clock
from echelon.errors import EchelonError, Stopped, UsageError
from echelon.files import sweep, write_atomic
from echelon.runs import RunDirectory

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.evaluation.execution import ExecutionEvaluation
    from echelon.proving.execution_certificate import ExecutionCertificate
    from echelon.training.execution import ExecutionOutcome
    from echelon.training.execution import Split as SplitName

app = typer.Typer(
    help="Order execution: how parent orders are worked into the market of a day.",
    no_args_is_help=True,
)

Run = Annotated[Path, typer.Argument(help="Run directory of `echelon execution train`.")]
Split = Annotated[str, typer.Option("--split", help="train, valid or test.")]
Lang = Annotated[str, typer.Option("--lang", help="Language of the report: en or zh.")]
Orders = Annotated[
    Path | None,
    typer.Option("--orders", help="Work the orders of this file, on the split's days."),
]


@app.command("train")
def train(
    config: ConfigFile = None,
    override: Overrides = None,
    output_dir: OutputDir = None,
    seeds: Seeds = None,
    workers: Workers = None,
    resume: Resume = None,
    trust_code: TrustCode = None,
    overwrite: Overwrite = False,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Train execution policies, one per seed, and keep each one's best on the validation window.

    Ctrl-C writes a checkpoint and stops; `--resume` goes on as if nothing had happened.
    """
    from echelon.config import user_code

    refuse_beside_run(config, resume)
    tree = configured(config, override, log_level, resume, trust_code)
    if seeds is not None:
        tree = tree.model_copy(update={"train": tree.train.model_copy(update={"seeds": seeds})})
    directory = run_directory(config, output_dir, resume, tree.logging.output_dir)
    outcomes = train_run(
        tree, directory, workers=workers, resume=resume is not None, overwrite=overwrite
    )
    _print_outcomes(outcomes)
    evaluate_run(directory, "valid", "en", trust_code=user_code(tree))
    typer.echo(f"run: {directory}")
    typer.echo(f"next: echelon execution evaluate {directory} --split test{trust_flags(tree)}")


def train_run(
    config: Config, directory: Path, *, workers: int | None, resume: bool, overwrite: bool
) -> list[ExecutionOutcome]:
    """Train all seeds in a run directory; write down what it was made from."""
    from echelon.agents.jobs import run_jobs
    from echelon.config import to_yaml
    from echelon.training.execution import ExecutionProgress, rules_of
    from echelon.training.execution_runs import ExecutionJob, check_start, make_room, train_seed

    RunDirectory.claim(directory)
    say_execution_rules(rules_of(config.execution)._asdict(), config.execution.price)
    if not resume:
        with err.status("reading the data"):
            check_start(config, directory)
        make_room(directory, overwrite=overwrite)
        write_atomic(directory / "config.yaml", to_yaml(config))
    wanted = [config.seed + k for k in range(config.train.seeds)]
    jobs = [ExecutionJob(config, directory, seed, resume) for seed in wanted]
    with progress_bar("execution") as bar:

        def tell(_job: int, message: object) -> None:
            assert isinstance(message, ExecutionProgress)
            _say(bar, message)

        done = run_jobs(
            train_seed, jobs, workers=workers or default_workers(config), on_report=tell
        )
    outcomes = done.all_or_raise()
    if done.stopped:
        where = ", ".join(f"seed {o.seed} at step {o.step:,}" for o in outcomes)
        raise Stopped(
            f"{where or 'before the start'}; checkpoints are written. Go on with: "
            f"echelon execution train --resume {directory}{trust_flags(config)}"
        )
    RunDirectory(directory).record(config, "execution train")
    return outcomes


@app.command("evaluate")
def evaluate(
    run: Run,
    split: Split = "test",
    orders: Orders = None,
    history: Annotated[
        bool, typer.Option("--history", help="Also write every step of every order.")
    ] = False,
    lang: Lang = "en",
    trust_code: TrustCode = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Work the orders of a split with the learned policies and the schedules; write a report."""
    from echelon.cli.console import set_up_logging

    set_up_logging(log_level.value)
    evaluate_run(
        run, split, lang, orders, history=history, trust_code=trust_code or (), with_rules=True
    )


def evaluate_run(
    run: Path,
    split: str,
    lang: str,
    orders: Path | None = None,
    *,
    history: bool = False,
    trust_code: Sequence[Path] = (),
    with_rules: bool = False,
) -> None:
    """Evaluate, print, and write tables and the report.

    trust_code: files of the run's extensions that may run

    Those of a file of orders go into a directory of their own: they are not the split's.
    with_rules: say the rules in force; a training has said them
    """
    from echelon.evaluation.execution import evaluate_trained
    from echelon.report.execution import write_execution_report

    sweep(run, deep=True)
    place = run / "evaluations" / (split if orders is None else f"{split}-{orders.stem}")
    name = run.resolve().name
    with err.status("working orders"):
        found = evaluate_trained(
            {name: run}, _split(split), orders, history=history, trust_code=trust_code
        )
        found.write(place)
        page = write_execution_report(found, place, name, lang)
    if with_rules:
        say_execution_rules(found.facts["rules"], found.facts["price"])
    print_evaluation(found)
    typer.echo(f"report: {page}")


@app.command("compare")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories.")],
    split: Split = "test",
    orders: Orders = None,
    output_dir: OutputDir = None,
    lang: Lang = "en",
    trust_code: TrustCode = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Work the same orders, those of the first run, with the policies of several runs."""
    from echelon.cli.console import set_up_logging
    from echelon.evaluation.execution import evaluate_trained
    from echelon.report.execution import write_execution_report

    set_up_logging(log_level.value)
    if len(runs) < 2:
        raise UsageError("compare takes two or more run directories; evaluate takes one.")
    if len({run.resolve() for run in runs}) < len(runs):
        raise UsageError(f"compare {' '.join(map(str, runs))}: names one run twice. Name it once.")
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    with err.status("working orders"):
        named = dict(zip(names, runs, strict=True))
        found = evaluate_trained(named, _split(split), orders, trust_code=trust_code or ())
    say_execution_rules(found.facts["rules"], found.facts["price"])
    print_evaluation(found)
    if output_dir is not None:
        RunDirectory.claim(output_dir)
        found.write(output_dir)
        page = write_execution_report(found, output_dir, " / ".join(names), lang)
        typer.echo(f"report: {page}")


@app.command("prove")
def prove(
    proofs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROOF]...",
            help="impact, quarters, twentieths, quarters_dqn, drift, distilled, distilled_clear, "
            "distilled_drift, distilled_null, null; default: all.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two seeds and short trainings: a few minutes.")
    ] = False,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Of each proof.")] = None,
    output_dir: OutputDir = None,
    workers: Workers = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Prove anew where the directory holds a proof.")
    ] = False,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Prove the learners of execution on markets whose answer is known; write execution.json.

    Impact against its closed form and dynamic programming, a drift that can be known, a distilled
    oracle against plain PPO, and a martingale. Ctrl-C keeps what is done; the same command in the
    same directory goes on. Leaves with 1 where a claim does not hold.
    """
    from echelon.cli.console import set_up_logging
    from echelon.proving.execution_certificate import plan_execution, prove_execution
    from echelon.proving.execution_proofs import PROOFS, QUICK, ProofSizes

    set_up_logging(log_level.value)
    names = list(dict.fromkeys(proofs or PROOFS))
    for name in names:
        if name not in PROOFS:
            raise UsageError(f"unknown proof {name!r}: there are {', '.join(PROOFS)}.")
    sizes = QUICK if quick else ProofSizes()
    sizes = sizes if seeds is None else replace(sizes, seeds=seeds)
    directory = output_dir or Path("runs") / (
        "prove-execution-quick" if quick else "prove-execution"
    )
    RunDirectory.claim(directory)
    say_proof_rules()
    with progress_bar("proving") as bar:
        certificate = prove_execution(
            directory,
            names,
            sizes,
            workers=workers or os.cpu_count() or 1,
            command=shlex.join(["echelon", *sys.argv[1:]]),
            overwrite=overwrite,
            on_report=PartsDisplay(bar, plan_execution(names, sizes)),
        )
    _print_certificate(certificate)
    typer.echo(f"certificate: {directory / 'execution.json'}")
    failed = [proved.name for proved in certificate.proofs if proved.holds is False]
    if failed:
        raise EchelonError(f"not proved: {', '.join(failed)}. The table says by how much.")


def _print_certificate(certificate: ExecutionCertificate) -> None:
    """Every claim, with its numbers by seed."""
    heads = ("proof", "measured", "result", "95 %", "by seed", "claim", "holds")
    table = titled("execution, where the answer is known", *heads)
    for one in certificate.proofs:
        interval = "" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
        by_seed = ", ".join(f"{value:.2f}" for value in one.values)
        holds = {True: "yes", False: "NO", None: "(shown)"}[one.holds]
        add_row(table, one.name, one.unit, f"{one.mean:.3f}", interval, by_seed, one.claim, holds)
    out.print(table)


def print_evaluation(found: ExecutionEvaluation) -> None:
    """Measures by policy, then the differences that can be claimed."""
    facts = found.facts
    title = (
        f"{found.split}: {facts['orders']:,} orders on {facts['dates']:,} days, {facts['first']} "
        f"to {facts['last']}; basis points, mean over days"
    )
    table = numbers(title, "policy", "gain over TWAP", "PA", "GLR", "gain over VWAP", "FFR")
    if facts.get("orders_elsewhere"):
        typer.echo(
            f"{facts['orders_file']}: {facts['orders_elsewhere']:,} orders on other days left out"
        )
    tree: dict[str, Any] = found.summary()["policies"]
    for name, one in tree.items():
        measures = one["measures"]
        glr = "–" if one["glr"] is None else f"{one['glr']:.2f}"
        add_row(
            table,
            name,
            _bounded(measures["gain_twap"]),
            f"{measures['pa']['estimate']:+.2f}",
            glr,
            f"{measures['gain_vwap']['estimate']:+.2f}",
            f"{measures['ffr']['estimate']:.1%}",
        )
    out.print(table)
    less = numbers("gain over TWAP less that of …, paired", "policy", *_schedules(tree))
    for name, one in tree.items():
        if one["seeds"]:
            add_row(less, name, *(_bounded(one["less"][other]) for other in _schedules(tree)))
    out.print(less)


def _schedules(tree: dict[str, Any]) -> list[str]:
    return [name for name, one in tree.items() if not one["seeds"]]


def _bounded(mean: dict[str, float | None]) -> str:
    """An estimate with its interval."""
    if mean["low"] is None:
        return f"{mean['estimate']:+.2f}"
    return f"{mean['estimate']:+.2f} ({mean['low']:+.2f} to {mean['high']:+.2f})"


def _print_outcomes(outcomes: list[ExecutionOutcome]) -> None:
    table = titled("Training", "seed", "steps", "best at", "validation gain over TWAP, bp", "time")
    for one in outcomes:
        add_row(
            table,
            str(one.seed),
            f"{one.step:,}",
            f"{one.best_step:,}",
            f"{one.best_gain:+.2f}",
            clock(one.seconds),
        )
    out.print(table)


def _say(bar: Bar, now: Any) -> None:  # noqa: ANN401 (ExecutionProgress, imported where it is used)
    bar.label(f"seed {now.seed}, {now.stage}: best gain over TWAP {now.best:+.2f} bp")
    bar.of(now.step, now.total)


def _split(name: str) -> SplitName:
    if name == "train":
        return "train"
    if name == "valid":
        return "valid"
    if name == "test":
        return "test"
    raise UsageError(f"--split {name}: choose train, valid or test.")
