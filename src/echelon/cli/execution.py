"""`echelon execution`: train, evaluate and compare policies that work orders into the market."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli import console, options
from echelon.cli.console import add_row, number_table
from echelon.cli.evaluate import Language, Split
from echelon.cli.prove import PartsDisplay, this_command
from echelon.cli.train import make_room, print_outcomes, train_all_seeds
from echelon.errors import EchelonError, UsageError
from echelon.files import sweep, write_atomic
from echelon.runs import RunDirectory

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.evaluation.execution import ExecutionEvaluation
    from echelon.proving.execution_proofs import ExecutionCertificate
    from echelon.training.loop import Outcome

app = typer.Typer(
    help="Order execution: how parent orders are worked into the market of a day.",
    no_args_is_help=True,
)

SplitOption = Annotated[Split, typer.Option("--split", help="Window to work orders on.")]
ReportLanguage = Annotated[Language, typer.Option("--lang", help="Language of the report.")]
OrdersFile = Annotated[
    Path | None, typer.Option("--orders", help="Work the orders of this file, on the split's days.")
]


@app.command("train")
def train(
    config: options.ConfigFile = None,
    override: options.Overrides = None,
    output_dir: options.OutputDir = None,
    seeds: options.Seeds = None,
    workers: options.Workers = None,
    on: options.On = None,
    resume: options.Resume = None,
    trust_code: options.TrustCode = None,
    overwrite: options.Overwrite = False,
    metrics_port: options.MetricsPort = None,
    log_level: options.Level = "INFO",
) -> None:
    """Train one or more seeds of a policy, and keep the best of each on the validation window.

    Ctrl-C writes a checkpoint and stops; `--resume` goes on as if nothing had happened.
    """
    from echelon.config import user_code

    options.refuse_config_with_resume(config, resume)
    overrides = options.with_engine(override, on)
    tree = options.read_config(config, overrides, log_level, resume, trust_code, seeds)
    options.reach_engine(tree)
    directory = options.run_directory(config, output_dir, resume, tree.logging.output_dir)
    given = options.RunOptions(
        workers=workers, resume=resume, overwrite=overwrite, metrics_port=metrics_port
    )
    with given.exporting_metrics(directory):
        outcomes = train_execution_run(tree, directory, given)
    print_outcomes(outcomes, "gain over TWAP, bp")
    evaluate_execution_run(directory, "valid", user_code(tree))
    typer.echo(f"run: {directory}")
    typer.echo(
        f"next: echelon execution evaluate {directory} --split test{options.trust_flags(tree)}"
    )


def train_execution_run(
    config: Config, directory: Path, given: options.RunOptions
) -> list[Outcome]:
    """Train all seeds in a run directory; write down what it was made from."""
    from echelon.config import to_yaml
    from echelon.execution.simulator import ExecutionRules
    from echelon.training.execution import (
        check_start,
        is_trained,
        load_execution_days,
        train_execution_seed,
    )

    RunDirectory.claim(directory)
    rules = ExecutionRules.from_config(config.execution)
    console.say_execution_rules(rules._asdict(), config.execution.price)
    if given.resume is None:
        with console.err.status("reading the data"):
            check_start(config, directory)
        make_room(directory, given.overwrite, trained=is_trained(directory))
        write_atomic(directory / "config.yaml", to_yaml(config))
    learner = config.execution.learner
    outcomes = train_all_seeds(
        config,
        directory,
        "execution train",
        given,
        total=learner.total_steps * (2 if learner.algo == "OPD" else 1),
        train=train_execution_seed,
        load=load_execution_days,
    )
    RunDirectory(directory).record(config, "execution train")
    return outcomes


@app.command("evaluate")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run directory of `echelon execution train`.")],
    split: SplitOption = "test",
    orders: OrdersFile = None,
    history: Annotated[
        bool, typer.Option("--history", help="Also write every step of every order.")
    ] = False,
    lang: ReportLanguage = "en",
    trust_code: options.TrustCode = None,
    log_level: options.Level = "INFO",
) -> None:
    """Work the orders of a split with the learned policies and the schedules; write a report."""
    console.set_up_logging(log_level)
    # Those of a file of orders are not the split's, and go into a directory of their own.
    place = run / "evaluations" / (split if orders is None else f"{split}-{orders.stem}")
    sweep(run, deep=True)
    named = {run.resolve().name: run}
    _judge(named, split, orders, trust_code or (), place, lang, history=history)


def evaluate_execution_run(run: Path, split: str, trust_code: Sequence[Path] = ()) -> None:
    """Evaluate what was just trained, which has said the rules in force."""
    place = run / "evaluations" / split
    _judge({run.resolve().name: run}, split, None, trust_code, place, "en", with_rules=False)


@app.command("compare")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories.")],
    split: SplitOption = "test",
    orders: OrdersFile = None,
    output_dir: options.OutputDir = None,
    lang: ReportLanguage = "en",
    trust_code: options.TrustCode = None,
    log_level: options.Level = "INFO",
) -> None:
    """Work the same orders, those of the first run, with the policies of several runs."""
    console.set_up_logging(log_level)
    if len(runs) < 2:
        raise UsageError("compare takes two or more run directories; evaluate takes one.")
    if len({run.resolve() for run in runs}) < len(runs):
        raise UsageError(f"compare {' '.join(map(str, runs))}: names one run twice. Name it once.")
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    if output_dir is not None:
        RunDirectory.claim(output_dir)
    named = dict(zip(names, runs, strict=True))
    _judge(named, split, orders, trust_code or (), output_dir, lang)


def _judge(
    runs: Mapping[str, Path],
    split: str,
    orders: Path | None,
    trust_code: Sequence[Path],
    place: Path | None,
    lang: str,
    *,
    history: bool = False,
    with_rules: bool = True,
) -> None:
    from echelon.evaluation.execution import evaluate_trained
    from echelon.report.execution import write_execution_report

    with console.err.status("working orders"):
        result = evaluate_trained(runs, split, orders, history=history, trust_code=trust_code)
        page = None
        if place is not None:
            result.write(place)
            page = write_execution_report(result, place, " / ".join(runs), lang)
    if with_rules:
        console.say_execution_rules(result.facts["rules"], result.facts["price"])
    _print_evaluation(result)
    if page is not None:
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
    output_dir: options.OutputDir = None,
    workers: options.Workers = None,
    on: options.On = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Prove again where the directory holds a proof.")
    ] = False,
    log_level: options.Level = "INFO",
) -> None:
    """Prove the learners of execution on markets whose answer is known; write execution.json.

    Impact against its closed form and dynamic programming, a drift that can be known, a distilled
    oracle against plain PPO, and a martingale. Ctrl-C keeps what is done; the same command in the
    same directory goes on. Leaves with 1 where a claim does not hold.
    """
    from echelon.proving.execution_proofs import (
        PROOFS,
        QUICK_SIZES,
        ProofSizes,
        plan_execution,
        prove_execution,
    )

    console.set_up_logging(log_level)
    names = list(dict.fromkeys(proofs or PROOFS))
    for name in names:
        if name not in PROOFS:
            raise UsageError(f"unknown proof {name!r}: there are {', '.join(PROOFS)}.")
    sizes = QUICK_SIZES if quick else ProofSizes()
    sizes = sizes if seeds is None else replace(sizes, seeds=seeds)
    directory = output_dir or Path("runs", "prove-execution" + "-quick" * quick)
    RunDirectory.claim(directory)
    console.say_line(
        "each proof of execution has a market with a spread, an impact and a volume cap of its "
        "own; no commission, stamp duty, lots, T+1 or price limits; the configuration plays no part"
    )
    compute = options.read_config(None, options.with_engine(None, on), log_level)
    options.reach_engine(compute)
    with console.progress_bar("proving") as bar, options.working_on(compute, workers):
        certificate = prove_execution(
            directory,
            names,
            sizes,
            workers=options.worker_count(workers),
            command=this_command(),
            overwrite=overwrite,
            on_report=PartsDisplay(bar, plan_execution(names, sizes)),
        )
    _print_certificate(certificate)
    typer.echo(f"certificate: {directory / 'execution.json'}")
    failed = [proved.name for proved in certificate.proofs if proved.holds is False]
    if failed:
        raise EchelonError(f"not proved: {', '.join(failed)}. The table says by how much.")


def _print_certificate(certificate: ExecutionCertificate) -> None:
    heads = ("proof", "measured", "result", "95 %", "by seed", "claim", "holds")
    table = console.text_table("execution, where the answer is known", *heads)
    for p in certificate.proofs:
        interval = "" if p.low is None else f"{p.low:.3f} to {p.high:.3f}"
        by_seed = ", ".join(f"{value:.2f}" for value in p.values)
        holds = {True: "yes", False: "NO", None: "(shown)"}[p.holds]
        add_row(table, p.name, p.unit, f"{p.mean:.3f}", interval, by_seed, p.claim, holds)
    console.out.print(table)


def _print_evaluation(result: ExecutionEvaluation) -> None:
    facts = result.facts
    title = (
        f"{result.split}: {facts['orders']:,} orders on {facts['dates']:,} days, {facts['first']} "
        f"to {facts['last']}; basis points, mean over days"
    )
    table = number_table(title, "policy", "gain over TWAP", "PA", "GLR", "gain over VWAP", "FFR")
    if facts.get("orders_elsewhere"):
        typer.echo(
            f"{facts['orders_file']}: {facts['orders_elsewhere']:,} orders on other days left out"
        )
    tree: dict[str, Any] = result.summary()["policies"]
    for name, policy in tree.items():
        measures = policy["measures"]
        glr = "–" if policy["glr"] is None else f"{policy['glr']:.2f}"
        pa, vwap = (f"{measures[m]['estimate']:+.2f}" for m in ("pa", "gain_vwap"))
        filled = f"{measures['ffr']['estimate']:.1%}"
        add_row(table, name, _with_interval(measures["gain_twap"]), pa, glr, vwap, filled)
    console.out.print(table)
    schedules = [name for name, policy in tree.items() if not policy["seeds"]]
    differences = number_table("gain over TWAP vs that of …, paired", "policy", *schedules)
    for name, policy in tree.items():
        if policy["seeds"]:
            cells = (_with_interval(policy["less"][schedule]) for schedule in schedules)
            add_row(differences, name, *cells)
    console.out.print(differences)


def _with_interval(mean: dict[str, float | None]) -> str:
    if mean["low"] is None:
        return f"{mean['estimate']:+.2f}"
    return f"{mean['estimate']:+.2f} ({mean['low']:+.2f} to {mean['high']:+.2f})"
