"""`echelon prepare`: from bars to features."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.cli import options
from echelon.cli.console import add_row, out, progress_bar, say_rules, text_table
from echelon.errors import UsageError
from echelon.runs import RunDirectory

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.data.importing import ImportReport
    from echelon.features import PrepareReport

log = logging.getLogger(__name__)


def prepare(
    config: options.ConfigFile = None,
    override: options.Overrides = None,
    output_dir: options.OutputDir = None,
    resume: options.Resume = None,
    trust_code: options.TrustCode = None,
    quarantine: options.Quarantine = False,
    log_level: options.Level = "INFO",
) -> None:
    """Compute features, fit the scaler on the train window and write a prepared set.

    The data are imported first where the store does not have them yet. A set that was prepared
    before, from the same data, configuration and code, comes from the cache. The default directory
    is NAME-prepared; one that holds a trained run is refused, but --resume makes its damaged
    prepared set again.
    """
    options.refuse_config_with_resume(config, resume)
    tree = options.read_config(config, override, log_level, resume, trust_code)
    directory = options.run_directory(
        config, output_dir, resume, tree.logging.output_dir, "-prepared"
    )
    trained = RunDirectory.claim(directory).is_trained
    if trained:
        _refuse_trained(tree, directory, resumed=resume is not None)
    report = prepare_run(tree, directory, "prepare", quarantine=quarantine, record=not trained)
    print_summary(report, directory, tree)


def _refuse_trained(config: Config, directory: Path, *, resumed: bool) -> None:
    from echelon.config import fingerprint, load_run_config

    if resumed and fingerprint(config) == fingerprint(load_run_config(directory / "config.yaml")):
        return
    what = "an override would change it" if resumed else "its configuration and data stay"
    raise UsageError(
        f"{directory}: holds a trained run; {what}. Name another directory (--output-dir). A "
        f"damaged prepared set is made again by: echelon prepare --resume {directory}"
    )


def prepare_run(
    config: Config, directory: Path, command: str, *, quarantine: bool = False, record: bool = True
) -> PrepareReport:
    """Prepare into a run directory, with progress. record: write down what it was made from"""
    # Here and not above: numba and its like take a second, which `echelon --help` has not.
    from echelon.envs.world import rules_of
    from echelon.features import prepare as prepare_features

    run = RunDirectory.claim(directory)
    with progress_bar("reading bars") as bar:

        def on_symbols(done: int, total: int) -> None:
            bar.label("computing features")
            bar.show(done, total)

        report = prepare_features(
            config,
            directory,
            expected=run.trained_on(),
            quarantine=quarantine,
            on_rows=bar.show,
            on_import=tell_import,
            on_symbols=on_symbols,
        )
    manifest = report.prepared.manifest
    rules = rules_of(report.prepared, config).facts()
    if record:
        content = manifest["content_hash"]
        run.record(config, command, data=manifest["dataset"], prepared=content, rules=rules)
    sizes = "T={T}, N={N}, F={F}, W={W}".format(**manifest)
    log.info("prepared %s%s", sizes, " (from the cache)" if report.cached else "")
    say_rules(rules)
    return report


def tell_import(report: ImportReport) -> None:
    manifest = report.manifest
    first, last = manifest.span
    log.info(
        "imported %s: %d bars, %s to %s", manifest.name, manifest.rows, first.date(), last.date()
    )
    for problem in report.problems:
        if problem.severity == "warning":
            log.warning("%s", problem)
    if report.quarantine is not None:
        log.warning("%d row(s) set aside in %s", manifest.quarantined, report.quarantine)


def print_summary(report: PrepareReport, directory: Path, config: Config) -> None:
    from echelon.config import fingerprint

    prepared, manifest = report.prepared, report.prepared.manifest
    table = text_table(f"Prepared set in {directory / 'prepared'}", "what", "value")
    add_row(table, "dataset", f"{manifest['dataset']['name']} ({manifest['price_basis']} prices)")
    add_row(table, "bars × assets × features", "{T} × {N} × {F}, window {W}".format(**manifest))
    for name, split in prepared.splits.items():
        rows = slice(split.rows.start, split.rows.stop)
        share = prepared.present[rows].mean()
        span = f"{split.first} to {split.last}: {len(split.rows)} bars, {share:.1%} present"
        add_row(table, name, span)
    first, last = prepared.scaler.window
    add_row(table, "scaler fitted on", f"{first} to {last}")
    add_row(table, "warm-up", f"{manifest['warmup']} bars a symbol")
    if report.left_out:
        absent = sorted({field for item in report.left_out for field in item.missing})
        names = ", ".join(item.name for item in report.left_out)
        add_row(table, "left out", f"{names} (the source has no {', '.join(absent)})")
    add_row(table, "content hash", manifest["content_hash"][:16])
    add_row(table, "config hash", fingerprint(config)[:16])
    out.print(table)
