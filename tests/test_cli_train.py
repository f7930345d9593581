"""train, evaluate, report, runs and demo as a user meets them: results, faults and going on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from shells import Shell, tiny
from worlds import reseal

from echelon.cli.app import main
from echelon.files import exclusive_lock
from echelon.runs import checkpoint as checkpoints
from echelon.runs import tensor_files
from echelon.training.run import seed_directory

LONGER = ("train.total_env_steps=1600",)
BEST = "checkpoints/best/tensors.safetensors"


class Trained:
    """A run of two seeds, trained once for the whole file and copied by those who change it."""

    def __init__(self, run: Path, words: list[str], out: str) -> None:
        self.run = run
        self.words = words
        self.out = out

    def copy(self, target: str | Path) -> Path:
        return Path(shutil.copytree(self.run, target))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    words = tiny(bars_file, *LONGER, f"data.store={root}/store", f"data.cache.dir={root}/cache")
    with pytest.MonkeyPatch.context() as patch:
        out = (root / "out.txt").open("w+", encoding="utf-8")
        patch.setattr(sys, "stdout", out)
        patch.setenv("COLUMNS", "80")
        options = ("--seeds", "2", "--workers", "1", "--output-dir", str(root / "run"))
        patch.setattr(sys, "argv", ["echelon", "train", *words, *options])
        with pytest.raises(SystemExit) as leave:
            main()
        assert not leave.value.code
        out.seek(0)
        text = out.read()
        out.close()
    return Trained(root / "run", words, text)


def _weights(run: Path, seed: int = 42) -> dict[str, bytes]:
    """Names and contents of the last checkpoint's and the best one's tensors."""
    directory = seed_directory(run, seed)
    last = checkpoints.latest_checkpoint(directory / "checkpoints")
    assert last is not None
    files = (last / "tensors.safetensors", directory / BEST)
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def _unfinish(run: Path, seed: int = 42) -> list[Path]:
    """Make a training look as if it was killed before its end; its checkpoints, earliest first."""
    directory = seed_directory(run, seed)
    (directory / "result.json").unlink()
    return checkpoints.list_checkpoints(directory / "checkpoints")


def test_train_leaves_a_run_and_prints_mean_and_std(trained: Trained) -> None:
    run, out = trained.run, trained.out
    facts = json.loads((run / "run.json").read_text())
    assert [o["seed"] for o in facts["outcomes"]] == [42, 43]
    assert facts["command"] == "train"
    for seed in (42, 43):
        assert load_file(seed_directory(run, seed) / BEST)
        assert (seed_directory(run, seed) / "metrics.parquet").is_file()
    assert [p.name for p in (run / "evaluations").iterdir()] == ["valid"]
    assert "agent, mean" in out
    assert "± std of 2" in out
    assert "equal_weight" in out
    assert max(len(line) for line in out.splitlines() if "│" in line) <= 80
    assert f"echelon evaluate {run} --split test" in out


def test_second_training_is_refused_unless_told_to_overwrite(
    shell: Shell, trained: Trained
) -> None:
    trained.copy("run")
    before = _weights(Path("run"))
    code, _, err = shell("train", *trained.words, "--output-dir", "run")
    assert code == 2
    assert "--resume run" in err
    assert "--overwrite" in err
    assert _weights(Path("run")) == before
    shell.works("train", *trained.words, "--output-dir", "run", "--overwrite", "-o", "seed=43")
    assert not seed_directory(Path("run"), 42).exists()
    again = _weights(Path("run"), 43)
    assert again == _weights(trained.run, 43)


def test_overwrite_leaves_alone_what_another_process_is_training(
    shell: Shell, trained: Trained
) -> None:
    trained.copy("run")
    before = _weights(Path("run"))
    with exclusive_lock(seed_directory(Path("run"), 42) / ".train.lock", "it"):
        code, _, err = shell("train", *trained.words, "--output-dir", "run", "--overwrite")
    assert code != 0
    assert "another process" in err
    assert _weights(Path("run")) == before


def test_processes_side_by_side_end_with_the_same_weights(shell: Shell, trained: Trained) -> None:
    options = ("--output-dir", "run", "--seeds", "2", "--workers", "2")
    shell.works("train", *trained.words, *options)
    for seed in (42, 43):
        assert _weights(Path("run"), seed) == _weights(trained.run, seed)
    assert _weights(Path("run"), 42) != _weights(Path("run"), 43)


def test_resuming_what_is_done_changes_nothing(shell: Shell, trained: Trained) -> None:
    run = trained.copy("run")
    before = {seed: _weights(run, seed) for seed in (42, 43)}
    log = (seed_directory(run, 42) / "metrics.jsonl").read_bytes()
    out, _ = shell.works("train", "--resume", "run", "--workers", "1")
    assert "all steps done" in out
    assert {seed: _weights(run, seed) for seed in (42, 43)} == before
    assert (seed_directory(run, 42) / "metrics.jsonl").read_bytes() == log


def test_resuming_in_another_way_is_refused_and_the_run_stays_as_it_was(
    shell: Shell, trained: Trained
) -> None:
    run = trained.copy("run")
    before = (run / "config.yaml").read_bytes()
    code, _, err = shell("train", "--resume", "run", "-o", "train.gamma=0.5")
    assert code == 2
    assert "start a new run" in err
    assert (run / "config.yaml").read_bytes() == before
    shell.works("evaluate", "run")


def _stop_in_the_middle(words: list[str], cwd: Path, number: int) -> subprocess.Popen[str]:
    """Start a training and send it a signal, as a terminal would to the whole group."""
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon", "train", *words],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    begun = "seeds/*/checkpoints/step-000000[2-9]*"
    while not list((cwd / "run").glob(begun)) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.01)
    os.killpg(process.pid, number)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_writes_checkpoints_and_resume_ends_with_the_same_weights(
    shell: Shell, trained: Trained, tmp_path: Path, number: int, code: int
) -> None:
    options = ["--output-dir", "run", "--seeds", "2", "--workers", "2"]
    process = _stop_in_the_middle([*trained.words, *options], tmp_path, number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "stopped: seed 42 at step" in err
    assert "Go on with: echelon train --resume run" in err
    assert "Traceback" not in err
    result = json.loads((seed_directory(Path("run"), 42) / "result.json").read_text())
    assert result["ending"] == "stopped"
    assert result["step"] < 1600
    last = checkpoints.latest_checkpoint(seed_directory(Path("run"), 42) / "checkpoints")
    assert last is not None
    assert last.name == f"step-{result['step']:09d}"
    shell.works("train", "--resume", "run", "--workers", "1")
    for seed in (42, 43):
        assert _weights(Path("run"), seed) == _weights(trained.run, seed)


def test_killed_training_resumes_to_the_same_weights(
    shell: Shell, trained: Trained, tmp_path: Path
) -> None:
    options = ["--output-dir", "run", "--seeds", "1"]
    process = _stop_in_the_middle([*trained.words, *options], tmp_path, signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert not (seed_directory(Path("run"), 42) / "result.json").exists()
    shell.works("train", "--resume", "run", "--workers", "1")
    assert _weights(Path("run")) == _weights(trained.run)


def test_any_checkpoint_can_be_resumed_from(shell: Shell, trained: Trained) -> None:
    run = trained.copy("run")
    earlier = _unfinish(run)[0]
    shell.works("train", "--resume", str(earlier))
    assert _weights(run) == _weights(trained.run)
    facts = json.loads((run / "run.json").read_text())
    assert [o["seed"] for o in facts["outcomes"]] == [42, 43]
    code, _, err = shell("train", "--resume", str(seed_directory(run, 42) / "checkpoints/best"))
    assert code == 2
    assert "the weights only" in err


def test_damaged_checkpoint_is_named_with_the_one_to_go_on_from(
    shell: Shell, trained: Trained
) -> None:
    run = trained.copy("run")
    *_, earlier, last = _unfinish(run)
    damaged = last / "tensors.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    code, _, err = shell("train", "--resume", "run", "--workers", "1")
    assert code == 5
    assert str(damaged) in err
    assert f"--resume {earlier}" in err
    shell.works("train", "--resume", str(earlier))
    assert _weights(run) == _weights(trained.run)


def test_damaged_best_checkpoint_is_named_by_evaluate(shell: Shell, trained: Trained) -> None:
    run = trained.copy("run")
    damaged = seed_directory(run, 43) / BEST
    damaged.write_bytes(damaged.read_bytes()[:100])
    code, _, err = shell("evaluate", "run")
    assert code == 5
    assert str(damaged) in err


def _rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_run_directory_of_another_version_is_refused_in_plain_words(
    shell: Shell, trained: Trained
) -> None:
    run = trained.copy("run")
    summary = run / "evaluations/valid/summary.json"
    _rewrite(summary, format=99)
    code, _, err = shell("report", "run")
    assert (code, "another version" in err) == (5, True)
    _rewrite(seed_directory(run, 42) / "checkpoints/best/state.json", format=99)
    code, _, err = shell("evaluate", "run")
    assert (code, "state.json" in err, "Traceback" in err) == (5, True, False)
    config = run / "config.yaml"
    config.write_text(config.read_text() + "key_of_another_version: 1\n")
    code, _, err = shell("evaluate", "run")
    assert (code, "key_of_another_version" in err) == (3, True)
    shutil.copy(trained.run / "config.yaml", config)
    _rewrite(run / "prepared/manifest.json", format=99)
    code, _, err = shell("evaluate", "run")
    assert (code, "written by another version of Echelon" in err) == (5, True)


def test_full_disk_is_said_and_earlier_checkpoints_stay(
    shell: Shell, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained.copy("run")
    expected = _unfinish(run)[:1]
    shutil.rmtree(_unfinished(run)[-1])

    def full(_path: Path, _data: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(_path))

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "write_atomic", full)
        code, _, err = shell("train", "--resume", "run", "--workers", "1")
    assert code == 5
    assert "No space left on device" in err
    assert "seed 42" in err
    assert "Traceback" not in err
    assert set(expected) <= set(_unfinished(run))
    shell.works("train", "--resume", "run", "--workers", "1")
    assert _weights(run) == _weights(trained.run)


def _unfinished(run: Path) -> list[Path]:
    return checkpoints.list_checkpoints(seed_directory(run, 42) / "checkpoints")


def test_real_full_disk_is_no_traceback(shell: Shell, trained: Trained, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root can mount a small file system to fill")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        big = ("-o", "model.d_model=64", "-o", "model.hidden=128")
        code, _, err = shell("train", *trained.words, *big, "--output-dir", str(disk / "run"))
    finally:
        # Lazily: features are mapped until the last array of them is gone.
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert code in (1, 5)
    assert "No space left on device" in err
    assert "Traceback" not in err


def test_diverging_loss_stops_with_a_reason_and_keeps_the_last_good_checkpoint(
    shell: Shell, trained: Trained
) -> None:
    wild = ("-o", "train.lr_actor=1.0e+30", "--output-dir", "run", "--seeds", "2")
    code, _, err = shell("train", *trained.words, *wild, "--workers", "1")
    assert code == 8
    assert "seed 42: training diverged at step" in err
    assert "Lower train.lr_actor" in err
    last = checkpoints.latest_checkpoint(seed_directory(Path("run"), 42) / "checkpoints")
    assert last is not None
    for tensor in checkpoints.load_checkpoint(last).tensors.values():
        assert bool(tensor.isfinite().all())


@pytest.mark.parametrize(
    ("change", "code", "expected"),
    [
        ("window=2000", 4, "fewer than window=2000"),
        ("window=3", 3, "window = 3 is too short"),
        (
            "split={train: [2015-01-02, 2016-01-29], valid: [2016-02-01, 2016-02-01], "
            "test: [2016-07-01, 2016-12-30]}",
            4,
            "split.valid has 1 bars",
        ),
        (
            "split={train: [2001-01-02, 2001-12-31], valid: [2016-02-01, 2016-02-01], "
            "test: [2016-07-01, 2016-12-30]}",
            4,
            "split.train 2001-01-02..2001-12-31 is empty",
        ),
        ("train.offset_groups=3", 3, "train.offset_groups (3) does not divide"),
    ],
)
def test_configuration_that_does_not_fit_the_data_is_refused(
    shell: Shell, trained: Trained, change: str, code: int, expected: str
) -> None:
    found, _, err = shell("train", *trained.words, "-o", change, "--output-dir", "run")
    assert found == code, err
    assert expected in err
    assert "Traceback" not in err


def test_number_missing_in_a_feature_names_it(shell: Shell, trained: Trained) -> None:
    run = trained.copy("run")
    x = np.load(run / "prepared/X.npy")
    x[100, 1, 2] = np.nan
    np.save(run / "prepared/X.npy", x)
    reseal(run)
    code, _, err = shell("train", "--resume", "run", "--workers", "1", "--seeds", "3")
    assert code == 4
    name = json.loads((run / "prepared/manifest.json").read_text())["features"][2]
    assert f"feature '{name}' of MSFT is not a number" in err


def test_order_of_commands_is_explained(shell: Shell, trained: Trained) -> None:
    code, _, err = shell("evaluate", "nowhere")
    assert (code, "not a run directory" in err) == (5, True)
    shell.works("prepare", *trained.words, "--output-dir", "run")
    code, _, err = shell("evaluate", "run")
    assert (code, "Run `echelon train`" in err) == (5, True)
    code, _, err = shell("report", "run")
    assert (code, "echelon train" in err or "echelon evaluate" in err) == (5, True)
    code, _, err = shell("runs", "compare", "run")
    assert (code, "echelon evaluate run --split valid" in err) == (5, True)
    trained.copy("two")
    shutil.rmtree("two/evaluations")
    code, _, err = shell("report", "two")
    assert (code, "echelon evaluate two" in err) == (5, True)
    code, _, err = shell("train", "--resume", "two", "--config", "x.yaml")
    assert (code, "leave --config" in err) == (2, True)
    code, _, err = shell("train", "--resume", "nowhere")
    assert (code, "neither a run directory" in err) == (2, True)


def test_two_trainings_in_one_directory_do_not_meet(shell: Shell, trained: Trained) -> None:
    run = trained.copy("run")
    _unfinish(run)
    with exclusive_lock(seed_directory(run, 42) / ".train.lock", "this test's own training"):
        code, _, err = shell("train", "--resume", "run", "--workers", "1")
    assert code == 5
    assert "being written by another process" in err


def test_every_reading_of_the_test_window_is_counted_and_the_report_follows(
    shell: Shell, trained: Trained
) -> None:
    run = trained.copy("run")
    out, _ = shell.works("evaluate", "run", "--split", "test", columns=80)
    assert "test window has been read 1 time, by 1 run\n" in out
    out, _ = shell.works("evaluate", "run", "--split", "test")
    assert "test window has been read 2 times, by 1 run\n" in out
    assert "next: echelon report run" in out
    out, _ = shell.works("report", "run")
    page = Path(out.strip().removeprefix("report: "))
    assert page == run / "report/report.html"
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    english = page.read_text(encoding="utf-8")
    out, _ = shell.works("report", "run", "--lang", "zh", "--split", "valid")
    chinese = Path(out.strip().removeprefix("report: "))
    assert chinese == run / "report/report.zh.html"
    assert 'lang="zh' in chinese.read_text(encoding="utf-8")[:500]
    assert page.read_text(encoding="utf-8") == english


def test_runs_are_listed_and_compared(shell: Shell, trained: Trained) -> None:
    trained.copy("runs/one")
    other = trained.copy("runs/group/two")
    broken = Path("runs/broken")
    broken.mkdir()
    (broken / "run.json").write_text("{")
    out, err = shell.works("runs", "list", columns=80)
    assert "one" in out
    assert "group/two" in out
    assert "2 seeds" in out
    assert "runs/broken/run.json: missing or damaged" in err
    assert max(map(len, out.splitlines())) <= 80
    for scores, shown in (([-0.001, -0.002], "0.00 ± 0.00"), ([-0.5, -0.5], "-0.50 ± 0.00")):
        outcomes = [{"seed": k, "best_score": score} for k, score in enumerate(scores)]
        _rewrite(other / "run.json", outcomes=outcomes)
        out, _ = shell.works("runs", "list", "runs/group")
        assert f" {shown}" in out
        assert "-0.00" not in out
    out, err = shell.works("runs", "compare", "runs/one", "runs/group/two")
    rows = [line for line in out.splitlines() if "Sharpe (annual)" in line]
    assert len(rows) == 1
    _, _, first, second, _ = (cell.strip() for cell in rows[0].split("│"))
    assert first == second
    assert "±" in first
    assert "warning" not in err
    _rewrite(other / "evaluations/valid/summary.json", first="2016-03-01")
    _, err = shell.works("runs", "compare", "runs/one", "runs/group/two")
    assert "do not compare" in err
    out, _ = shell.works("runs", "list", "runs/one/seeds")
    assert "no runs below" in out
    _rewrite(other / "evaluations/valid/summary.json", run={"data": {"content_hash": []}})
    code, _, err = shell("runs", "compare", "runs/one", "runs/group/two")
    assert (code, "run.data.name: Field required" in err) == (5, True)
    code, _, err = shell("runs", "list", "nowhere")
    assert (code, "no such directory" in err) == (2, True)


def test_demo_ends_with_a_report_and_can_be_run_again(shell: Shell, bars_file: Path) -> None:
    words = ("demo", *tiny(bars_file, "train.total_env_steps=200"), "--output-dir", "demo")
    for _ in range(2):
        out, _ = shell.works(*words)
        assert Path(out.strip().splitlines()[-1].removeprefix("report: ")).is_file()
        assert Path("demo/prepared.png").read_bytes().startswith(b"\x89PNG")
        assert "valid: 2016-02-01" in out
        assert "test: 2016-07-01" in out


EXPERT = (
    *(
        "train.algo=SAC",
        "lora.enabled=true",
        "lora.refresh_updates=1",
        "lora.rank=2",
        "model.n_layers=1",
        "expert.hidden=8",
    ),
    *("pretrain.epochs=1", "pretrain.horizons=[1]", "expert.batch_size=16"),
    *("expert.buffer_size=1000", "expert.learning_starts=40", "train.total_env_steps=200"),
    "train.normalize_advantages=false",
)


def test_experts_say_once_what_encoder_adapter_and_replay_are(
    shell: Shell, bars_file: Path
) -> None:
    words = tiny(bars_file, *EXPERT)
    _, err = shell.works(
        "train", *words, "--seeds", "2", "--workers", "1", "--output-dir", "run", columns=60
    )
    told = [line for line in err.splitlines() if line.startswith(("encoder", "adapter", "replay"))]
    assert [line.split(":")[0] for line in told] == ["encoder", "adapter", "replay"]
    assert "out of sample (second half of validation):" in told[0]
    assert "  return over 1 bar: R²" in err
    facts = json.loads((seed_directory(Path("run"), 42) / "learner.json").read_text())
    trained, whole = facts["adapter"]["trained"], facts["adapter"]["whole"]
    wanted = f"{trained:,} of {whole:,} encoder weights train ({100 * trained / whole:.1f} %)"
    assert told[1] == f"adapter: {wanted}"
    # 3 assets: row, weights, cash, mask, action, its density, reward, end, and what came after.
    size = 4 + 12 + 4 + 1 + 12 + 4 + 4 + 1 + 12 + 4 + 1
    assert told[2] == f"replay: {size} bytes a transition, {size} kB for 1,000"
    shell.works("report", "run", "--split", "valid")
    page = next(Path("run").glob("report/**/*.html")).read_text(encoding="utf-8")
    assert wanted.replace("weights train", "weights are trained") in page
    assert f"{size} bytes per transition" in page
    # What replaces the run replaces its encoder, which here is of another configuration.
    words = tiny(bars_file, *EXPERT, "lora.enabled=false", "pretrain.enabled=false")
    _, err = shell.works("train", *words, "--output-dir", "run", "--overwrite")
    assert "encoder: as drawn, not pre-trained" in err
    assert "adapter:" not in err
