"""A bundle: a directory that holds everything a decision needs, and nothing that runs.

docs/guide/export.md says what its files are. `load_bundle` trusts none of it:

1. The manifest is whole (its own hash, its exact bytes) and of a format that this version reads.
2. The directory holds the files it names, plain ones, of these sizes and hashes; and no others.
3. Documents are of their types and fit one another; graphs point to nothing outside of themselves.
4. The reference decisions are made again on this machine. One that is further off than 1e-5, as on
   another CPU it might be, refuses the bundle.

No code of a bundle runs: nothing is pickled, and factor files that its configuration names are
referred to by path and hash, and run only where the user names them too (`config.code`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired

import numpy as np
from typing_extensions import TypedDict

from echelon import __version__
from echelon.backtest.budget import under_budget
from echelon.backtest.forecaster import model_of_arrays, scorer_of
from echelon.backtest.policy import Policy
from echelon.config import Config, load_run_config
from echelon.config.sizes import refuse_sizes
from echelon.errors import DamagedError, StoreError, shorten
from echelon.features.scaler import Scaler
from echelon.files import (
    blaming,
    check_tree,
    json_line,
    parse_json,
    read_json,
    sha256_file,
    write_atomic,
)
from echelon.runs.directory import DataFacts
from echelon.serving import sessions
from echelon.serving.guard_reference import GUARDS, GuardReference, read_guard_reference
from echelon.serving.parity import TOLERANCE, decide_again, gap
from echelon.serving.policies import (
    GRAPH_INPUTS,
    Graph,
    PolicySpec,
    actor_specs,
    build_policy,
    forecast_specs,
    graph_kinds,
)
from echelon.types import Freq, PriceBasis

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
REFERENCE = "reference.safetensors"
REMEDY = "Take the bundle again from where it was made, or export it again: `echelon export`."

MAX_FILES = 1_000
MAX_FILE_BYTES = 1 << 30
"""Of one file; a larger one is not read."""
_MAX_MANIFEST = 4 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
_DECISION = "decision"

Runtime = Literal["onnxruntime", "torch"]


class FileFacts(TypedDict):
    bytes: int
    sha256: str


class Counts(TypedDict):
    """Choices of graphs and networks: see `parity.Choices`."""

    compared: int
    differing: int
    wrong: int


class Proof(TypedDict):
    """How graphs and networks compare on the end of the validation window: see `parity.Parity`.

    equity_gap: how far apart books got that each of them led on its own, as a share
    """

    first: str
    last: str
    bars: int
    weights: int
    weight_gap: float
    actions: Counts
    router: Counts
    probability_gap: float
    equity_gap: float | None


class Origin(TypedDict):
    """Where a bundle came from. evaluations: split → seed → measures"""

    run: str
    config_hash: str
    data: DataFacts
    prepared: str
    code: NotRequired[str]
    echelon: NotRequired[str]
    finished: NotRequired[str]
    algorithm: NotRequired[str]
    best_steps: NotRequired[dict[str, int]]
    evaluations: NotRequired[dict[str, dict[str, dict[str, float | None]]]]


class BundleManifest(TypedDict):
    """What manifest.json holds. proof: None of a rule"""

    format: int
    echelon: str
    created: str
    policy: str
    seeds: list[int]
    n_assets: int
    n_features: int
    window: int
    files: dict[str, FileFacts]
    origin: Origin
    proof: Proof | None


class FactorFile(TypedDict):
    """Code of the user that computes features: where it was, and its SHA-256."""

    path: str
    sha256: str


class FeatureFacts(TypedDict):
    """The columns of X. config, normalization: sections of the configuration"""

    names: list[str]
    groups: list[str]
    lookbacks: dict[str, int]
    warmup: int
    sources: list[str]
    left_out: dict[str, list[str]]
    config: dict[str, Any]
    normalization: dict[str, Any]
    modules: list[FactorFile]


class SymbolFacts(TypedDict):
    """What is known of a symbol as of the export; anchor: close of its first bar in the store."""

    symbol: str
    member: bool
    first: str | None
    last: str | None
    listed: str | None
    delisted: str | None
    reason: str | None
    anchor: float | None


class Universe(TypedDict):
    """Symbols in the order of their columns, and the bars they come in.

    first: time of the first row that the policy knows; as_of: of the last
    splits: name → first row and the one after the last, counted from `first`
    """

    dataset: dict[str, str]
    first: str
    splits: dict[str, tuple[int, int]]
    freq: Freq
    calendar: str
    timezone: str
    price_basis: PriceBasis
    fields: list[str]
    as_of: str
    symbols: list[SymbolFacts]


@dataclass(frozen=True)
class Bundle:
    """A bundle that was verified. difference: of the reference decisions, None: not replayed"""

    path: Path
    id: str
    manifest: BundleManifest
    config: Config
    spec: PolicySpec
    features: FeatureFacts
    scaler: Scaler
    universe: Universe
    rules: Mapping[str, Any]
    graphs: Mapping[str, Graph]
    runtime: Runtime | None
    difference: float | None
    guards: GuardReference | None = None  # of a bundle that was exported before there were guards

    @property
    def symbols(self) -> tuple[str, ...]:
        """[N]."""
        return tuple(facts["symbol"] for facts in self.universe["symbols"])

    def policy(self) -> Policy:
        """A fresh policy; several of them share graphs and nothing else."""
        return under_budget(build_policy(self.spec, self.graphs, self.config), self.config)


def load_bundle(
    path: Path,
    *,
    trust_code: Sequence[Path] = (),
    runtime: Runtime | None = None,
    replay: bool = True,
) -> Bundle:
    """Open a bundle and verify all of it; raises StoreError, which names the file that is wrong.

    trust_code: files of code that its configuration names and that may run
    runtime: what computes graphs; None: ONNX Runtime, or torch where that is not installed
    replay: False: neither graphs are opened nor decisions made again, to look at it only
    """
    manifest, identity = read_manifest(path)
    _verify_files(path, manifest)
    with blaming(path / "config.yaml", REMEDY):
        config = load_run_config(path / "config.yaml", (), trust_code)
    spec = _document(path, "policy.json", PolicySpec)
    features: FeatureFacts = _document(path, "features.json", FeatureFacts)
    universe: Universe = _document(path, "universe.json", Universe)
    rules: dict[str, Any] = _document(path, "rules.json", dict[str, Any])
    with blaming(path / "scaler.json", REMEDY):
        scaler = Scaler.read(path / "scaler.json")
    _verify_facts(path, manifest, config, spec, features, universe, scaler)
    graphs: Mapping[str, Graph] = {}
    difference = None
    if replay:
        if runtime is None:
            runtime = "onnxruntime" if sessions.is_available() else "torch"
            if runtime == "torch" and graph_kinds(spec):
                log.warning(
                    "%s: onnxruntime is not installed, so torch decides, slower and rounded "
                    "otherwise. Install the extra `serving`.",
                    path,
                )
        graphs = _open_graphs(path, manifest, config, spec, runtime)
        difference = _replay(path, spec, graphs, config)
    guards = None
    if GUARDS in manifest["files"]:
        guards = read_guard_reference(path / GUARDS, manifest["n_features"], REMEDY)
    return Bundle(
        *(path, identity, manifest, config, spec, features, scaler, universe, rules),
        *(graphs, runtime, difference, guards),
    )


def read_manifest(path: Path) -> tuple[BundleManifest, str]:
    """The manifest, and its hash, by which a bundle is known."""
    file = path / MANIFEST
    if not file.is_file():
        raise StoreError(
            f"{path}: no {MANIFEST} there, so not a bundle. Name a directory that `echelon export` "
            "wrote."
        )
    data = _read(file, _MAX_MANIFEST)
    tree: dict[str, Any] = parse_json(data, dict[str, Any], file, REMEDY)
    if not isinstance(tree.get("format"), int) or "files" not in tree:
        raise DamagedError(file, "not the manifest of a bundle", REMEDY)
    if tree["format"] != FORMAT:
        raise StoreError(
            f"{file}: bundle format {shorten(tree['format'], 40)} of Echelon "
            f"{shorten(tree.get('echelon', 'unknown'), 40)}; this version reads format {FORMAT}. "
            "Use the version that wrote it, or export the run again."
        )
    with blaming(file, REMEDY):  # a number that no JSON has, or half a character, is not rendered
        is_whole = tree.pop("sha256", None) == _digest(tree) and data == _render(tree)
    if not is_whole:
        raise DamagedError(file, "its content does not have the hash it states", REMEDY)
    return check_tree(tree, BundleManifest, file, REMEDY), _digest(tree)


def write_manifest(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of all files that are in `directory`: the last thing."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
        for file in sorted(directory.iterdir())
    }
    tree = {"format": FORMAT, "echelon": __version__, **facts, "files": files}
    write_atomic(directory / MANIFEST, _render(tree))


def _render(tree: Mapping[str, Any]) -> bytes:
    whole = {**tree, "sha256": _digest(tree)}
    return (json_line(whole, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _digest(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_line(tree, sort_keys=True, allow_nan=True).encode()).hexdigest()


def _read(file: Path, most: int) -> bytes:
    try:
        with file.open("rb") as handle:
            data = handle.read(most + 1)
    except OSError as error:
        raise DamagedError(file, error.strerror or str(error), REMEDY) from None
    if len(data) > most:
        raise DamagedError(file, f"larger than {most:,} bytes", REMEDY)
    return data


def _verify_files(path: Path, manifest: BundleManifest) -> None:
    """Every file is named in the manifest, plain, of its size and of its hash; none is missing."""
    files = manifest["files"]
    if len(files) > MAX_FILES:
        raise DamagedError(path / MANIFEST, f"{len(files)} files, at most {MAX_FILES}", REMEDY)
    for name, facts in files.items():
        if _NAME.fullmatch(name) is None or name == MANIFEST:
            raise DamagedError(path / MANIFEST, f"{shorten(name, 80)!r} is no file name", REMEDY)
        if not 0 <= facts["bytes"] <= MAX_FILE_BYTES:
            raise DamagedError(path / name, f"{facts['bytes']:,} bytes are not read", REMEDY)
    with os.scandir(path) as entries:
        there = {entry.name: entry for entry in entries if entry.name != MANIFEST}
    for name, entry in sorted(there.items()):
        if name not in files:
            raise DamagedError(path / name, "not one of the bundle's files", REMEDY)
        if not entry.is_file(follow_symlinks=False):
            raise DamagedError(path / name, "not a plain file", REMEDY)
    for name, facts in sorted(files.items()):
        if name not in there:
            raise DamagedError(path / name, "no such file", REMEDY)
        size = there[name].stat(follow_symlinks=False).st_size
        if size != facts["bytes"]:
            what = f"{size:,} bytes, the manifest says {facts['bytes']:,}"
            raise DamagedError(path / name, what, REMEDY)
        if (digest := sha256_file(path / name)) != facts["sha256"]:
            what = f"its hash is {digest[:12]}, the manifest says {shorten(facts['sha256'], 12)}"
            raise DamagedError(path / name, what, REMEDY)


def _document(path: Path, name: str, kind: Any) -> Any:  # noqa: ANN401 (of that kind)
    return read_json(path / name, kind, REMEDY)


def _verify_facts(
    path: Path,
    manifest: BundleManifest,
    config: Config,
    spec: PolicySpec,
    features: FeatureFacts,
    universe: Universe,
    scaler: Scaler,
) -> None:
    """The documents fit one another."""
    graphs = {f"{name}.onnx" for name in graph_kinds(spec)}
    others = {name for name in manifest["files"] if name.endswith(".onnx")} ^ graphs
    models = forecast_specs(spec)
    rules = [problem for model in models if (problem := model["rule"].problem)]
    unknown = {model_file(model["model"]) for model in models} - set(manifest["files"])
    wrong = (
        ("policy.json", bool(rules), "; ".join(rules)),
        ("policy.json", bool(unknown), f"its models are not the bundle's: {sorted(unknown)}"),
        ("policy.json", bool(others), f"its graphs are not the bundle's: {sorted(others)}"),
        ("features.json", len(features["names"]) != manifest["n_features"], "not F features"),
        ("scaler.json", list(scaler.names) != features["names"], "not the names of the features"),
        ("universe.json", len(universe["symbols"]) != manifest["n_assets"], "not N symbols"),
        ("config.yaml", config.window != manifest["window"], "window is not the manifest's"),
    )
    for name, is_wrong, what in wrong:
        if is_wrong:
            raise DamagedError(path / name, what, REMEDY)


def model_file(name: str) -> str:
    """The file of a forecaster's model."""
    return f"{name}.safetensors"


def _open_models(path: Path, manifest: BundleManifest, spec: PolicySpec) -> dict[str, Graph]:
    """Name → scorer of every forecaster."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    scorers: dict[str, Graph] = {}
    for part in forecast_specs(spec):
        file = path / model_file(part["model"])
        try:
            model = model_of_arrays(load(_read(file, MAX_FILE_BYTES)), manifest["n_features"])
        except (SafetensorError, LookupError, ValueError, TypeError) as error:
            raise DamagedError(file, str(error), REMEDY) from None
        scorers[part["model"]] = scorer_of(model)
    return scorers


def _open_graphs(
    path: Path, manifest: BundleManifest, config: Config, spec: PolicySpec, runtime: Runtime
) -> Mapping[str, Graph]:
    kinds, graphs = graph_kinds(spec), _open_models(path, manifest, spec)
    if runtime == "torch" and kinds:
        from echelon.serving.torch_graphs import load_torch_graphs

        refuse_sizes(config)
        made = load_torch_graphs(path, config, manifest["seeds"], manifest["n_features"])
        return {**graphs, **made}
    for name, kind in kinds.items():
        file = path / f"{name}.onnx"
        data = _read(file, MAX_FILE_BYTES)
        graphs[name] = sessions.OnnxGraph(data, GRAPH_INPUTS[kind], file, REMEDY)
    return graphs


def write_reference(
    path: Path,
    spec: PolicySpec,
    graphs: Mapping[str, Graph],
    config: Config,
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Write reference decisions: inputs, as `Parity.references` has them, and what is decided."""
    from safetensors.numpy import save

    decided = decide_again(spec, graphs, config, arrays)
    every = {**arrays, **{f"{name}.{_DECISION}": array for name, array in decided.items()}}
    write_atomic(path, save({name: np.ascontiguousarray(array) for name, array in every.items()}))


def _replay(
    path: Path, spec: PolicySpec, graphs: Mapping[str, Graph], config: Config
) -> float | None:
    """The largest difference of the reference decisions, made again; None: a rule has none."""
    if not actor_specs(spec):
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load

    file = path / REFERENCE
    if not file.exists():
        raise DamagedError(file, "no such file", REMEDY)
    try:
        arrays = load(_read(file, MAX_FILE_BYTES))
    except (SafetensorError, LookupError, ValueError, TypeError) as error:
        raise DamagedError(file, str(error), REMEDY) from None
    with blaming(file, REMEDY):
        decided = decide_again(spec, graphs, config, arrays)
        gaps = {name: gap(arrays[f"{name}.{_DECISION}"], now) for name, now in decided.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    if gaps[worst] > TOLERANCE:
        raise StoreError(
            f"{file}: {worst} decides otherwise on this machine than where the bundle was made: "
            f"off by {gaps[worst]:.2g}, at most {TOLERANCE:g} is rounding. Export the run on a "
            "machine like this one."
        )
    return gaps[worst]
