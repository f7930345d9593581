"""Sizes beyond the machine are refused before they are allocated, with what would fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from shells import Shell

from echelon.agents.replay import replay_columns
from echelon.cli.app import app
from echelon.cli.options import worker_count
from echelon.config import Config, load_config
from echelon.config import sizes as module
from echelon.config.sizes import (
    SAMPLE_ASSETS,
    bytes_of_transition,
    encoder_weights,
    machine_memory,
    refuse_sizes,
)
from echelon.data.sources.sample import SampleSource
from echelon.errors import ConfigError
from echelon.models.encoders import build_encoder

CONFIGS = Path(__file__).parents[1] / "configs"
GIGABYTE = 10**9


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_available", lambda: 8 * GIGABYTE)
    monkeypatch.setattr(module, "machine_memory", lambda: 8 * GIGABYTE)


def _config(*overrides: str) -> Config:
    return load_config(None, list(overrides))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_configurations_fit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(file)
    refuse_sizes(config)
    monkeypatch.setattr(module, "memory_available", lambda: 1024)
    with pytest.raises(ConfigError, match="needs at least"):
        refuse_sizes(config)


_HIERARCHY = ("train.algo=HIERARCHY",)
_SAC = ("train.algo=SAC", "assets=[A, B, C]")
_SYNTHETIC = ("data.source=synthetic",)


@pytest.mark.parametrize(
    ("key", "value", "more"),
    [
        ("data.synthetic.n_symbols", 10**9, _SYNTHETIC),
        ("data.synthetic.minutes_per_day", 10**12, _SYNTHETIC),
        ("train.books", 10**10, ()),
        ("train.rollout_steps", 10**12, ()),
        ("model.d_model", 10**6, ()),
        ("model.n_layers", 10**9, ("window=20",)),
        ("model.hidden", 10**6, ()),
        ("window", 10**9, ("model.encoder=Transformer",)),
        ("expert.buffer_size", 10**10, _SAC),
        ("expert.batch_size", 10**8, (*_SAC, "expert.buffer_size=100000000")),
        ("expert.hidden", 10**6, _SAC),
        ("experts.sharing.buffer_size", 10**11, _HIERARCHY),
        ("experts.n_experts", 10**9, _HIERARCHY),
        ("experts.skill_dim", 10**11, _HIERARCHY),
        ("trainer.probe_states", 10**11, _HIERARCHY),
        ("risk.cvar_window", 10**12, _HIERARCHY),
        ("risk.drawdown_window", 10**12, _HIERARCHY),
        ("execution.hidden", 10**6, ()),
        ("execution.learner.orders", 10**12, ()),
        ("execution.learner.memory", 10**12, ()),
    ],
)
def test_setting_beyond_memory_is_refused_and_the_number_named_fits(
    key: str, value: int, more: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_sizes(_config(*more, f"{key}={value}"))
    text = str(caught.value)
    assert text.startswith(f"{key} = {value:,} needs at least ")
    assert "8.0 GB are available" in text
    fits = re.search(r"At most ([\d,]+) would fit: lower (\S+)\.", text)
    assert fits is not None
    number = int(fits[1].replace(",", ""))
    if key == "expert.hidden":
        number -= number % 4
    refuse_sizes(_config(*more, f"{key}={number}"))


@pytest.mark.parametrize("encoder", ["TimeCNN", "Transformer", "TimesNet"])
@pytest.mark.parametrize("algorithm", ["A2C", "SAC", "TD3", "APG", "HIERARCHY"])
def test_wide_embedding_of_a_single_layer_is_refused(algorithm: str, encoder: str) -> None:
    settings = (f"train.algo={algorithm}", f"model.encoder={encoder}", "model.n_layers=1")
    with pytest.raises(ConfigError, match=r"model\.d_model = 1,000,000 needs at least"):
        refuse_sizes(_config(*settings, "model.d_model=1000000"))
    refuse_sizes(_config(*settings, "model.d_model=1024"))


@pytest.mark.parametrize("encoder", ["TimeCNN", "Transformer", "TimesNet"])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_weights_that_are_counted_are_those_of_the_encoder(encoder: str, n_layers: int) -> None:
    config = _config(
        *(f"model.encoder={encoder}", "model.d_model=64", f"model.n_layers={n_layers}"),
        *("features.stationary.returns=[1, 5]", "features.stationary.volatility=[10]"),
    )
    real = sum(weights.numel() for weights in build_encoder(config, 3).parameters())
    assert 0.8 * real < encoder_weights(config) <= real


def test_sample_has_the_symbols_that_are_counted() -> None:
    (frame,) = SampleSource().frames()
    assert frame.frame["symbol"].n_unique() == SAMPLE_ASSETS


@pytest.mark.parametrize(
    ("items", "key"),
    [
        (("train.books=100000000",), "train.books"),
        (("train.rollout_steps=100000000",), "train.rollout_steps"),
        (("train.books=100000000", "train.rollout_steps=100"), "train.books"),
        (("train.algo=HIERARCHY", "experts.n_experts=100000000"), "experts.n_experts"),
    ],
)
@pytest.mark.parametrize("available", [8, 16, 31, 64])
def test_setting_that_was_changed_is_the_one_to_lower(
    items: tuple[str, ...], key: str, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "memory_available", lambda: available * GIGABYTE)
    with pytest.raises(ConfigError, match=rf"^{key} = .* would fit: lower {key}\."):
        refuse_sizes(_config(*items))


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("data.synthetic.n_days=1000000000", "at most 43,918 fit"),
        ("data.synthetic.start=9999-12-01", "must be from 1900-01-01 to 2200-01-01"),
        ("data.synthetic.start=0001-01-01", "must be from 1900-01-01 to 2200-01-01"),
        ("data.synthetic.seed=-1", "data.synthetic.seed"),
        ("walk_forward.train=1000000000000", "less than or equal to 1200"),
        ("data.exogenous=[{path: a.csv, max_age_days: 999999999999}]", "less than or equal to"),
    ],
)
def test_times_that_no_calendar_reaches_are_refused(item: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        _config(item)


@pytest.mark.parametrize("key", ["train.threads", "trainer.workers"])
def test_absurd_numbers_of_processes_are_refused(key: str) -> None:
    refuse_sizes(_config(f"{key}=1024"))  # of a single agent, which no process is started for
    with pytest.raises(ConfigError, match=rf"{key}: .* less than or equal to 1024 \(found 1025\)"):
        _config(f"{key}=1025")


def test_processes_of_experts_beyond_memory_are_refused() -> None:
    five, many = "experts.n_experts=5", "experts.n_experts=100"
    refuse_sizes(_config("train.algo=HIERARCHY", five, "trainer.workers=1024"))  # five are started
    with pytest.raises(
        ConfigError, match=r"trainer\.workers = 64 needs at least 28\.8 GB .* At most 17 would fit"
    ):
        refuse_sizes(_config("train.algo=HIERARCHY", many, "trainer.workers=64"))
    refuse_sizes(_config("train.algo=HIERARCHY", many, "trainer.workers=17"))


def _with_workers(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All commands that take --workers, as words."""
    if any("--workers" in option.opts for option in command.params):
        yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from _with_workers(inner, (*words, name))


COMMANDS = sorted(_with_workers(typer.main.get_command(app)))


def test_commands_that_take_workers_are_known() -> None:
    names = {"train", "walk-forward", "ablate", "compare", "prove", "study", "demo", "tune"}
    assert {" ".join(words) for words in COMMANDS} == names | {"execution train", "execution prove"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_workers_beyond_memory_are_refused_before_anything_is_made(
    shell: Shell, tmp_path: Path, words: tuple[str, ...]
) -> None:
    code, _, err = shell(*words, "--workers", "1024")
    assert code == 3
    assert "--workers = 1,024 needs at least 460.8 GB of memory; 8.0 GB are available" in err
    assert "At most 17 would fit: lower --workers." in err
    assert list(tmp_path.iterdir()) == []


def test_workers_of_a_hierarchy_count_with_the_processes_of_its_experts() -> None:
    config = _config("train.algo=HIERARCHY", "experts.n_experts=5", "trainer.workers=4")
    assert worker_count(3, config) == 3
    with pytest.raises(ConfigError, match="At most 3 would fit: lower --workers"):
        worker_count(4, config)
    assert worker_count(17) == 17


def test_default_number_of_workers_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert worker_count(None) == 17
    assert worker_count(None, _config("train.threads=8")) == 8
    monkeypatch.setattr(module, "machine_memory", lambda: 1024)
    assert worker_count(None) == 1
    assert worker_count(1) == 1


def test_validate_and_the_commands_refuse_before_they_begin(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {d_model: 100000000}\n")
    for words in (("config", "validate", "c.yaml"), ("train", "-c", "c.yaml")):
        code, _, err = shell(*words)
        assert code == 3
        assert "model.d_model = 100,000,000 needs at least" in err
        assert "would fit" in err
    assert not (tmp_path / "runs").exists()


def test_memory_error_of_a_library_is_no_bug(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise MemoryError("Unable to allocate 7.28 TiB for an array")

    monkeypatch.setattr("echelon.config.load_config", fail)
    code, _, err = shell("config", "show")
    assert code == 1
    assert "not enough memory (Unable to allocate 7.28 TiB" in err
    assert "bug" not in err


@pytest.mark.parametrize("n_assets", [1, 7, 8, 9, 500])
@pytest.mark.parametrize("behaviour", [False, True])
def test_bytes_of_a_transition_are_those_of_the_ring(n_assets: int, behaviour: bool) -> None:
    columns = replay_columns(n_assets, behaviour=behaviour)
    each = sum(column.itemsize for column in columns.values())
    assert bytes_of_transition(n_assets, behaviour=behaviour) == each


def test_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 48000000 kB",
        "/sys/fs/cgroup/memory.max": str(4 * GIGABYTE),
        "/sys/fs/cgroup/memory.current": str(3 * GIGABYTE),
        "/sys/fs/cgroup/memory.stat": f"anon {GIGABYTE}\ninactive_file {2 * GIGABYTE}",
    }
    monkeypatch.setattr(module, "_text", lambda path: files.get(str(path)))
    monkeypatch.setattr(module.os, "sysconf", lambda _name: 10**6)
    assert machine_memory() == 3 * GIGABYTE
    files["/sys/fs/cgroup/memory.max"] = "max"
    assert machine_memory() == 48_000_000 * 1024
