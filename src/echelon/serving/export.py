"""`echelon export`: a trained run, or a baseline, becomes a bundle.

1. The policy of the run's best checkpoints is split into modules, which are exported.
2. It trades the end of the validation window, the graphs beside it: where they decide otherwise
   than the networks (`parity`), nothing is exported. Then the graphs trade it alone, to see how far
   rounding takes a book that nobody leads back.
3. The graphs trade the validation window once more, for what the guards hold live trading to.
4. All is written under a staging name, opened as any user would (`load_bundle`), and renamed.

The test window stays sealed. A run with `eval.deterministic: false` is exported without draws: live
is inference only, and the bundle's configuration says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from echelon.backtest.baselines import FORECAST
from echelon.backtest.ensemble import EnsemblePolicy
from echelon.backtest.forecaster import Model, ensure_forecaster, refusal, scorer_of
from echelon.backtest.policy import Policy
from echelon.backtest.run import run_backtest
from echelon.config import Config, fingerprint, load_run_config, override_config, to_yaml
from echelon.config.agents import Baseline
from echelon.data.store import Store
from echelon.envs.world import World, rules_of, world_of
from echelon.errors import DamagedError, StoreError, TrainingError, UsageError
from echelon.evaluation.evaluate import load_evaluation
from echelon.features.prepared import ARRAYS, OPTIONAL, Prepared
from echelon.files import (
    finite_or_none,
    finite_values,
    sha256_file,
    staging_directory,
    swap_directory,
    sync,
    sync_tree,
    write_atomic,
    write_json,
)
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HEDGE
from echelon.runs import RunDirectory
from echelon.serving import sessions
from echelon.serving.bundle import (
    MANIFEST,
    REFERENCE,
    REMEDY,
    Bundle,
    FeatureFacts,
    SymbolFacts,
    Universe,
    load_bundle,
    model_file,
    write_manifest,
    write_reference,
)
from echelon.serving.graphs import Exporter, PolicySplit
from echelon.serving.guard_reference import GUARDS, fit_reference, write_guard_reference
from echelon.serving.parity import Parity, shadow_policy
from echelon.serving.policies import (
    GRAPH_INPUTS,
    ForecastSpec,
    Graph,
    PolicySpec,
    build_policy,
    graph_kinds,
)
from echelon.serving.torch_graphs import weights_file
from echelon.training.run import TrainedRun, training_hash

log = logging.getLogger(__name__)

_PROOF_BARS = 250
"""Bars of the validation window on which graphs are compared with the networks."""
_MEASURES = ("sharpe_annual", "total_return", "max_drawdown", "turnover_annual")


class ExportRequest(NamedTuple):
    """What of a run to export: one seed, all of them, or a baseline.

    fixed_share: a hierarchy's experts under the fixed-share rule instead of its router
    """

    seed: int | None = None
    ensemble: bool = False
    baseline: str | None = None
    fixed_share: bool = False


class _Source(NamedTuple):
    """A run as it is exported; trained: None where only its data are needed."""

    path: Path
    config: Config
    prepared: Prepared
    trained: TrainedRun | None
    seeds: tuple[int, ...]


def export_bundle(
    run: Path,
    output: Path,
    request: ExportRequest,
    *,
    overwrite: bool = False,
    trust_code: Sequence[Path] = (),
) -> Bundle:
    """Write the bundle `output` of what is asked for; overwrite: in the place of another one."""
    _refuse_target(output, overwrite)
    source = _open_source(run, request, trust_code)
    with staging_directory(output.parent, f".{output.name}-") as staging:
        _write_documents(staging, source)
        world = world_of(source.prepared, source.config, costs=float(source.config.eval.use_fee))
        spec, graphs, proof = _write_policy(staging, source, request, world)
        policy = build_policy(spec, graphs, source.config)
        write_guard_reference(staging / GUARDS, fit_reference(policy, world, source.config))
        write_json(staging / "policy.json", spec, sort_keys=True)
        manifest = source.prepared.manifest
        write_manifest(
            staging,
            {
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "policy": _describe(spec, source.config),
                "seeds": list(source.seeds),
                "n_assets": manifest["N"],
                "n_features": manifest["F"],
                "window": manifest["W"],
                "origin": _origin(source),
                "proof": proof,
            },
        )
        load_bundle(staging)
        sync_tree(staging)
        swap_directory(staging, output)
    sync(output.parent)
    return load_bundle(output, trust_code=trust_code)


def _refuse_target(output: Path, overwrite: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).is_file():
        raise UsageError(
            f"--output-dir {output}: holds something else than a bundle. Name a new directory."
        )
    if not overwrite:
        raise UsageError(
            f"--output-dir {output}: holds a bundle already. Name a new directory, or add "
            "--overwrite."
        )


def _open_source(run: Path, request: ExportRequest, trust_code: Sequence[Path]) -> _Source:
    if sum((request.seed is not None, request.ensemble, request.baseline is not None)) > 1:
        raise UsageError("--seed, --ensemble and --baseline: give one of them.")
    if request.baseline is not None:
        return _open_for_baseline(run, request, trust_code)
    if not sessions.is_available():
        raise UsageError("exporting needs onnxruntime, onnx and onnxscript: the extra `serving`.")
    trained = TrainedRun.open(run, trust_code)
    if not trained.config.eval.deterministic:
        log.warning("%s: eval.deterministic is off; the bundle decides without draws", run)
        config = override_config(trained.config, ["eval.deterministic=true"])
        by = trained.trained_by or training_hash(trained.config)
        trained = replace(trained, config=config, trained_by=by)
    seeds = trained.seeds
    if request.seed is not None:
        if request.seed not in seeds:
            raise UsageError(
                f"--seed {request.seed}: {run} has the trained seeds {', '.join(map(str, seeds))}."
            )
        seeds = (request.seed,)
    elif not request.ensemble and len(seeds) > 1:
        raise UsageError(
            f"{run} has the trained seeds {', '.join(map(str, seeds))}. Name one with --seed, or "
            "average them with --ensemble."
        )
    return _Source(run, trained.config, trained.prepared, trained, seeds)


def _open_for_baseline(run: Path, request: ExportRequest, trust_code: Sequence[Path]) -> _Source:
    names = [name for name in get_args(Baseline) if name != "benchmark"]
    if request.baseline not in names:
        raise UsageError(
            f"--baseline {request.baseline}: expected one of {', '.join(names)}. The benchmark "
            "is an index, which nobody trades."
        )
    if not (run / "config.yaml").is_file():
        raise StoreError(f"{run}: no config.yaml there, so not a run directory.")
    config = load_run_config(run / "config.yaml", (), trust_code)
    prepared = Prepared.open(run, RunDirectory(run).trained_on())
    return _Source(run, config, prepared, None, ())


def _write_policy(
    staging: Path, source: _Source, request: ExportRequest, world: World
) -> tuple[PolicySpec, Mapping[str, Graph], dict[str, Any] | None]:
    """Write graphs, weights and reference decisions; the policy's spec, graphs and proof."""
    if request.baseline == FORECAST:
        return _write_forecaster(staging, source, world)
    if request.baseline is not None:
        return {"kind": "rule", "name": request.baseline}, {}, None
    trained = source.trained
    assert trained is not None
    members = [_member(trained, seed, request) for seed in source.seeds]
    policy = EnsemblePolicy(members) if request.ensemble else members[0]
    config, n_features = source.config, source.prepared.manifest["F"]
    split = PolicySplit(policy, config, n_features)
    exporter, graphs = Exporter(config, n_features), dict[str, Graph]()
    for name, kind in graph_kinds(split.spec).items():
        file = staging / f"{name}.onnx"
        data = exporter.to_onnx(split.modules[name], kind)
        write_atomic(file, data)
        graphs[name] = sessions.OnnxGraph(data, GRAPH_INPUTS[kind], file, REMEDY)
    for name, model in split.models.items():
        _write_model(staging, name, model)
        graphs[name] = scorer_of(model)
    for seed in source.seeds:
        _write_weights(staging / weights_file(seed), trained.weights(seed))
    span = world.span("valid")
    span = range(max(span.start, span.stop - _PROOF_BARS), span.stop)
    parity = Parity()
    twin = build_policy(split.spec, graphs, config)
    led = run_backtest(shadow_policy(policy, twin, split.spec, parity), world, span, config)
    if not parity.holds:
        raise TrainingError(
            f"the exported graphs decide otherwise than the networks: {parity.facts()}. Nothing "
            "was exported; weights so large that rounding matters would do this."
        )
    alone = run_backtest(build_policy(split.spec, graphs, config), world, span, config)
    bars = min(len(led.value), len(alone.value))
    apart = float(np.abs(alone.value[:bars] / led.value[:bars] - 1.0).max())
    references = parity.references(world, config.window)
    write_reference(staging / REFERENCE, split.spec, graphs, config, references)
    days = world.times[[span.start, span.stop - 1]].astype("datetime64[D]")
    proof = {"first": str(days[0]), "last": str(days[1]), "bars": len(span), **parity.facts()}
    return split.spec, graphs, proof | {"equity_gap": finite_or_none(apart)}


def _write_forecaster(
    staging: Path, source: _Source, world: World
) -> tuple[PolicySpec, Mapping[str, Graph], None]:
    """The run's forecaster, which is fitted now where no evaluation has asked for it yet."""
    data = str(source.prepared.manifest["content_hash"])
    forecaster = ensure_forecaster(source.config, world, source.path, data=data)
    if forecaster is None:
        raise UsageError(
            f"--baseline {FORECAST}: {source.path} has no data for it: "
            f"{refusal(source.config, world)}."
        )
    rule = forecaster.rule
    spec = ForecastSpec(kind="forecast", name=FORECAST, model=FORECAST, rule=rule)
    _write_model(staging, FORECAST, forecaster.model)
    return spec, {FORECAST: scorer_of(forecaster.model)}, None


def _write_model(staging: Path, name: str, model: Model) -> None:
    from safetensors.numpy import save

    arrays = {part: np.ascontiguousarray(array) for part, array in model._asdict().items()}
    write_atomic(staging / model_file(name), save(arrays))


def _member(trained: TrainedRun, seed: int, request: ExportRequest) -> Policy:
    policy = trained.policy(seed)
    if not request.fixed_share:
        return policy
    if not isinstance(policy, HierarchyPolicy):
        raise UsageError(
            f"--router fixed_share: train.algo = {trained.config.train.algo} has no router. Leave "
            "the option out."
        )
    return policy.reference_policies()[HEDGE]


def _write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    from safetensors.torch import save

    write_atomic(path, save({name: part.contiguous().clone() for name, part in weights.items()}))


def _describe(spec: PolicySpec, config: Config) -> str:
    if spec["kind"] == "forecast":
        return f"{FORECAST}, {config.forecast.model}, best {spec['rule'].top}"
    if spec["kind"] == "rule":
        return f"rule {spec['name']}"
    if spec["kind"] == "ensemble":
        return f"{config.train.algo}, ensemble of {len(spec['members'])} seeds"
    ruled = spec["kind"] == "hierarchy" and spec["router"]["graph"] is None
    return f"{config.train.algo}{', fixed-share router' if ruled else ''}, {spec['name']}"


def _write_documents(staging: Path, source: _Source) -> None:
    config, prepared = source.config, source.prepared
    write_atomic(staging / "config.yaml", to_yaml(config))
    write_json(staging / "features.json", _features(source), sort_keys=True)
    write_json(staging / "scaler.json", prepared.scaler.to_dict())
    write_json(staging / "universe.json", _universe(source), sort_keys=True)
    write_json(staging / "rules.json", rules_of(prepared, config).facts(), sort_keys=True)


def _features(source: _Source) -> FeatureFacts:
    manifest, config = source.prepared.manifest, source.config
    sources = manifest.get("sources", [])
    known = {source.partition(":")[0] for source in sources}
    modules = []
    for name in config.features.modules:
        try:
            digest = sha256_file(Path(name))
        except OSError as error:
            raise StoreError(
                f"{name}: this factor file cannot be read ({error.strerror}), and the bundle must "
                "name it by its hash. Put it back where features.modules has it."
            ) from None
        if digest not in known:
            raise StoreError(
                f"{name}: this factor file is another one than the run's features were computed "
                f"with (sha256 {digest[:12]}). Put the old one back, or train again."
            )
        modules.append({"path": name, "sha256": digest})
    return {
        "names": list(manifest["features"]),
        "groups": list(manifest["groups"]),
        "lookbacks": dict(manifest["lookbacks"]),
        "warmup": manifest["warmup"],
        "sources": list(sources),
        "left_out": dict(manifest["left_out"]),
        "config": config.features.model_dump(mode="json"),
        "normalization": config.normalization.model_dump(mode="json"),
        "modules": modules,  # type: ignore[typeddict-item]
    }


def _universe(source: _Source) -> Universe:
    """Symbols and bars, with what the store knows of them where it has the run's dataset."""
    prepared, manifest = source.prepared, source.prepared.manifest
    dataset = manifest["dataset"]
    store = Store(source.config.data.store)
    facts: dict[str, Mapping[str, Any]] = {}
    fields = [n for n in (*ARRAYS, *OPTIONAL) if prepared.array(n) is not None]
    fields = [n for n in fields if n in ("open", "high", "low", "close", "volume", "factor")]
    stored = store.find(dataset["name"])
    if stored is not None and stored.content_hash == dataset["content_hash"]:
        facts = {row["symbol"]: row for row in store.symbols(dataset["name"]).to_dicts()}
        fields = sorted(stored.info.fields)
    else:
        log.warning(
            "%s does not hold the dataset %s that the run was trained on: the bundle has no "
            "listing facts and price anchors; what serves it takes them from its own history",
            *(source.config.data.store, dataset["name"]),
        )
    member = prepared.array("member")
    last = prepared.present[-1] if member is None else member[-1]
    return {
        "dataset": {"name": dataset["name"], "content_hash": dataset["content_hash"]},
        "freq": manifest["freq"],
        "calendar": manifest["calendar"],
        "timezone": manifest["timezone"],
        "price_basis": manifest["price_basis"],
        "fields": fields,
        "first": str(prepared.times[0]),
        "splits": {n: (s.rows.start, s.rows.stop) for n, s in prepared.splits.items()},
        "as_of": str(prepared.times[-1]),
        "symbols": [
            _symbol(symbol, bool(now), facts.get(symbol, {}))
            for symbol, now in zip(prepared.symbols, last, strict=True)
        ],
    }


def _symbol(symbol: str, member: bool, facts: Mapping[str, Any]) -> SymbolFacts:
    names = ("first", "last", "listed", "delisted", "reason")
    texts = {n: None if facts.get(n) is None else str(facts[n]) for n in names}
    anchor = finite_or_none(facts.get("anchor") or math.nan)
    return {"symbol": symbol, "member": member, **texts, "anchor": anchor}  # type: ignore[typeddict-item]


def _origin(source: _Source) -> dict[str, Any]:
    """Where the bundle came from: run, data, code, and what it was worth."""
    facts = RunDirectory(source.path).facts()
    origin: dict[str, Any] = {
        "run": source.path.resolve().name,
        "config_hash": fingerprint(source.config),
        "data": dict(source.prepared.manifest["dataset"]),
        "prepared": source.prepared.manifest["content_hash"],
        **{name: facts[name] for name in ("code", "echelon", "finished") if name in facts},
    }
    if source.trained is not None:
        trained = source.trained
        origin["algorithm"] = source.config.train.algo
        origin["best_steps"] = {str(seed): trained.best_step(seed) for seed in source.seeds}
        origin["evaluations"] = _evaluations(trained, source.seeds)
    return origin


def _evaluations(trained: TrainedRun, seeds: Sequence[int]) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    for split in RunDirectory(trained.path).evaluated_splits():
        try:
            evaluation = load_evaluation(trained.path, split)
        except DamagedError as error:
            log.warning("%s; the bundle goes without it", error)
            continue
        saved[split] = {
            str(seed): finite_values({name: evaluation.seeds[seed][name] for name in _MEASURES})
            for seed in seeds
            if seed in evaluation.seeds
        }
    return saved
