"""Sinks: TensorBoard for real; W&B and MLflow as recording fakes, so that nothing is sent."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from echelon.config.agents import LoggingConfig
from echelon.errors import ConfigError, StoreError
from echelon.runs.tracking import EVENTS, IDS, Status, open_sinks

NOTHING = {"tensorboard": False}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")  # so that what the sink sets is undone after the test
        monkeypatch.delenv(name)


class FakeWandb(ModuleType):
    """Records what would have been sent; `fail` names a call that raises."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.fail = ""

    def _note(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if name == self.fail:
            raise self.Error("https://user:password@host refused")

    def init(self, **options: Any) -> Any:
        self._note("init", options)
        return SimpleNamespace(
            define_metric=lambda *a, **k: self._note("define_metric", (a, k)),
            log=lambda row: self._note("log", row),
            finish=lambda exit_code: self._note("finish", exit_code),
        )


class FakeMlflow(ModuleType):
    """As above, for the client of MLflow."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[str, Any]] = []
        self.fail = ""
        self.experiments: dict[str, str] = {}
        failure = type("MlflowException", (Exception,), {})
        self.exceptions = SimpleNamespace(MlflowException=failure)
        self.entities = SimpleNamespace(Metric=lambda *values: values)

    def _note(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if name == self.fail:
            raise self.exceptions.MlflowException("https://user:password@host refused")

    def MlflowClient(self, tracking_uri: str) -> Any:
        self._note("client", tracking_uri)

        def create_experiment(name: str) -> str:
            self._note("create_experiment", name)
            self.experiments[name] = str(len(self.experiments) + 1)
            return self.experiments[name]

        def find(name: str) -> Any:
            number = self.experiments.get(name)
            return SimpleNamespace(experiment_id=number) if number else None

        def create_run(experiment: str, run_name: str) -> Any:
            self._note("create_run", (experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id=f"id-{len(self.calls)}"))

        return SimpleNamespace(
            get_experiment_by_name=find,
            create_experiment=create_experiment,
            create_run=create_run,
            update_run=lambda run, status: self._note("update_run", (run, status)),
            log_batch=lambda run, metrics: self._note("log_batch", (run, metrics)),
            set_terminated=lambda run, status: self._note("set_terminated", (run, status)),
        )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return fake


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


def _scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / EVENTS))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def _use(directory: Path, resume: int | None = None, status: Status = "finished") -> None:
    logging = LoggingConfig(use_wandb=True, use_mlflow=True, tensorboard=False)
    sinks = open_sinks(logging, directory, "demo", resume)
    for sink in sinks:
        sink.log(10, {"losses/value": 0.5})
        sink.finish(status)
    assert len(sinks) == 2


def test_defaults_open_tensorboard_alone(tmp_path: Path) -> None:
    sinks = open_sinks(LoggingConfig(), tmp_path, "demo", None)
    assert [type(sink).__name__ for sink in sinks] == ["TensorBoardSink"]
    for sink in sinks:
        sink.finish("finished")
    assert open_sinks(LoggingConfig(**NOTHING), tmp_path, "demo", None) == []


def test_tensorboard_has_rows_while_training_and_drops_those_redone(tmp_path: Path) -> None:
    (sink,) = open_sinks(LoggingConfig(), tmp_path, "demo", None)
    for step in (100, 200, 300):
        sink.log(step, {"losses/value": step, "valid/sharpe_annual": math.nan})
    assert _scalars(tmp_path, "losses/value") == [(100, 100.0), (200, 200.0), (300, 300.0)]
    assert all(math.isnan(value) for _, value in _scalars(tmp_path, "valid/sharpe_annual"))
    sink.finish("interrupted")

    (sink,) = open_sinks(LoggingConfig(), tmp_path, "demo", 200)
    for step in (300, 400):
        sink.log(step, {"losses/value": -step})
    sink.finish("finished")
    expected = [(100, 100.0), (200, 200.0), (300, -300.0), (400, -400.0)]
    assert _scalars(tmp_path, "losses/value") == expected


def test_new_run_does_not_show_the_curves_of_an_earlier_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        (sink,) = open_sinks(LoggingConfig(), tmp_path, "demo", None)
        sink.log(5, {"a/b": value})
        sink.finish("finished")
    assert _scalars(tmp_path, "a/b") == [(5, 2.0)]


def test_tensorboard_that_cannot_be_opened_is_an_error_that_says_what_to_do(
    tmp_path: Path,
) -> None:
    (tmp_path / EVENTS).touch()
    with pytest.raises(StoreError, match=rf"{EVENTS}: cannot be written \(.*tensorboard: false"):
        open_sinks(LoggingConfig(), tmp_path, "demo", None)


def test_tensorboard_on_a_full_disk_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    """In a process whose files may not grow beyond 4 kB: the kernel's answer, not a fake's."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from echelon.config.agents import LoggingConfig\n"
        "from echelon.runs.tracking import open_sinks\n"
        "(sink,) = open_sinks(LoggingConfig(), Path(sys.argv[1]), 'demo', None)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "for step in range(500):\n"
        "    sink.log(step, {'losses/value': step, 'losses/policy': -step})\n"
        "sink.finish('finished')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("TensorBoard takes no more metrics") == 1
    assert "Traceback" not in done.stderr
    rows = _scalars(tmp_path, "losses/value")
    assert 10 < len(rows) < 500  # what fitted, whole: the reader stops at half a record
    assert rows == [(step, float(step)) for step in range(len(rows))]


@pytest.mark.parametrize(("key", "module"), [("use_wandb", "wandb"), ("use_mlflow", "mlflow")])
def test_service_that_is_not_installed_names_the_extra(
    key: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"logging\.{key} .*pip install \"echelon\[tracking\]\""):
        open_sinks(LoggingConfig.model_validate({key: True}), tmp_path, "demo", None)
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_the_rows_on_an_axis_of_our_own(tmp_path: Path, wandb: FakeWandb) -> None:
    (sink,) = open_sinks(LoggingConfig(use_wandb=True, **NOTHING), tmp_path, "demo", None)
    sink.log(10, {"losses/value": 0.5})
    sink.log(20, {"losses/value": 0.25, "charts/steps_per_second": 9.0})
    sink.finish("finished")
    names = [name for name, _ in wandb.calls]
    assert names == ["init", "define_metric", "log", "log", "finish"]
    options = wandb.calls[0][1]
    assert (options["project"], options["name"], options["dir"]) == (
        "echelon",
        "demo",
        str(tmp_path),
    )
    assert "mode" not in options  # WANDB_MODE decides
    assert wandb.calls[1][1] == (("*",), {"step_metric": "step"})
    assert wandb.calls[3][1] == {"step": 20, "losses/value": 0.25, "charts/steps_per_second": 9.0}
    assert wandb.calls[4][1] == 0


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_wandb_run_that_did_not_finish_is_marked(
    status: Status, tmp_path: Path, wandb: FakeWandb
) -> None:
    (sink,) = open_sinks(LoggingConfig(use_wandb=True, **NOTHING), tmp_path, "demo", None)
    sink.finish(status)
    assert wandb.calls[-1] == ("finish", 1)


def test_wandb_without_a_key_is_refused_unless_it_stays_here(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging = LoggingConfig(use_wandb=True, **NOTHING)
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(ConfigError, match=r"WANDB_API_KEY is not set.*WANDB_MODE=offline"):
        open_sinks(logging, tmp_path, "demo", None)
    assert wandb.calls == []
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    open_sinks(logging, tmp_path, "demo", None)
    assert wandb.calls[0][1]["project"] == "mine"
    assert "sesame" not in str(wandb.calls) + (tmp_path / IDS).read_text()


def test_mlflow_gets_the_rows_in_the_run_directory(tmp_path: Path, mlflow: FakeMlflow) -> None:
    (sink,) = open_sinks(LoggingConfig(use_mlflow=True, **NOTHING), tmp_path, "demo", None)
    sink.log(10, {"losses/value": 0.5, "valid/x": 1})
    sink.finish("interrupted")
    names = [name for name, _ in mlflow.calls]
    assert names == ["client", "create_experiment", "create_run", "log_batch", "set_terminated"]
    assert mlflow.calls[0][1] == (tmp_path / "mlruns").as_uri()
    assert mlflow.calls[2][1] == ("1", "demo")
    run, batch = mlflow.calls[3][1]
    assert [(name, value, step) for name, value, _, step in batch] == [
        ("losses/value", 0.5, 10),
        ("valid/x", 1.0, 10),
    ]
    assert mlflow.calls[4][1] == (run, "KILLED")
    assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "true"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_mlflow_server_and_experiment_come_from_the_environment(
    tmp_path: Path, mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:sesame@localhost:1")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    mlflow.experiments["mine"] = "7"
    open_sinks(LoggingConfig(use_mlflow=True, **NOTHING), tmp_path, "demo", None)
    assert mlflow.calls == [
        ("client", "http://user:sesame@localhost:1"),
        ("create_run", ("7", "demo")),
    ]
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    assert "sesame" not in (tmp_path / IDS).read_text()


def test_resumed_run_goes_on_under_its_ids_and_a_new_one_gets_others(
    tmp_path: Path, wandb: FakeWandb, mlflow: FakeMlflow
) -> None:
    _use(tmp_path, status="interrupted")
    first = json.loads((tmp_path / IDS).read_text())
    _use(tmp_path, resume=5)
    assert json.loads((tmp_path / IDS).read_text()) == first
    _use(tmp_path)
    second = json.loads((tmp_path / IDS).read_text())
    ids = [options["id"] for name, options in wandb.calls if name == "init"]
    assert ids == [first["wandb"], first["wandb"], second["wandb"]]
    assert [what for name, what in mlflow.calls if name == "update_run"] == [
        (first["mlflow"], "RUNNING")
    ]
    assert set(first) == set(second) == {"wandb", "mlflow"}
    assert not set(first.values()) & set(second.values())


@pytest.mark.parametrize("text", ["{", "[]", '{"wandb": 1}'])
def test_damaged_ids_are_an_error(text: str, tmp_path: Path, wandb: FakeWandb) -> None:
    (tmp_path / IDS).write_text(text)
    with pytest.raises(StoreError, match=rf"{IDS}: missing or damaged .*Delete it"):
        open_sinks(LoggingConfig(use_wandb=True, **NOTHING), tmp_path, "demo", 5)
    assert wandb.calls == []


@pytest.mark.parametrize(
    ("module", "key", "call"),
    [("wandb", "use_wandb", "init"), ("mlflow", "use_mlflow", "create_run")],
)
def test_service_that_cannot_be_opened_is_an_error_without_its_address(
    module: str, key: str, call: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(module).fail = call
    with pytest.raises(ConfigError, match=rf"cannot be opened .*logging\.{key}: false") as caught:
        open_sinks(LoggingConfig.model_validate({key: True}), tmp_path, "demo", None)
    assert "password" not in str(caught.value)


def test_sinks_already_open_are_closed_when_a_later_one_fails(
    tmp_path: Path, wandb: FakeWandb, mlflow: FakeMlflow
) -> None:
    mlflow.fail = "client"
    with pytest.raises(ConfigError, match="MLflow cannot be opened"):
        _use(tmp_path)
    assert wandb.calls[-1] == ("finish", 1)


@pytest.mark.parametrize(
    ("module", "key", "call", "last"),
    [
        ("wandb", "use_wandb", "log", "finish"),
        ("mlflow", "use_mlflow", "log_batch", "set_terminated"),
    ],
)
def test_service_that_fails_in_training_warns_once_and_is_left_out(
    module: str, key: str, call: str, last: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fake = request.getfixturevalue(module)
    logging = LoggingConfig.model_validate({key: True} | NOTHING)
    (sink,) = open_sinks(logging, tmp_path, "demo", None)
    fake.fail = call
    with pytest.warns(RuntimeWarning, match="takes no more metrics .*training goes on") as caught:
        sink.log(1, {"a/b": 1.0})
    assert "password" not in str(caught[0].message)
    sink.log(2, {"a/b": 1.0})
    sink.finish("finished")
    assert [name for name, _ in fake.calls].count(call) == 1
    assert fake.calls[-1][0] == last


@pytest.mark.parametrize(
    ("module", "key", "call"),
    [("wandb", "use_wandb", "finish"), ("mlflow", "use_mlflow", "set_terminated")],
)
def test_service_that_fails_at_the_end_warns(
    module: str, key: str, call: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    logging = LoggingConfig.model_validate({key: True} | NOTHING)
    request.getfixturevalue(module).fail = call
    (sink,) = open_sinks(logging, tmp_path, "demo", None)
    with pytest.warns(RuntimeWarning, match="takes no more metrics"):
        sink.finish("finished")
