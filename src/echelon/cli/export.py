"""`echelon export`, `bundle` and `serve`: a trained run as a bundle, and what decides by one."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from echelon.cli.console import add_row, out, set_up_logging, text_table
from echelon.cli.options import Level, Overwrite, TrustCode
from echelon.errors import EchelonError, UsageError
from echelon.files import exclusive_lock

if TYPE_CHECKING:
    from echelon.serving.bundle import Bundle, Proof
    from echelon.serving.engine import DecisionEngine

app = typer.Typer(help="Look at a bundle and verify it.", no_args_is_help=True)

BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Directory of a bundle.")]
_Router = Literal["learned", "fixed_share"]
_Store = Annotated[
    Path | None,
    typer.Option("--store", help="Store with the history; default: the configuration's."),
]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a trained run.")],
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Directory of the bundle.")],
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed to export; needed where there are several.")
    ] = None,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Export the mean of all seeds as one policy.")
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="Export a rule on the run's data, such as equal_weight."),
    ] = None,
    router: Annotated[
        _Router, typer.Option("--router", help="Who chooses the expert of a hierarchy.")
    ] = "learned",
    overwrite: Overwrite = False,
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Write a bundle: all that a decision needs, as ONNX graphs and documents, and no code.

    The graphs are compared with the networks on the end of the validation window, bar by bar.
    """
    from echelon.serving.export import ExportRequest, export_bundle

    set_up_logging(log_level)
    request = ExportRequest(seed, ensemble, baseline, fixed_share=router == "fixed_share")
    bundle = export_bundle(
        run, output_dir, request, overwrite=overwrite, trust_code=trust_code or ()
    )
    print_bundle(bundle)
    typer.echo(f"bundle: {output_dir}")


@app.command()
def show(bundle: BundlePath, log_level: Level = "INFO") -> None:
    """Say what a bundle is, where it came from, what it needs and how it was proved.

    Its files are verified, its decisions are not made again: see `verify`.
    """
    from echelon.serving.bundle import load_bundle

    set_up_logging(log_level)
    print_bundle(load_bundle(bundle, replay=False))


@app.command()
def verify(bundle: BundlePath, log_level: Level = "INFO") -> None:
    """Verify every file of a bundle and make its reference decisions again on this machine.

    Exit code 5 where anything is not as it was written.
    """
    from echelon.serving.bundle import load_bundle

    set_up_logging(log_level)
    loaded = load_bundle(bundle)
    files = len(loaded.manifest["files"])
    if loaded.difference is None:
        typer.echo(f"{bundle}: whole, {files} files; a rule has no decisions to make again")
        return
    typer.echo(
        f"{bundle}: whole, {files} files; the reference decisions are off by "
        f"{loaded.difference:.2g} at most, by {loaded.runtime}"
    )


@app.command()
def replay(
    bundle: BundlePath,
    run: Annotated[Path, typer.Option("--run", help="The run that it was exported from.")],
    store: _Store = None,
    bars: Annotated[int, typer.Option("--bars", min=2, help="Bars to replay, the last ones.")] = 21,
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Push the end of the validation window through the engine; it must equal the backtest.

    Decisions, fills and equity are compared bit for bit. Exit code 1 where anything differs.
    """
    set_up_logging(log_level)
    replay_bundle(bundle, run, bars, store, trust_code or ())


def replay_bundle(
    path: Path,
    run: Path,
    bars: int,
    store: Path | None = None,
    trust_code: Sequence[Path] = (),
) -> None:
    """Replay a bundle's policy on the validation window of its run, and say what came out."""
    from echelon.envs.world import world_of
    from echelon.features import Prepared
    from echelon.runs import RunDirectory
    from echelon.serving.bundle import load_bundle
    from echelon.serving.replay import replay, session_rows

    bundle = load_bundle(path, trust_code=trust_code)
    prepared = Prepared.open(run, RunDirectory(run).trained_on())
    if prepared.manifest["content_hash"] != bundle.manifest["origin"]["prepared"]:
        raise UsageError(f"--run {run}: not the run that {path} was exported from.")
    config = bundle.config
    world = world_of(prepared, config, costs=float(config.eval.use_fee))
    rows = session_rows(world, world.span("valid"), bars)
    done = replay(bundle, config.data.store if store is None else store, world, rows)
    if done.differences:
        some = "\n".join(done.differences[:10])
        raise EchelonError(f"the engine differs from the backtest:\n{some}")
    typer.echo(
        f"replayed {done.bars} bars, {str(done.first)[:16]} to {str(done.last)[:16]}, with "
        f"{done.orders} orders: decisions, fills and equity equal the backtest bit for bit "
        f"({1e3 * done.seconds / done.bars:.1f} ms a bar)"
    )


def serve(
    bundle: BundlePath,
    store: _Store = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="File of the engine's state; default: BUNDLE.state."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port.")] = 8321,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Listen on an address that others reach.")
    ] = False,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Ask for no token; loopback only.")
    ] = False,
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Answer bars with decisions over HTTP, on this machine, to whoever has the token.

    The token is the environment variable ECHELON_TOKEN. The engine warms up on the history in the
    store, or goes on from its state file where there is one.
    """
    from echelon.config.secrets import is_loopback, require_token

    set_up_logging(log_level)
    loopback = is_loopback(host)
    if not loopback and not allow_remote:
        raise UsageError(
            f"--host {host}: others can reach that address. Add --allow-remote if that is meant, "
            "and put a proxy with TLS before it; or leave --host out."
        )
    if no_token and not loopback:
        raise UsageError(f"--no-token: --host {host} is not a loopback address. Set a token.")
    token = None if no_token else require_token()
    try:
        import uvicorn

        from echelon.serving.service import create_app
    except ImportError as error:
        raise UsageError(f"serving needs the extra `serving` ({error}).") from None
    file = state_file(bundle, state)
    lock = exclusive_lock(file.with_name(f"{file.name}.lock"), f"the state {file}")
    with lock, _listen(host, port) as listening:
        engine = open_engine(bundle, store, file, trust_code or ())
        typer.echo(
            f"serving {bundle} ({engine.bundle.manifest['policy']}) on "
            f"http://{host}:{listening.getsockname()[1]}, up to {str(engine.time)[:16]}"
        )
        # With the lifespan off, Ctrl-C and SIGTERM end it without a word.
        settings = uvicorn.Config(create_app(engine, token), log_level="warning", lifespan="off")
        with suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run([listening])


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, before anything is promised."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}). Name another "
            "port, or end what uses this one."
        ) from None


def state_file(bundle: Path, state: Path | None) -> Path:
    """Where the engine of a bundle keeps its state: named, or next to the bundle."""
    whole = bundle.resolve()
    file = whole.with_name(f"{whole.name}.state") if state is None else state.absolute()
    if file.resolve().is_relative_to(whole):
        raise UsageError(f"--state {state}: inside of the bundle, which holds only its own files.")
    return file


def open_engine(
    path: Path, store: Path | None, file: Path, trust_code: Sequence[Path]
) -> DecisionEngine:
    """The engine of a bundle: from its state file, or behind the history of the store."""
    from echelon.serving.bundle import load_bundle
    from echelon.serving.engine import DecisionEngine

    bundle = load_bundle(path, trust_code=trust_code)
    if file.exists():
        return DecisionEngine.restore(bundle, file)
    place = bundle.config.data.store if store is None else store
    return DecisionEngine.from_store(bundle, place, state=file)


def print_bundle(bundle: Bundle) -> None:
    table = text_table("", "bundle", str(bundle.path))
    for name, text in _facts(bundle):
        add_row(table, name, text)
    out.print(table)


def _facts(bundle: Bundle) -> Iterator[tuple[str, str]]:
    manifest, universe, config = bundle.manifest, bundle.universe, bundle.config
    files, origin = manifest["files"], manifest["origin"]
    size = sum(facts["bytes"] for facts in files.values())
    graphs = sum(name.endswith(".onnx") for name in files)
    yield "policy", manifest["policy"]
    yield "identity", bundle.id
    yield "written", f"{manifest['created']} by Echelon {manifest['echelon']}"
    yield "size", f"{size / 1e6:,.2f} MB in {len(files)} files, {graphs} of them graphs"
    steps = ", ".join(f"seed {s} at step {n:,}" for s, n in origin.get("best_steps", {}).items())
    yield "from run", "; ".join(filter(None, (origin["run"], steps)))
    yield "from data", f"{origin['data']['name']}, content {origin['data']['content_hash'][:12]}"
    code = origin.get("code", "unknown")
    yield "from code", f"{code}, configuration {origin['config_hash'][:12]}"
    yield "evaluated", _evaluation_lines(origin.get("evaluations", {}))
    yield "proof", _proof(manifest["proof"])
    symbols = bundle.symbols
    some = ", ".join(symbols[:8]) + (" …" if len(symbols) > 8 else "")
    yield "symbols", f"{len(symbols)}: {some}"
    yield (
        "bars",
        f"{universe['freq']}, calendar {universe['calendar']}, {universe['timezone']}, prices "
        f"{universe['price_basis']}, with {', '.join(universe['fields'])}",
    )
    features = bundle.features
    yield (
        "features",
        f"{manifest['n_features']} in windows of {manifest['window']} bars; the first needs "
        f"{features['warmup']} bars",
    )
    for module in features["modules"]:
        yield "factor file", f"{module['path']}, sha256 {module['sha256']}: runs only if trusted"
    rules = bundle.rules
    yield "market", f"preset {rules.get('preset')}, fills at {rules.get('fill')}"
    if config.train.algo == "HIERARCHY" and bundle.spec["kind"] not in ("rule", "forecast"):
        yield "risk control", "on" if config.risk.enabled else "off"


def _evaluation_lines(evaluations: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> str:
    lines = [
        f"{split}, seed {seed}: Sharpe {measures.get('sharpe_annual') or float('nan'):.2f} a year"
        for split, seeds in evaluations.items()
        for seed, measures in seeds.items()
    ]
    return "\n".join(lines) or "no"


def _proof(proof: Proof | None) -> str:
    """How far graphs and networks are apart, in words."""
    if proof is None:
        return "a rule, which is the code of Echelon itself"
    lines = [f"graphs against torch, {proof['first']} to {proof['last']} ({proof['bars']} bars):"]
    if proof["weights"]:
        lines.append(f"{proof['weights']:,} weights off by {proof['weight_gap']:.1g} at most")
    for counted, what in ((proof["actions"], "actions"), (proof["router"], "router choices")):
        if counted["compared"]:
            lines.append(f"{counted['compared']:,} {what}, {counted['differing']} differ")
    gap = proof["equity_gap"]
    lines.append("equity " + ("ruined" if gap is None else f"apart by {gap:.1g}") + " on its own")
    return "\n".join(lines)
