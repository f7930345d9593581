"""The command line: what a user sees, exit codes, and no traceback for a user's mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from markets import CONFIGS, SPLITS, make_bars
from shells import Shell
from typer.testing import CliRunner

from echelon import stopping
from echelon.cli import app
from echelon.cli.data import _export
from echelon.config import SyntheticConfig, fingerprint, load_config
from echelon.data.bars import RawFrame
from echelon.data.sources import synthetic
from echelon.data.sources.synthetic import SyntheticSource


def _qtmrl(file: Path) -> list[str]:
    return [
        *("--config", str(CONFIGS / "qtmrl.yaml"), "-o", "data.source=parquet"),
        *("-o", f"data.path={file}", "-o", SPLITS),
    ]


def test_every_command_has_help() -> None:
    runner = CliRunner()
    for words in (
        [],
        *(["data", c] for c in ("import", "synth", "check", "show", "universe")),
        *(["config", c] for c in ("show", "validate")),
        *(["runs", c] for c in ("list", "compare")),
        *([c] for c in ("prepare", "train", "evaluate", "ablate", "report", "demo")),
    ):
        done = runner.invoke(app, [*words, "--help"])
        assert done.exit_code == 0, words
        assert "Usage" in done.output


def test_prepare_writes_run_directory_with_config_and_hash(shell: Shell, bars_file: Path) -> None:
    code, out, err = shell("prepare", *_qtmrl(bars_file), "--output-dir", "out/one")
    assert code == 0, err
    assert "T=" in err
    assert "16 × 30" in out
    run = Path("out/one")
    facts = json.loads((run / "run.json").read_text())
    resolved = load_config(run / "config.yaml")
    assert facts["config_hash"] == fingerprint(resolved)
    assert facts["seed"] == 42
    assert facts["data"]["content_hash"]
    assert facts["libraries"]["numpy"]
    assert (run / "prepared" / "splits.json").exists()


def test_resume_goes_on_with_the_configuration_of_the_run(shell: Shell, bars_file: Path) -> None:
    assert shell("prepare", *_qtmrl(bars_file), "--output-dir", "one")[0] == 0
    code, _, err = shell("prepare", "--resume", "one")
    assert code == 0, err
    assert "from the cache" in err
    code, _, err = shell("prepare", "--resume", "nowhere")
    assert code == 2
    assert "not a run directory" in err


def test_default_directory_is_named_after_the_config_and_is_not_that_of_a_training(
    shell: Shell, bars_file: Path
) -> None:
    assert shell("prepare", *_qtmrl(bars_file))[0] == 0
    assert Path("runs/qtmrl-prepared/prepared/X.npy").exists()
    assert not Path("runs/qtmrl").exists()


def test_import_check_show_and_universe(shell: Shell, bars_file: Path, tmp_path: Path) -> None:
    assert shell("data", "import", "parquet", str(bars_file), "--dataset", "us")[0] == 0
    code, out, _ = shell("data", "show")
    assert code == 0
    assert "us" in out
    members = tmp_path / "members.csv"
    members.write_text("symbol,start,end\nAAPL,2015-01-02,\nZZZ,2015-01-02,2016-01-04\n")
    code, out, err = shell("data", "universe", str(members), "--dataset", "us")
    assert code == 0
    assert "1 of the dataset's 16 symbols are members" in out
    assert "ZZZ" in err
    code, out, _ = shell("data", "show", "us", "--symbols")
    assert "2 intervals" in out
    assert "GOOGL" in out
    code, out, err = shell("data", "check", "--dataset", "us")
    assert code == 0, err
    assert "no errors" in out


def test_universe_of_other_symbols_is_refused_and_the_one_before_it_stays(
    shell: Shell, bars_file: Path, tmp_path: Path
) -> None:
    assert shell("data", "import", "parquet", str(bars_file), "--dataset", "us")[0] == 0
    members = tmp_path / "members.csv"
    members.write_text("symbol,start,end\nAAPL.US,2015-01-02,\n")
    code, _, err = shell("data", "universe", str(members), "--dataset", "us")
    assert code == 4
    assert "It has AAPL.US; the bars have AAL, AAPL" in err
    assert "all" in next(r for r in shell("data", "show", "us")[1].splitlines() if "universe" in r)
    words = ("import", "parquet", str(bars_file), "--dataset", "us", "--universe", str(members))
    code, _, err = shell("data", *words)
    assert code == 4
    assert "data.universe" in err


def test_brackets_in_paths_and_symbols_are_printed_as_they_are(
    shell: Shell, tmp_path: Path
) -> None:
    home = tmp_path / "x[" / "x]" / "[bold]"
    file = home / "b[/x].parquet"
    file.parent.mkdir(parents=True)
    # Rows out of order are a warning that names the file, a hundredfold move one with the symbol.
    jump = pl.when(pl.col("time") < pl.col("time").median()).then(1.0).otherwise(100.0)
    bars = make_bars(("A[/x]", "[red]B")).drop("factor").reverse()
    bars.with_columns(pl.col("open", "high", "low", "close") * jump).write_parquet(file)
    code, out, err = shell("data", "check", str(file))
    assert code == 0, err
    assert f"warning: {file}" in err
    assert "[red]B moves" in err
    code, out, err = shell("data", "import", "parquet", str(file), "--dataset", "m")
    assert code == 0, err
    code, out, err = shell("data", "show", "m", "--symbols")
    assert code == 0, err
    assert "A[/x]" in out
    assert "[red]B" in out
    code, out, err = shell(
        *("prepare", "-o", "data.source=store", "-o", "data.dataset=m", "-o", SPLITS),
        *("--output-dir", str(home / "run[/x]")),
    )
    assert code == 0, err
    assert "run[/x]" in out


def test_universe_columns_can_be_mapped_as_the_message_says(
    shell: Shell, bars_file: Path, tmp_path: Path
) -> None:
    assert shell("data", "import", "parquet", str(bars_file), "--dataset", "us")[0] == 0
    members = tmp_path / "members.csv"
    members.write_text("aktie,von\nAAPL,2015-01-02\n")
    code, _, err = shell("data", "universe", str(members), "--dataset", "us")
    assert code == 4
    assert "data.columns: {your_name: symbol}" in err
    mapping = ("-o", "data.columns={aktie: symbol, von: start}")
    code, out, err = shell("data", "universe", str(members), "--dataset", "us", *mapping)
    assert code == 0, err
    assert "1 of the dataset's 16 symbols are members" in out


def test_check_lists_all_problems_at_once(shell: Shell, tmp_path: Path) -> None:
    bars = make_bars(("AAA",)).drop("factor")
    broken = bars.with_columns(
        close=pl.when(pl.int_range(pl.len()) == 3).then(-5.0).otherwise(pl.col("close")),
        low=pl.when(pl.int_range(pl.len()) == 8).then(1e6).otherwise(pl.col("low")),
    )
    file = tmp_path / "broken.csv"
    pl.concat([broken, bars.slice(20, 1)]).write_csv(file)
    code, _, err = shell("data", "check", str(file))
    assert code == 4
    for expected in ("row 5", "row 10", "field 'close'", "time, symbol", "broken.csv"):
        assert expected in err
    assert "Traceback" not in err


def test_quarantine_imports_the_rest_and_says_how_many(shell: Shell, tmp_path: Path) -> None:
    bars = make_bars(("AAA",)).drop("factor")
    file = tmp_path / "broken.csv"
    text = bars.write_csv().replace("2015-01-06T", "not-a-date-T", 1).replace(",AAA,", ",,", 1)
    file.write_text(text)
    code, _, err = shell("data", "import", "csv", str(file), "--dataset", "m")
    assert code == 4
    assert "--quarantine" in err
    assert not Path("store/m/CURRENT.json").exists()
    code, _, err = shell("data", "import", "csv", str(file), "--dataset", "m", "--quarantine")
    assert code == 0, err
    assert "2 row(s) set aside in store/m/quarantine.csv" in err
    assert len(Path("store/m/quarantine.csv").read_text().splitlines()) == 3


def test_synth_generates_and_exports(shell: Shell) -> None:
    words = ("--symbols", "3", "--days", "30", "--seed", "5")
    code, _, err = shell("data", "synth", *words, "--dataset", "s", "--export", "bars.csv")
    assert (code, Path("store").exists()) == (2, False), err
    code, _, err = shell("data", "synth", *words, "--dataset", "s", "--export", "bars.parquet")
    assert code == 0, err
    frame = pl.read_parquet("bars.parquet")
    assert frame["symbol"].n_unique() <= 3
    assert shell("data", "check", "bars.parquet")[0] == 0
    assert not list(Path().glob(".*.tmp"))


def test_export_is_written_piece_by_piece_and_appears_whole_or_not_at_all(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SyntheticConfig(n_symbols=3, n_days=30)
    whole = SyntheticSource(config, 5)
    monkeypatch.setattr(synthetic, "_FRAME_ROWS", 20)
    pieces = SyntheticSource(config, 5)
    _export(pieces, Path("new/bars.parquet"))
    expected = pl.concat([raw.frame.drop("row") for raw in whole.frames()])
    assert pl.read_parquet("new/bars.parquet").equals(expected)
    assert pq.ParquetFile("new/bars.parquet").num_row_groups > 1

    def broken(since: object = None) -> Iterator[RawFrame]:
        yield next(whole.frames())
        raise OSError("the disk is full")

    monkeypatch.setattr(pieces, "frames", broken)
    with pytest.raises(OSError, match="the disk is full"):
        _export(pieces, Path("new/bars.parquet"))
    assert [p.name for p in Path("new").iterdir()] == ["bars.parquet"]
    assert pl.read_parquet("new/bars.parquet").equals(expected)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["prepare", "-o", "train.gama=1"], 3, "did you mean 'gamma'?"),
        (["prepare", "--config", "none.yaml"], 3, "none.yaml: no such file"),
        (["prepare", "-o", "data.source=parquet"], 3, "data.path is not set"),
        (["prepare", "-o", "data.source=csv", "-o", "data.path=none.csv"], 4, "none.csv"),
        (["prepare", "-o", "assets=[NVDA]"], 4, "NVDA"),
        (["prepare", "-o", "features.modules=[none.py]"], 6, "none.py"),
        (["prepare", "-o", "features.stationary.enabled=false"], 6, "names no feature"),
        (["prepare", "-o", "data.benchmark=SPX"], 3, "data.benchmark_path"),
        (["data", "synth", "--export", "x.csv", "--symbols", "2", "--days", "5"], 2, ".parquet"),
        (["data", "import", "sample", "x.csv"], 2, "x.csv"),
        (["data", "show", "none"], 5, "no dataset 'none'"),
        (["data", "check", "none.xyz"], 2, "--source"),
        (["data", "import", "parqet"], 2, "parqet"),
        (["prepare", "--log-level", "LOUD"], 2, "LOUD"),
        (["config", "validate", "none.yaml"], 3, "none.yaml"),
        (["nonsense"], 2, "nonsense"),
        (["prepare", "-o", "data.start=2020-13-45"], 3, "data.start=2020-13-45"),
        (["prepare", "-o", "data.timezone=Mars/Olympus"], 3, "data.timezone"),
        (["prepare", "-o", "data.exogenous=[{path: no.csv}]"], 3, "data.exogenous.0.path: no.csv"),
        (["data", "import", "sample", "--freq", "5min"], 3, "data.freq is '5min'"),
        (["data", "import", "csv", "none.csv", "--update"], 2, "--update needs --dataset"),
        (["data", "check", "x[/x].csv"], 4, "x[/x].csv"),
        (["data", "check", "a:smile:b.csv"], 4, "a:smile:b.csv"),
    ],
)
def test_mistakes_get_one_message_and_an_exit_code(
    words: list[str], code: int, expected: str, shell: Shell
) -> None:
    found, _, err = shell(*words)
    assert found == code, err
    assert expected in err
    assert "Traceback" not in err


def test_bug_of_ours_shows_its_traceback_and_exits_with_70(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("echelon.config.load_config", broken)
    code, _, err = shell("config", "show")
    assert code == 70
    assert "planted" in err
    assert "bug:" in err


def test_failed_prepare_leaves_the_record_of_the_run_before(
    shell: Shell, bars_file: Path, tmp_path: Path
) -> None:
    assert shell("prepare", *_qtmrl(bars_file), "--output-dir", "one")[0] == 0
    before = Path("one/run.json").read_text(), Path("one/config.yaml").read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(
        "from echelon.features import factor\n\n"
        "@factor(lookback=1)\ndef bad(bars):\n    raise ValueError('planted')\n"
    )
    words = ("-o", f"features.modules=[{broken}]", "-o", "window=7", "--output-dir", "one")
    assert shell("prepare", *_qtmrl(bars_file), *words)[0] == 6
    assert (Path("one/run.json").read_text(), Path("one/config.yaml").read_text()) == before
    Path("one/run.json").write_text("{")
    assert shell("prepare", *_qtmrl(bars_file), "--output-dir", "one")[0] == 0
    assert json.loads(Path("one/run.json").read_text())["seed"] == 42


def test_suggested_split_works(shell: Shell, bars_file: Path) -> None:
    words = ["-o", "data.source=parquet", "-o", f"data.path={bars_file}"]
    config = ["--config", str(CONFIGS / "qtmrl.yaml")]
    code, _, err = shell("prepare", *config, *words)
    assert code == 4
    assert "the data run from 2015-01-02 to 2016-12-30" in err
    suggested = err.split("-o '")[1].split("'")[0]
    code, _, err = shell("prepare", *config, *words, "-o", suggested)
    assert code == 0, err


def test_full_disk_and_damaged_neighbour_are_no_bugs(
    shell: Shell, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise pl.exceptions.ComputeError("No space left on device (os error 28)")

    assert shell("data", "import", "parquet", str(bars_file), "--dataset", "good")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(pl.DataFrame, "write_parquet", full)
        code, _, err = shell("data", "import", "parquet", str(bars_file), "--dataset", "two")
    assert code == 1
    assert "No space left on device" in err
    assert "Traceback" not in err
    Path("store/bad").mkdir()
    Path("store/bad/CURRENT.json").write_text("{")
    code, out, err = shell("data", "show")
    assert code == 0
    assert "good" in out
    assert "damaged" in err


def test_output_that_is_not_utf8_is_no_error(tmp_path: Path, bars_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "prepare", *_qtmrl(bars_file)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_truncated_parquet_is_named(shell: Shell, bars_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut.parquet"
    file.write_bytes(bars_file.read_bytes()[:5000])
    code, _, err = shell("data", "import", "parquet", str(file))
    assert code == 4
    assert "cut.parquet" in err


def test_config_show_prints_yaml_that_loads(shell: Shell, tmp_path: Path) -> None:
    code, out, _ = shell("config", "show", "--config", str(CONFIGS / "qtmrl.yaml"), "-o", "seed=7")
    assert code == 0
    (tmp_path / "again.yaml").write_text(out)
    again = load_config(tmp_path / "again.yaml")
    assert again.seed == 7
    assert f"# hash: {fingerprint(again)}" in out
    assert shell("config", "validate", str(tmp_path / "again.yaml"))[0] == 0


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.evolution.members_per_niche=3", "members_per_niche = 3"),
        ("trainer.round_steps=1", "trainer.round_steps = 1"),
        ("experts.sharing.fresh_steps=10", "experts.sharing.fresh_steps = 10"),
        ("train.lr_actor=1", "train.lr_actor = 1 is outside of trainer.evolution.lr"),
    ],
)
def test_settings_that_a_hierarchy_cannot_use_are_not_valid_and_make_no_run(
    shell: Shell, override: str, said: str
) -> None:
    file = str(CONFIGS / "hierarchical.yaml")
    code, _, err = shell("config", "validate", file, "-o", override)
    assert code == 3
    assert file in err
    assert said in err
    code, _, err = shell("train", "--config", file, "-o", override, "--output-dir", "run")
    assert code == 3
    assert said in err
    assert not Path("run").exists()


def test_output_directory_that_is_a_file_is_refused(shell: Shell, bars_file: Path) -> None:
    Path("taken").write_text("")
    code, _, err = shell("prepare", *_qtmrl(bars_file), "--output-dir", "taken")
    assert code == 5
    assert "is a file" in err


def test_quiet_when_not_a_terminal_and_no_secret_in_the_run(
    tmp_path: Path, bars_file: Path
) -> None:
    env = os.environ | {"TUSHARE_TOKEN": "very-secret-token"}
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "prepare", *_qtmrl(bars_file), "--log-level", "ERROR"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert "\x1b[" not in done.stdout
    for file in tmp_path.rglob("*.json"):
        assert "very-secret-token" not in file.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_leaves_nothing_half_done(tmp_path: Path, number: int, code: int) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "echelon", "data", "synth", "--symbols", "400"),
            *("--days", "4000", "--dataset", "big"),
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("store/big/.staging-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("store/big/.staging-*"))
    assert not (tmp_path / "store/big/CURRENT.json").exists()


def test_shell_completion_is_offered(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "--show-completion", "bash"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        # The shell is named; looking for one among our ancestors finds none in a bare process.
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert "complete" in done.stdout


def test_make_bars_covers_the_span() -> None:
    bars = make_bars(first=date(2015, 1, 2), last=date(2015, 2, 2))
    assert bars["time"].n_unique() == 21


def test_endless_argument_is_refused_without_being_repeated(shell: Shell) -> None:
    for words in (
        ("train", "b" * 30_000),
        ("b" * 30_000,),
        ("train", "-o", "assets=" + "b" * 9000),
    ):
        code, _, err = shell(*words)
        assert code == 2, err[:500]
        assert "characters" in err
        assert len(err) < 1000


def test_signal_while_the_commands_are_made_is_no_traceback(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys.modules["echelon.cli.app"], "app", interrupted)
    monkeypatch.setattr(stopping, "_first", None)
    code, _, err = shell("runs", "list")
    assert code == 143
    assert "interrupted:" in err
