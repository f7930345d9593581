"""Code that a run directory names: a stranger's does not run, one's own goes on being usable."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import yaml
from markets import CONFIGS, SPLITS
from shells import TINY, Shell, tiny
from test_execution_training import SHORT, flags
from typer.testing import CliRunner

from echelon.cli.app import app, main
from echelon.config import (
    Config,
    fingerprint,
    load_config,
    load_run_config,
    override_config,
    to_yaml,
    user_code,
)
from echelon.errors import StoreError, UsageError
from echelon.evaluation.ablation import Ablation, Variant, VariantSetting
from echelon.evaluation.comparison import Comparison
from echelon.evaluation.walkforward import WalkForward, plan_walk
from echelon.features.registry import select
from echelon.training.run import training_hash

FACTOR = """
from pathlib import Path
from echelon.features import factor

Path({marker!r}).touch()

@factor(lookback=1)
def mine(bars):
    return bars.close
"""
HASHES = ["f447320a7578f10d", "c538d4757b7a65f3"]
"""Of training with the defaults and with qtmrl.yaml: runs that exist are known by them."""
EXTENSION = """
from pathlib import Path
from echelon.execution import execution_feature

Path({marker!r}).touch()

@execution_feature("mine")
def mine(past):
    return 0.0
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strangers")


@pytest.fixture(scope="module")
def options(root: Path, bars_file: Path) -> list[str]:
    return tiny(bars_file, f"data.store={root}/store", f"data.cache.dir={root}/cache")


@pytest.fixture(scope="module")
def trained(root: Path, options: list[str]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        words = ["echelon", "train", *options, "--output-dir", str(root / "trained")]
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as leave:
            main()
        assert not leave.value.code
    return root / "trained"


@pytest.fixture(scope="module")
def executed(root: Path) -> Path:
    words = ["execution", "train", *flags(root / "store", *SHORT), "--workers", "1"]
    done = CliRunner().invoke(app, [*words, "--output-dir", str(root / "executed")])
    assert done.exit_code == 0, done.output
    return root / "executed"


class Stranger:
    """A run of somebody else's, whose configuration names code that leaves a marker if it runs."""

    def __init__(self, directory: Path, text: str, key: str) -> None:
        self.directory = directory
        self.marker = directory.parent / "marker"
        self.code = directory / "evil.py"
        self.code.write_text(text.format(marker=str(self.marker)), encoding="utf-8")
        self.section, self.key = key.split(".")

    def name_code(self, file: str = "config.yaml", code: str | None = None) -> None:
        path = self.directory / file
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        tree[self.section][self.key] = [code or str(self.code)]
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")


@pytest.fixture
def stranger(trained: Path, tmp_path: Path) -> Stranger:
    shutil.copytree(trained, tmp_path / "run")
    stranger = Stranger(tmp_path / "run", FACTOR, "features.modules")
    stranger.name_code()
    return stranger


def _refused(stranger: Stranger, code: int, err: str) -> None:
    assert code in (1, 2), err
    assert "runs only if you name the file too" in err
    assert f"--trust-code {stranger.code}" in err
    assert hashlib.sha256(stranger.code.read_bytes()).hexdigest() in err
    assert not stranger.marker.exists()


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_resume_does_not_run_a_strangers_factors(
    command: str, shell: Shell, stranger: Stranger
) -> None:
    shutil.rmtree(stranger.directory / "prepared")
    code, _, err = shell(command, "--resume", str(stranger.directory))
    _refused(stranger, code, err)


def test_set_made_with_other_code_is_no_reason_to_run_it(shell: Shell, stranger: Stranger) -> None:
    code, _, err = shell("train", "--resume", str(stranger.directory))
    assert code == 2, err
    assert "is not the file that" in err
    assert f"--trust-code {stranger.code}" in err
    assert not stranger.marker.exists()


def test_code_runs_where_the_user_names_the_file(shell: Shell, stranger: Stranger) -> None:
    # That the agents were trained on another set is another matter, and comes after it.
    words = ("prepare", "--resume", str(stranger.directory))
    _, _, err = shell(*words, "--trust-code", str(stranger.code))
    assert "its agents were trained on" in err
    assert stranger.marker.exists()
    stranger.marker.unlink()
    shell(*words, "-o", f"features.modules=[{stranger.code}]")
    assert stranger.marker.exists()


def test_naming_another_file_of_the_same_name_is_not_enough(
    shell: Shell, stranger: Stranger, tmp_path: Path
) -> None:
    shutil.rmtree(stranger.directory / "prepared")
    (tmp_path / "evil.py").write_text("")
    words = ("prepare", "--resume", str(stranger.directory), "--trust-code")
    code, _, err = shell(*words, str(tmp_path / "evil.py"))
    _refused(stranger, code, err)
    code, _, err = shell(*words, str(tmp_path / "nothing.py"))
    assert code == 2
    assert "--trust-code" in err
    assert "no such file" in err


def test_relative_path_is_told_as_the_file_it_leads_to(
    shell: Shell, stranger: Stranger, tmp_path: Path
) -> None:
    stranger.name_code(code="evil.py")
    shutil.rmtree(stranger.directory / "prepared")
    shutil.copy(stranger.code, tmp_path / "evil.py")  # the working directory's
    code, _, err = shell("train", "--resume", str(stranger.directory))
    assert code == 2
    assert f"evil.py ({tmp_path / 'evil.py'}, sha256 " in err
    assert not stranger.marker.exists()


def test_evaluating_reporting_listing_and_comparing_run_no_code(
    shell: Shell, stranger: Stranger, trained: Path
) -> None:
    run = str(stranger.directory)
    # The configuration is another than the one of the training, which is refused in its own words.
    for words in (("evaluate", run), ("compare", run, str(trained)), ("report", run)):
        code, _, err = shell(*words)
        assert code in (0, 2, 5), err
    shell.works("runs", "list", run)
    assert not stranger.marker.exists()


def _ablation(directory: Path, options: list[str], code: Path) -> str:
    change = (f"features.modules=[{code}]",)
    variants = [
        Variant("base", (), ()),
        Variant("more", (VariantSetting("features", "more"),), change),
    ]
    Ablation(directory, _base(options), tuple(variants)).save()
    return "ablate"


def _walk(directory: Path, options: list[str], code: Path) -> str:
    base = override_config(_base(options), [*_FOLDS, f"features.modules=[{code}]"])
    WalkForward(directory, base, plan_walk(base)).save()
    return "walk-forward"


def _comparison(directory: Path, options: list[str], code: Path) -> str:
    base = override_config(_base(options), ["train.algo=SAC", f"features.modules=[{code}]"])
    Comparison(directory, base, ("sac",)).save()
    return "compare"


_FOLDS = ["walk_forward={unit: month, train: 6, valid: 2, test: 2, first_test: null}"]


def _base(options: list[str]):  # noqa: ANN202 (a Config)
    return load_config(Path(options[1]), [word for word in options[2:] if word != "-o"])


@pytest.mark.parametrize("make", [_ablation, _walk, _comparison])
def test_going_on_with_a_strangers_batch_runs_no_code(
    make: Callable[[Path, list[str], Path], str],
    shell: Shell,
    options: list[str],
    tmp_path: Path,
) -> None:
    directory = tmp_path / "batch"
    directory.mkdir()
    stranger = Stranger(directory, FACTOR, "features.modules")
    command = make(directory, options, stranger.code)
    code, _, err = shell(command, "--resume", str(directory), "--workers", "1")
    _refused(stranger, code, err)
    if command == "walk-forward":
        shell("report", str(directory))
        assert not stranger.marker.exists()


def test_name_of_a_strangers_variant_does_not_lead_out(
    shell: Shell, options: list[str], tmp_path: Path
) -> None:
    Ablation(tmp_path / "batch", _base(options), (Variant("base", (), ()),)).save()
    path = tmp_path / "batch" / "ablation.json"
    tree = json.loads(path.read_text())
    tree["variants"].append({"name": "../../out", "settings": [], "overrides": ["seed=1"]})
    path.write_text(json.dumps(tree))
    code, _, err = shell("ablate", "--resume", str(tmp_path / "batch"))
    assert code in (3, StoreError.exit_code), err
    assert not (tmp_path / "out").exists()
    with pytest.raises(StoreError, match=r"'\.\./\.\./out' cannot name a variant"):
        Ablation(tmp_path / "batch", _base(options), (Variant("../../out", (), ()),))


@pytest.mark.parametrize(
    "words",
    [
        ("execution", "train", "--workers", "1", "--resume"),
        ("execution", "evaluate"),
        ("execution", "compare", "OTHER"),
    ],
    ids=lambda words: words[1],
)
def test_execution_commands_do_not_run_a_strangers_extensions(
    words: tuple[str, ...], shell: Shell, executed: Path, tmp_path: Path
) -> None:
    shutil.copytree(executed, tmp_path / "run")
    for note in (tmp_path / "run").glob("seeds/*/result.json"):
        note.unlink()  # so that there is something to go on with
    stranger = Stranger(tmp_path / "run", EXTENSION, "execution.extensions")
    stranger.name_code()
    named = [str(executed) if word == "OTHER" else word for word in words]
    code, _, err = shell(*named, str(stranger.directory))
    _refused(stranger, code, err)


def test_own_run_with_factors_is_evaluated_reported_and_gone_on_with(
    shell: Shell, options: list[str], tmp_path: Path
) -> None:
    mine, marker = tmp_path / "mine.py", tmp_path / "marker"
    mine.write_text(FACTOR.format(marker=str(marker)))
    shell.works(*("train", *options, "-o", "features.modules=[mine.py]", "--output-dir", "run"))
    assert marker.exists()
    marker.unlink()
    shell.works("evaluate", "run", "--split", "test")
    shell.works("report", "run")
    shell.works("train", "--resume", "run", "-o", "train.total_env_steps=1200")
    assert not marker.exists()  # none of it needs the code
    shell.works("prepare", "--resume", "run", "--trust-code", "mine.py")
    assert marker.exists()
    marker.unlink()
    mine.write_text(mine.read_text() + "\n# changed\n")
    code, _, err = shell("train", "--resume", "run")
    assert code == 2
    assert "mine.py (sha256" in err
    assert "is not the file that" in err
    assert not marker.exists()


def test_trust_is_refused_where_nothing_is_opened(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    code, _, err = shell("train", "--trust-code", "mine.py")
    assert code == 2
    assert "--trust-code is for the code that the run of --resume names" in err


def test_whose_code_it_is_survives_copies_overrides_and_processes(
    stranger: Stranger, tmp_path: Path
) -> None:
    config = load_run_config(stranger.directory / "config.yaml")
    plain = load_config(stranger.directory / "config.yaml")
    copies = (
        config.model_copy(update={"seed": 7}),
        override_config(config, ["seed=7", "features.calendar=true"]),
        pickle.loads(pickle.dumps(config)),
    )
    for copy in copies:
        with pytest.raises(UsageError, match="runs only if you name"):
            select(copy.features, frozenset({"close"}))
    assert not stranger.marker.exists()
    assert user_code(config) == ()
    assert user_code(plain) == (stranger.code,)
    assert config.model_dump() == plain.model_dump()


@pytest.mark.parametrize("name", [None, *sorted(path.name for path in CONFIGS.glob("*.yaml"))])
def test_configuration_read_from_a_run_equals_the_user_s_own(
    name: str | None, tmp_path: Path
) -> None:
    own = load_config(None if name is None else CONFIGS / name)
    (tmp_path / "config.yaml").write_text(to_yaml(own), encoding="utf-8")
    read = load_run_config(tmp_path / "config.yaml")
    assert read.features.run_code is not None
    assert read.execution.run_code is not None
    assert training_hash(read) == training_hash(own)
    assert fingerprint(read) == fingerprint(own)
    assert read == own
    assert hash(read.features) == hash(own.features)
    # What identifies an execution run (see `ExecutionTraining`).
    for section in ("execution", "split"):
        assert getattr(read, section).model_dump() == getattr(own, section).model_dump()
    assert override_config(read, ["features.calendar=true"]) != own
    assert read.features != read.execution


def test_training_hash_of_the_defaults_is_what_it_was() -> None:
    hashes = [training_hash(config) for config in (Config(), load_config(CONFIGS / "qtmrl.yaml"))]
    assert [value[:16] for value in hashes] == HASHES


def test_run_of_default_features_is_evaluated_and_resumed(shell: Shell, bars_file: Path) -> None:
    settings = [item for item in TINY if not item.startswith("features.")]
    data = ("data.source=parquet", f"data.path={bars_file}", SPLITS)
    words = [word for item in (*data, *settings) for word in ("-o", item)]
    shell.works("train", *words, "--output-dir", "run", "--seeds", "1")
    shell.works("evaluate", "run", "--split", "valid")
    shell.works("train", "--resume", "run", "-o", "train.total_env_steps=1200")
    result = json.loads((Path("run") / "seeds" / "42" / "result.json").read_text("utf-8"))
    assert result["step"] >= 1200


def _move(run: Path, **places: Path) -> None:
    """Have a run's configuration name other directories: data.store as `store`, and so on."""
    path = run / "config.yaml"
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, place in places.items():
        if name == "cache":
            tree["data"]["cache"]["dir"] = str(place)
        else:
            tree["logging" if name == "registry" else "data"][name] = str(place)
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")


@pytest.fixture
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the user's own, elsewhere, with a file in it."""
    place = tmp_path_factory.mktemp("mine")
    (place / "letter.txt").write_text("dear")
    return place


@pytest.mark.parametrize("name", ["store", "cache", "registry"])
@pytest.mark.parametrize("command", ["train", "prepare"])
def test_resumed_run_writes_nothing_into_a_directory_of_the_users_own(
    command: str, name: str, shell: Shell, trained: Path, tmp_path: Path, mine: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    _move(tmp_path / "run", **{name: mine})
    code, _, err = shell(command, "--resume", str(tmp_path / "run"))
    assert code == 2, err
    assert f"is {mine}" in err
    assert "-o " in err
    assert [path.name for path in mine.iterdir()] == ["letter.txt"]


def test_evaluation_counts_its_look_in_no_directory_of_the_users_own(
    shell: Shell, trained: Path, tmp_path: Path, mine: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    _move(tmp_path / "run", registry=mine)
    code, _, err = shell("evaluate", str(tmp_path / "run"), "--split", "test")
    assert code == 2, err
    assert "logging.registry" in err
    assert [path.name for path in mine.iterdir()] == ["letter.txt"]


def test_resumed_run_makes_no_new_directory_far_away(
    shell: Shell, trained: Path, tmp_path: Path, mine: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    _move(tmp_path / "run", store=mine / "deep" / "store")
    code, _, err = shell("prepare", "--resume", str(tmp_path / "run"))
    assert code == 2, err
    assert [path.name for path in mine.iterdir()] == ["letter.txt"]


def test_users_own_registry_elsewhere_is_made_and_used_again(
    shell: Shell, options: list[str], tmp_path: Path, mine: Path
) -> None:
    run = str(tmp_path / "run")
    registry = mine / "registry"
    words = ("-o", f"logging.registry={registry}", "--output-dir", run)
    shell.works("train", *options, *words)
    shell.works("evaluate", run, "--split", "test")
    assert (registry / "reads.json").is_file()


def test_strangers_run_does_not_replace_a_dataset_of_the_same_name(
    shell: Shell, trained: Path, tmp_path: Path, bars_file: Path
) -> None:
    store = tmp_path / "store"
    shell.works(
        *("data", "import", "parquet", str(bars_file), "--dataset", "mine"),
        *("-o", f"data.store={store}"),
    )
    before = (store / "mine" / "CURRENT.json").read_bytes()
    other = pl.read_parquet(bars_file).with_columns(pl.col("volume") + 1.0)
    other.write_parquet(tmp_path / "other.parquet")
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "prepared")
    _move(tmp_path / "run", store=store, dataset=Path("mine"), path=tmp_path / "other.parquet")
    code, _, err = shell("train", "--resume", str(tmp_path / "run"))
    assert code == 2, err
    assert "stays as it is" in err
    assert (store / "mine" / "CURRENT.json").read_bytes() == before
