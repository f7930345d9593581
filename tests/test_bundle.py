"""Bundles: what is exported decides as what was trained, and what is damaged is refused by name."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundles import EXPORTED, trained_run
from safetensors.numpy import load_file, save_file
from worlds import prepared_run

from echelon.backtest.forecaster import ensure_forecaster
from echelon.backtest.run import run_backtest
from echelon.config.algorithms import ALGORITHMS
from echelon.envs.world import world_of
from echelon.errors import DamagedError, StoreError, UsageError
from echelon.features import Prepared
from echelon.serving import bundle as bundles
from echelon.serving import sessions
from echelon.serving.bundle import MANIFEST, REFERENCE, Bundle, load_bundle, write_manifest
from echelon.serving.export import ExportRequest, export_bundle
from echelon.serving.parity import TOLERANCE, gap
from echelon.training.run import TrainedRun


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def flat_run(place: Path, bars_file: Path) -> Path:
    """Two seeds of A2C."""
    return trained_run(place / "flat", bars_file, "A2C", seeds=(1, 2))


@pytest.fixture(scope="module")
def flat(place: Path, flat_run: Path) -> Path:
    """A bundle of one of them. Copy it before changing anything."""
    return export_bundle(flat_run, place / "flat-bundle", ExportRequest(seed=1)).path


@pytest.fixture
def copy(flat: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(flat, tmp_path / "bundle"))


def backtest(run: Path, policy: Any) -> Any:
    opened = TrainedRun.open(run)
    world = world_of(opened.prepared, opened.config)
    span = world.span("valid")
    return run_backtest(policy, world, range(span.stop - 40, span.stop), opened.config)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_exports_and_decides_as_torch_or_is_refused_by_name(
    algo: str, place: Path, bars_file: Path
) -> None:
    if algo not in EXPORTED:
        from worlds import make_config

        from echelon.serving.graphs import PolicySplit

        with pytest.raises(UsageError, match=rf"train\.algo = {algo}: .* cannot be exported"):
            PolicySplit(object(), make_config(f"train.algo={algo}"), 3)  # type: ignore[arg-type]
        return
    run = trained_run(place / algo, bars_file, algo)
    bundle = export_bundle(run, place / f"{algo}-bundle", ExportRequest())
    proof = bundle.manifest["proof"]
    assert proof is not None
    assert proof["weight_gap"] <= TOLERANCE
    assert proof["actions"]["wrong"] == proof["router"]["wrong"] == 0
    assert proof["weights"] + proof["actions"]["compared"] > 0
    assert bundle.runtime == "onnxruntime"
    assert bundle.difference == 0.0
    assert load_bundle(bundle.path, runtime="torch").difference < TOLERANCE  # type: ignore[operator]
    # The same policy again, bit for bit.
    first, second = (backtest(run, bundle.policy()) for _ in range(2))
    np.testing.assert_array_equal(first.actions, second.actions)
    if algo == "HIERARCHY":
        assert proof["router"]["compared"] > 0
        names = [name for name in bundle.manifest["files"] if name.endswith(".onnx")]
        experts = sum(name.startswith("actor") for name in names)
        encoders = sum(name.startswith("encoder") for name in names)
        assert experts == bundle.config.experts.n_experts
        assert 1 <= encoders <= experts
        assert "router-0.onnx" in names
        ruled = export_bundle(run, place / "ruled", ExportRequest(fixed_share=True))
        assert "fixed-share router" in ruled.manifest["policy"]
        assert "router-0.onnx" not in ruled.manifest["files"]
        assert len(backtest(run, ruled.policy()).value) == 40


def test_ensemble_bundle_averages_the_seeds(flat_run: Path, place: Path) -> None:
    bundle = export_bundle(flat_run, place / "ensemble", ExportRequest(ensemble=True))
    assert bundle.manifest["seeds"] == [1, 2]
    assert "ensemble of 2 seeds" in bundle.manifest["policy"]
    opened = TrainedRun.open(flat_run)
    world = world_of(opened.prepared, opened.config)
    policies = [bundle.policy(), *(opened.policy(seed) for seed in (1, 2))]
    from echelon.config.agents import RewardConfig
    from echelon.envs.act import ActionRule
    from echelon.envs.books import Books

    span = world.span("valid")
    rule = ActionRule.from_config(opened.config, "discrete")
    books = Books(world, rule, RewardConfig(), 1, span)
    for policy in policies:
        policy.start(world, span)
    for _ in range(20):
        held = books.holdings()
        said = [policy.probabilities(books.row, held) for policy in policies]  # type: ignore[attr-defined]
        assert gap((said[1] + said[2]) / 2, said[0]) < TOLERANCE
        books.step(policies[0].decide(books.row, held))


def test_fresh_process_decides_the_same_without_torch(flat: Path, flat_run: Path) -> None:
    code = (
        "import sys, json, numpy as np; from pathlib import Path\n"
        "from echelon.serving.bundle import load_bundle\n"
        "from echelon.backtest.run import run_backtest\n"
        "from echelon.envs.world import world_of\n"
        "from echelon.features import Prepared\n"
        "b = load_bundle(Path(sys.argv[1]))\n"
        "w = world_of(Prepared.open(Path(sys.argv[2])), b.config); s = w.span('valid')\n"
        "t = run_backtest(b.policy(), w, range(s.stop - 40, s.stop), b.config)\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps([t.value.tolist(), t.actions.tolist()]))\n"
    )
    words = [sys.executable, "-c", code, str(flat), str(flat_run)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    value, actions = json.loads(done.stdout.splitlines()[-1])
    here = backtest(flat_run, load_bundle(flat).policy())
    assert here.value.tolist() == value
    assert here.actions.tolist() == actions


def test_bundle_holds_what_a_decision_needs(flat: Path, flat_run: Path) -> None:
    bundle, prepared = load_bundle(flat), Prepared.open(flat_run)
    assert bundle.symbols == prepared.symbols
    assert bundle.features["names"] == list(prepared.names)
    assert bundle.features["warmup"] == prepared.manifest["warmup"]
    np.testing.assert_array_equal(bundle.scaler.mean, prepared.scaler.mean)
    universe = bundle.universe
    assert universe["calendar"] == prepared.manifest["calendar"]
    assert "close" in universe["fields"]
    for facts in universe["symbols"]:
        assert facts["anchor"] is not None
        assert facts["anchor"] > 0.0
        assert facts["first"] is not None
    assert bundle.rules["preset"] == "paper"
    origin = bundle.manifest["origin"]
    assert origin["data"] == prepared.manifest["dataset"]
    assert origin["best_steps"] == {"1": TrainedRun.open(flat_run).best_step(1)}
    assert len(bundle.id) == 64


def test_flipped_byte_of_every_file_is_refused_by_its_name(copy: Path) -> None:
    for file in sorted(copy.iterdir()):
        data = file.read_bytes()
        for place in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[place] ^= 1
            file.write_bytes(changed)
            with pytest.raises(StoreError, match=file.name):
                load_bundle(copy, replay=False)
        file.write_bytes(data)
    assert load_bundle(copy).difference == 0.0


def test_missing_cut_and_foreign_files_are_refused_by_name(copy: Path) -> None:
    for file in sorted(copy.iterdir()):
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(StoreError, match=file.name):
            load_bundle(copy)
        file.write_bytes(data[:-1])
        with pytest.raises(StoreError, match=file.name):
            load_bundle(copy)
        file.write_bytes(data)
    for name in ("extra.onnx", "run.py"):
        (copy / name).write_bytes(b"x")
        with pytest.raises(DamagedError, match=rf"{name}.*not one of the bundle's files"):
            load_bundle(copy)
        (copy / name).unlink()
    target = copy / "scaler.json"
    shutil.move(target, copy.parent / "scaler.json")
    target.symlink_to(copy.parent / "scaler.json")
    with pytest.raises(DamagedError, match=r"scaler\.json.*not a plain file"):
        load_bundle(copy)


def reseal(bundle: Path, **changes: Any) -> None:
    """Make a changed bundle fit a manifest again, as one who forges it would."""
    tree = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    (bundle / MANIFEST).unlink()
    known = ("format", "echelon", "files", "sha256")
    facts = {name: value for name, value in tree.items() if name not in known}
    write_manifest(bundle, facts | changes)


def test_bundle_of_another_format_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "FORMAT", 2)
    reseal(copy)
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"manifest\.json: bundle format 2 .* reads format 1"):
        load_bundle(copy)


@pytest.mark.parametrize("name", ["../scaler.json", "/etc/passwd", ".hidden", "a/b", MANIFEST])
def test_names_that_lead_elsewhere_are_refused(
    name: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    tree.pop("sha256")
    tree["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (copy / MANIFEST).write_bytes(bundles._render(tree))
    with pytest.raises(DamagedError, match="is no file name"):
        load_bundle(copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_manifest_that_no_json_can_hold_is_damaged(value: object, copy: Path) -> None:
    tree = json.loads((copy / MANIFEST).read_text(encoding="utf-8")) | {"created": value}
    tree.pop("sha256")
    tree["sha256"] = bundles._digest(tree)
    (copy / MANIFEST).write_text(json.dumps(tree, sort_keys=True) + "\n")
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        load_bundle(copy)


def test_graph_that_cannot_be_computed_is_damaged(copy: Path) -> None:
    bundle = load_bundle(copy)
    graph = bundle.graphs["encoder-0"]
    x = np.zeros((1, bundle.config.window, 4, len(bundle.features["names"])), dtype=np.float32)
    assert graph(x).ndim == 3
    for wrong in (x.astype(np.float16), x[0], x[..., :1]):
        with pytest.raises(DamagedError, match=r"encoder-0\.onnx.*cannot be computed"):
            graph(wrong)


def test_decisions_that_come_out_otherwise_here_refuse_the_bundle(copy: Path) -> None:
    arrays = load_file(copy / REFERENCE)
    moved = arrays["actor-0.decision"].copy()
    moved[0, 0] += 3e-4
    save_file(arrays | {"actor-0.decision": moved}, copy / REFERENCE)
    reseal(copy)
    with pytest.raises(StoreError, match=r"reference\.safetensors: actor-0 .* off by 0\.0003"):
        load_bundle(copy)
    save_file({n: a for n, a in arrays.items() if n != "actor-0.row"}, copy / REFERENCE)
    reseal(copy)
    with pytest.raises(DamagedError, match=r"reference\.safetensors.*actor-0\.row"):
        load_bundle(copy)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("policy.json", {"kind": "weights", "name": "x", "encoder": "encoder-9", "actor": "a"}),
        ("policy.json", {"kind": "pickle"}),
        ("universe.json", {"symbols": []}),
        ("features.json", {"names": []}),
        ("config.yaml", "window: 7\n"),
    ],
)
def test_documents_that_do_not_fit_are_refused_by_name(file: str, change: Any, copy: Path) -> None:
    if file == "config.yaml":
        text = (copy / file).read_text(encoding="utf-8").replace("window: 6\n", change)
        (copy / file).write_text(text, encoding="utf-8")
    else:
        tree = json.loads((copy / file).read_text(encoding="utf-8"))
        changed = change if file == "policy.json" else tree | change
        (copy / file).write_text(json.dumps(changed), encoding="utf-8")
    reseal(copy)
    with pytest.raises(DamagedError, match=file):
        load_bundle(copy)


def test_torch_serves_and_says_so_where_onnxruntime_is_missing(
    flat: Path,
    flat_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sessions, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        bundle = load_bundle(flat)
    assert bundle.runtime == "torch"
    assert bundle.difference is not None
    assert bundle.difference < TOLERANCE
    assert [r.message for r in caplog.records if "onnxruntime is not installed" in r.message]
    by_torch = backtest(flat_run, bundle.policy())
    np.testing.assert_array_equal(
        by_torch.actions, backtest(flat_run, TrainedRun.open(flat_run).policy(1)).actions
    )
    with pytest.raises(UsageError, match="the extra `serving`"):
        export_bundle(flat_run, flat.parent / "never", ExportRequest(seed=1))


def test_what_cannot_be_exported_is_said_before_anything_is_written(
    flat_run: Path, flat: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"seeds 1, 2\. Name one with --seed"):
        export_bundle(flat_run, out, ExportRequest())
    with pytest.raises(UsageError, match=r"--seed 7: .* trained seeds 1, 2"):
        export_bundle(flat_run, out, ExportRequest(seed=7))
    with pytest.raises(UsageError, match="give one of them"):
        export_bundle(flat_run, out, ExportRequest(seed=1, ensemble=True))
    with pytest.raises(UsageError, match=r"fixed_share: train\.algo = A2C has no router"):
        export_bundle(flat_run, out, ExportRequest(seed=1, fixed_share=True))
    with pytest.raises(UsageError, match="--baseline benchmark: expected one of"):
        export_bundle(flat_run, out, ExportRequest(baseline="benchmark"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"holds a bundle already.*--overwrite"):
        export_bundle(flat_run, flat, ExportRequest(seed=1))
    with pytest.raises(UsageError, match="something else than a bundle"):
        export_bundle(flat_run, flat_run, ExportRequest(seed=1), overwrite=True)


FACTOR = """
from echelon.features import factor

@factor(lookback=3)
def gap3(bars):
    import numpy as np
    out = np.full(len(bars.close), np.nan)
    out[2:] = bars.close[2:] / bars.close[:-2] - 1.0
    return out
"""


def test_rule_is_exported_without_training_and_factor_files_by_hash_alone(
    tmp_path: Path, bars_file: Path
) -> None:
    code = tmp_path / "mine.py"
    code.write_text(FACTOR)
    run = prepared_run(tmp_path / "run", bars_file, f"features.modules=[{code}]")
    request = ExportRequest(baseline="equal_weight")
    bundle = export_bundle(run, tmp_path / "rule", request)
    assert bundle.manifest["policy"] == "rule equal_weight"
    assert bundle.manifest["proof"] is None
    (module,) = bundle.features["modules"]
    assert module["path"] == str(code)
    assert not list(bundle.path.glob("*.py"))
    world = world_of(Prepared.open(run), bundle.config)
    span = world.span("valid")
    assert run_backtest(bundle.policy(), world, span, bundle.config).kind == "weights"
    # Opening it runs no code, and needs none.
    code.write_text("raise RuntimeError('ran')\n")
    assert load_bundle(bundle.path).features["modules"] == [module]
    with pytest.raises(StoreError, match=r"mine\.py: this factor file is another one"):
        export_bundle(run, tmp_path / "again", request)
    code.unlink()
    with pytest.raises(StoreError, match=r"mine\.py: this factor file cannot be read"):
        export_bundle(run, tmp_path / "again", request)
    assert not (tmp_path / "again").exists()


@pytest.fixture(scope="module")
def forecast(place: Path, bars_file: Path) -> tuple[Path, Path]:
    """(run, bundle) of a forecaster, which the export fits: nothing was trained or evaluated."""
    run = prepared_run(place / "forecast-run", bars_file, "forecast.trees=20")
    export_bundle(run, place / "forecast", ExportRequest(baseline="forecast"))
    return run, place / "forecast"


def test_forecaster_decides_in_a_fresh_process_without_torch_and_lightgbm(
    forecast: tuple[Path, Path],
) -> None:
    run, path = forecast
    prepared = Prepared.open(run)
    config = load_bundle(path).config
    world = world_of(prepared, config)
    data = str(prepared.manifest["content_hash"])
    fitted = ensure_forecaster(config, world, run, data=data)
    assert fitted is not None
    here = run_backtest(fitted.policy(), world, world.span("valid"), config)
    assert here.traded.sum() > 1.0
    code = (
        "import sys, json; from pathlib import Path\n"
        "from echelon.serving.bundle import load_bundle\n"
        "from echelon.backtest.run import run_backtest\n"
        "from echelon.envs.world import world_of\n"
        "from echelon.features import Prepared\n"
        "b = load_bundle(Path(sys.argv[1]))\n"
        "w = world_of(Prepared.open(Path(sys.argv[2])), b.config)\n"
        "t = run_backtest(b.policy(), w, w.span('valid'), b.config)\n"
        "assert not {'torch', 'lightgbm', 'arch', 'sklearn'} & set(sys.modules)\n"
        "print(json.dumps([b.manifest['policy'], t.value.tolist()]))\n"
    )
    words = [sys.executable, "-c", code, str(path), str(run)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    policy, value = json.loads(done.stdout.splitlines()[-1])
    assert policy == f"forecast, boosting, best {fitted.rule.top}"
    assert here.value.tolist() == value


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("forecast.safetensors", lambda a: {**a, "left": a["left"] * 0}, "points to no node"),
        ("forecast.safetensors", lambda a: {"weights": a["value"]}, "weights for"),
        ("forecast.safetensors", lambda a: {**a, "more": a["value"]}, "the arrays of no model"),
        ("policy.json", lambda spec: {**spec, "rule": [0, 2.0, 5, 5]}, "at least one asset"),
        ("policy.json", lambda spec: {**spec, "rule": [1, 2.0, 9, 5]}, "tranches do not fit"),
        ("policy.json", lambda spec: {**spec, "model": "../x"}, "its models are not the bundle's"),
    ],
)
def test_forged_forecaster_is_refused_by_name(
    forecast: tuple[Path, Path], tmp_path: Path, name: str, change: Any, words: str
) -> None:
    path = tmp_path / "forged"
    shutil.copytree(forecast[1], path)
    if name.endswith(".json"):
        tree = json.loads((path / name).read_text(encoding="utf-8"))
        (path / name).write_text(json.dumps(change(tree)), encoding="utf-8")
    else:
        save_file(change(load_file(path / name)), path / name)
    reseal(path)
    with pytest.raises(DamagedError, match=f"{re.escape(name)}.*{words}"):
        load_bundle(path)


def test_run_that_cannot_support_a_forecaster_says_so(tmp_path: Path, bars_file: Path) -> None:
    run = prepared_run(tmp_path / "run", bars_file, "assets=[AAPL]")
    with pytest.raises(UsageError, match=r"--baseline forecast: .*of a single asset"):
        export_bundle(run, tmp_path / "out", ExportRequest(baseline="forecast"))


def test_run_evaluated_with_draws_is_exported_without_them(
    place: Path, bars_file: Path, shell: Any, tmp_path: Path
) -> None:
    run = trained_run(place / "drawn", bars_file, "A2C", "eval.deterministic=false")
    out = tmp_path / "drawn"
    printed, err = shell.works("export", str(run), "--output-dir", str(out))
    assert "eval.deterministic is off; the bundle decides without draws" in printed + err
    assert "A2C, seed 1" in printed
    assert load_bundle(out).config.eval.deterministic
    code, _, err = shell("export", str(run), "--output-dir", str(out))
    assert code == 2
    assert "--overwrite" in err
    shell.works("export", str(run), "--output-dir", str(out), "--overwrite", "--baseline", "cash")
    assert load_bundle(out).spec == {"kind": "rule", "name": "cash"}


def test_commands_show_and_verify_a_bundle(copy: Path, shell: Any) -> None:
    shown, _ = shell.works("bundle", "show", str(copy))
    for text in ("A2C, seed 1", "AAPL", "graphs against torch", "preset paper", "next bar's open"):
        assert text in shown
    out, _ = shell.works("bundle", "verify", str(copy))
    assert "whole, 11 files; the reference decisions are off by 0 at most, by onnxruntime" in out
    (copy / "actor-0.onnx").write_bytes(b"")
    code, _, err = shell("bundle", "verify", str(copy))
    assert code == 5
    assert "actor-0.onnx" in err
    code, _, err = shell("bundle", "show", str(copy.parent))
    assert code == 5
    assert "not a bundle" in err


def test_looking_at_a_bundle_loads_no_torch(flat: Path) -> None:
    code = (
        "import sys; from echelon.cli import main\n"
        f"sys.argv = ['echelon', 'bundle', 'verify', {str(flat)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bundle_type_is_what_loading_gives(flat: Path) -> None:
    assert isinstance(load_bundle(flat), Bundle)
