"""`echelon export` and `echelon bundle`: a trained run as a bundle, and what a bundle is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from echelon.cli.console import add_row, out, set_up_logging, text_table
from echelon.cli.options import Level, Overwrite, TrustCode

if TYPE_CHECKING:
    from echelon.serving.bundle import Bundle, Proof

app = typer.Typer(help="Look at a bundle and verify it.", no_args_is_help=True)

BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Directory of a bundle.")]
_Router = Literal["learned", "fixed_share"]


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


def print_bundle(bundle: Bundle) -> None:
    """What a bundle is, in a table."""
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
    if config.train.algo == "HIERARCHY" and bundle.spec["kind"] != "rule":
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
