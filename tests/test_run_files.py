"""Files of a run that others may have written: what is odd in them is one error that names them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from shells import Shell, tiny

from echelon.agents.pretraining import Origin, read_encoder, write_encoder
from echelon.backtest.files import read_tables
from echelon.errors import DamagedError, StoreError
from echelon.evaluation.evaluate import load_evaluation
from echelon.evaluation.trust import load_trust
from echelon.files import blaming, read_arrays, read_table
from echelon.population.record import PopulationHistory
from echelon.proving.certificate import Certificate
from echelon.runs import RunDirectory
from echelon.runs.checkpoint import load_checkpoint, save_checkpoint
from echelon.runs.metrics import read_metrics
from echelon.runs.registry import TrialRegistry, Window
from echelon.training.run import TrainedRun, finished_outcome, read_learner_facts, trained_seeds

ODD = (
    "",
    "{",
    "[]",
    "null",
    "7",
    '"text"',
    '{"format": 1}',
    "[" * 3000 + "]" * 3000,
    '{"format": "\\ud800"}',
    '{"format": 1' + "0" * 5000 + "}",
    '{"format": 1, "seeds": 3, "lines": [1], "experts": {}, "adapter": 1, "markets": [[]]}',
)
"""Contents that are no JSON, or not the JSON that any of our files has."""


def _registry(directory: Path) -> object:
    return TrialRegistry(directory).trials(Window("a", "b", "2020-01-01", "2020-02-01"))


READERS: dict[str, Callable[[Path], object]] = {
    "run.json": lambda d: RunDirectory(d).facts(),
    "trials.json": _registry,
    "metrics.jsonl": read_metrics,
    "population.json": PopulationHistory.read,
    "learner.json": read_learner_facts,
    "certificate.json": lambda d: Certificate.read(d / "certificate.json"),
    "evaluations/test/summary.json": lambda d: load_evaluation(d, "test"),
    "evaluations/test/trust.json": lambda d: load_trust(d, "test"),
    "encoder/encoder.json": lambda d: read_encoder(d, Origin("", 1, "", 0)),
    "state.json": load_checkpoint,
}

NOTHING_WRONG = {("run.json", ODD[6]), ("run.json", ODD[-1])}
"""A run.json may say more than anyone reads."""


@pytest.mark.parametrize("content", ODD)
@pytest.mark.parametrize("name", READERS)
def test_odd_content_is_a_damaged_file_with_its_name(
    name: str, content: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content + "\n")
    if (name, content) in NOTHING_WRONG:
        READERS[name](tmp_path)
        return
    with pytest.raises(StoreError) as caught:
        READERS[name](tmp_path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", READERS)
def test_a_directory_in_the_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(DamagedError, match=r"missing or damaged \(Is a directory"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("content", ODD)
def test_an_odd_note_of_the_end_is_no_note(content: str, tmp_path: Path) -> None:
    from worlds import make_config

    (tmp_path / "result.json").write_text(content)
    assert finished_outcome(make_config(), tmp_path) is None


def test_tables_are_read_whole_or_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    remedy = "Make it again."
    for data in (b"", b"PAR1", b"PAR1" + b"\0" * 40 + b"PAR1"):
        path.write_bytes(data)
        with pytest.raises(DamagedError, match=r"a\.parquet.*Make it again"):
            read_table(path, {}, remedy)
    pl.DataFrame({"time": ["x"], "value": [1.0]}).write_parquet(path)
    with pytest.raises(DamagedError, match=r"no column 'return'"):
        read_table(path, {"return": "number"}, remedy)
    with pytest.raises(DamagedError, match=r"column 'time' is String, expected a time"):
        read_table(path, {"time": "time"}, remedy)
    assert read_table(path, {"value": "number", "time": "text"}, remedy).shape == (1, 2)


def test_arrays_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    for data in (b"", b"PK\3\4" + b"\0" * 60, b"\x93NUMPY\1\0"):
        path.write_bytes(data)
        with pytest.raises(DamagedError, match=r"a\.npz"):
            read_arrays(path, ("valid",), "")


def test_errors_of_ours_pass_and_others_blame_the_file() -> None:
    with pytest.raises(StoreError, match="ours"), blaming(Path("a.json"), ""):
        raise StoreError("ours")
    message = r"a\.json.*KeyError: 'x'.*Do this"
    with pytest.raises(DamagedError, match=message), blaming(Path("a.json"), "Do this."):
        {}["x"]


def _rewrite(path: Path, **changes: Any) -> None:
    """Change a document and make its hash right again, as a stranger could."""
    tree = json.loads((path / "state.json").read_text()) | changes
    tree.pop("sha256")
    tree["sha256"] = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    (path / "state.json").write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "changes", [{"step": "7"}, {"config_hash": 3}, {"state": []}, {"tensors_sha256": None}]
)
def test_a_checkpoint_with_right_hashes_and_wrong_types_is_damaged(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path, 5, {"a": torch.zeros(2)}, {"x": 1}, config_hash="c", keep=1)
    _rewrite(path, **changes)
    with pytest.raises(DamagedError, match=rf"state\.json.*{next(iter(changes))}"):
        load_checkpoint(path)


def test_an_encoder_of_odd_origin_is_damaged(tmp_path: Path) -> None:
    origin = Origin("c", 3, "d", 1)
    write_encoder(tmp_path, origin, {"w": torch.zeros(2)}, {"enabled": False})
    assert read_encoder(tmp_path, origin) is not None
    path = tmp_path / "encoder" / "encoder.json"
    tree = json.loads(path.read_text()) | {"origin": ["c"]}
    tree.pop("sha256")
    tree["sha256"] = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(tree))
    with pytest.raises(DamagedError, match=r"encoder\.json.*origin.*pre-trained again"):
        read_encoder(tmp_path, origin)


def test_only_names_that_a_seed_has_are_seeds(tmp_path: Path) -> None:
    assert trained_seeds(tmp_path) == []
    for name in ("42", "7", "0", "42 copy", "abc", "-1", "007", "９", "1" * 30):
        (tmp_path / "seeds" / name).mkdir(parents=True)
    (tmp_path / "seeds" / "8").write_text("a file")
    (tmp_path / "seeds" / "9").symlink_to("9")
    assert trained_seeds(tmp_path) == [0, 7, 42]
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "seeds").write_text("a file")
    assert trained_seeds(tmp_path / "flat") == []


# --- a whole run, by the command line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Path:
    root = tmp_path_factory.mktemp("trained")
    options = tiny(bars_file, f"data.store={root}/store", f"data.cache.dir={root}/cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        from typer.testing import CliRunner

        from echelon.cli.app import app

        done = CliRunner().invoke(
            app, ["train", *options, "--workers", "1", "--output-dir", str(root / "run")]
        )
        assert done.exit_code == 0, done.output
    return root / "run"


def test_copies_and_strays_among_the_seeds_are_left_alone(shell: Shell, trained: Path) -> None:
    run = Path(shutil.copytree(trained, "run"))
    shutil.copytree(run / "seeds" / "42", run / "seeds" / "42 copy")
    (run / "seeds" / "abc").mkdir()
    (run / "seeds" / "-1").write_text("a file")
    shell.works("evaluate", "run", "--split", "valid")
    shell.works("report", "run")
    shell.works("train", "--resume", "run", "--workers", "1")
    assert TrainedRun.open(run).seeds == (42,)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("run.json", {"data": "text"}),
        ("run.json", {"outcomes": 3}),
        ("run.json", {"outcomes": [{"seed": 1}]}),
        ("evaluations/valid/summary.json", {"seeds": {"a": {}}}),
        ("evaluations/valid/summary.json", {"periods_per_year": "daily"}),
        ("evaluations/valid/summary.json", {"best_steps": [1]}),
        ("evaluations/valid/trust.json", {"costs": [{}]}),
        ("evaluations/valid/trust.json", {"verdict": {"key": "odd", "baseline": "cash"}}),
        ("evaluations/valid/trust.json", {"periods_per_year": -1.0}),
        ("comparison.json", {"kind": "runs", "split": "valid", "runs": 3}),
    ],
)
def test_a_report_of_odd_files_names_them(
    shell: Shell, trained: Path, file: str, changes: dict[str, Any]
) -> None:
    run = Path(shutil.copytree(trained, "run"))
    path = run / file
    tree = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(tree | changes))
    code, _, err = shell("report", "run", columns=2000)
    assert code == 5, err
    assert f"{file}: missing or damaged" in err


def test_runs_that_cannot_be_read_are_named_and_the_others_listed(
    shell: Shell, trained: Path
) -> None:
    shutil.copytree(trained, "runs/good")
    for name in ("text", "list"):
        shutil.copytree(trained, f"runs/{name}")
    Path("runs/text/run.json").write_text('{"data": "text", "outcomes": 7}')
    Path("runs/list/run.json").unlink()
    Path("runs/list/run.json").mkdir()
    out, err = shell.works("runs", "list", "runs", columns=400)
    assert "good" in out
    assert "runs/text/run.json: missing or damaged" in err
    assert "runs/list/run.json: missing or damaged" in err


def test_weights_that_do_not_fit_or_are_no_numbers_are_refused(shell: Shell, trained: Path) -> None:
    from safetensors.torch import load_file, save

    for change in ("shape", "nan", "missing"):
        run = Path(shutil.copytree(trained, change))
        best = run / "seeds" / "42" / "checkpoints" / "best"
        tensors = load_file(best / "tensors.safetensors")
        name = sorted(tensors)[0]
        if change == "shape":
            tensors[name] = torch.zeros(3, 7)
        elif change == "nan":
            tensors[name] = torch.full_like(tensors[name], float("nan"))
        else:
            del tensors[name]
        data = save(tensors)
        (best / "tensors.safetensors").write_bytes(data)
        _rewrite(best, tensors_sha256=hashlib.sha256(data).hexdigest())
        code, _, err = shell("evaluate", change, "--split", "valid", columns=2000)
        assert code == 5, err
        assert "tensors.safetensors: missing or damaged" in err


def test_a_table_of_a_backtest_with_other_columns_is_named(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    place = run / "evaluations" / "valid"
    path = place / "weights.parquet"
    frame = pl.read_parquet(path)
    frame.with_columns(pl.lit("x").alias(frame.columns[3])).write_parquet(path)
    with pytest.raises(DamagedError, match=r"weights\.parquet.*holds no numbers"):
        read_tables(place)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("actions", lambda frame: frame.drop(frame.columns[-1]), "assets are not those of weights"),
        ("actions", lambda frame: frame.head(3), "rows of a book, expected"),
        ("weights", lambda frame: frame.head(3), "rows of a book, expected"),
    ],
)
def test_tables_of_a_backtest_that_do_not_fit_one_another_are_named(
    trained: Path,
    tmp_path: Path,
    kind: str,
    change: Callable[[pl.DataFrame], pl.DataFrame],
    message: str,
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    path = run / "evaluations" / "valid" / f"{kind}.parquet"
    change(pl.read_parquet(path)).write_parquet(path)
    evaluation = load_evaluation(run, "valid")
    with pytest.raises(DamagedError, match=rf"{kind}\.parquet.*{message}"):
        evaluation.tables(next(iter(evaluation.seeds)))
