"""Where metrics go besides the run's own log: TensorBoard, Weights & Biases, MLflow.

Each is a `Sink`. They mirror the metric log (`echelon.runs.metrics`), which stays the record: a
service that stops answering during training is left out with a warning, since the rows it misses
are in the log. A sink that cannot be opened is an error, before anything is trained.

Services are reached as their own environment variables say, and secrets come from there only:

    W&B      WANDB_API_KEY, WANDB_MODE (offline, disabled), WANDB_PROJECT, WANDB_BASE_URL …
    MLflow   MLFLOW_TRACKING_URI (mlruns/ in the run directory where unset), MLFLOW_TRACKING_TOKEN …

The ids the services gave a run are in tracking.json, so that a resumed run goes on in the same one.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import platform
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from echelon.config.agents import LoggingConfig
from echelon.errors import ConfigError, StoreError
from echelon.files import read_json, write_json

Status: TypeAlias = Literal["finished", "failed", "interrupted"]

PROJECT = "echelon"
"""W&B project and MLflow experiment where the environment names no other."""
IDS = "tracking.json"
EVENTS = "tensorboard"


class Sink(Protocol):
    """Takes the metrics of a run as they come."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        ...

    def finish(self, status: Status) -> None:
        """Say how the run ended, and close; nothing is logged afterwards."""
        ...


def open_sinks(
    logging: LoggingConfig, directory: Path, run_name: str, resume_step: int | None
) -> list[Sink]:
    """Open the sinks the configuration asks for. resume_step: None for a new run"""
    if resume_step is None:
        (directory / IDS).unlink(missing_ok=True)
    sinks: list[Sink] = []
    try:
        if logging.use_wandb:
            sinks.append(WandbSink(directory, run_name))
        if logging.use_mlflow:
            sinks.append(MlflowSink(directory, run_name))
        if logging.tensorboard:
            sinks.append(TensorBoardSink(directory, resume_step))
    except BaseException:
        for sink in sinks:
            sink.finish("failed")
        raise
    return sinks


class TensorBoardSink:
    """Event files, written at once: TensorBoard's own writer ends in a traceback on a full disk."""

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._records: Any = RecordWriter
        folder = directory / EVENTS
        if resume_step is None:  # a new run: curves of an earlier one would run into its own
            for stale in folder.glob("events.out.tfevents.*"):
                stale.unlink()
        first = [self._event(wall_time=time.time(), file_version="brain.Event:2")]
        if resume_step is not None:
            # What was logged after the step resumed from is logged again: readers drop the first.
            start, step = event_pb2.SessionLog(status=event_pb2.SessionLog.START), resume_step + 1
            first.append(self._event(wall_time=time.time(), step=step, session_log=start))
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The names of one second sort by the last part: readers take files in this order.
            self._file = (folder / f"{name}.{time.time_ns()}").open("xb", buffering=0)
            self._write(first)
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot be written ({error.strerror or error}). Make room or mend the "
                "disk, then resume; logging.tensorboard: false does without."
            ) from error
        self._open = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._open:
            return
        values = [self._summary.Value(tag=n, simple_value=float(v)) for n, v in metrics.items()]
        summary = self._summary(value=values)
        try:
            self._write([self._event(wall_time=time.time(), step=step, summary=summary)])
        except OSError as error:
            self._open = False
            _warn("TensorBoard", error, error.strerror)

    def finish(self, status: Status) -> None:
        """Close the file; event files have no place for the status."""
        self._file.close()

    def _write(self, events: Sequence[Any]) -> None:
        """Append events, whole or not at all: readers stop for ever at half a record."""
        buffer = io.BytesIO()
        for event in events:
            self._records(buffer).write(event.SerializeToString())
        size, data = self._file.tell(), buffer.getvalue()
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                self._file.truncate(size)
            raise


class WandbSink:
    """A run of Weights & Biases."""

    def __init__(self, directory: Path, run_name: str) -> None:
        self._wandb = _require("wandb", "use_wandb")
        mode = os.environ.get("WANDB_MODE", "online")
        if mode not in ("offline", "disabled", "dryrun") and not os.environ.get("WANDB_API_KEY"):
            raise ConfigError(
                "logging.use_wandb is true, but the environment variable WANDB_API_KEY is not set. "
                "Set it, or set WANDB_MODE=offline to keep the run here and `wandb sync` it later."
            )
        run_id = _known_ids(directory).get("wandb") or secrets.token_hex(4)
        _remember(directory, wandb=run_id)
        try:
            self._run: Any = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=run_name,
                id=run_id,
                resume="allow",
                dir=str(directory),
                reinit="create_new",  # several seeds of one process are several runs
                settings={"console": "off"},  # the live display is not a log
            )
            # W&B drops rows whose step is not new; with an axis of our own a resumed run may
            # go back to the step of its checkpoint.
            self._run.define_metric("*", step_metric="step")
        except (self._wandb.Error, OSError) as error:
            raise _unreachable("W&B", "use_wandb", "WANDB_*", error) from None
        self._open = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._open:
            try:
                self._run.log({"step": step, **metrics})
            except (self._wandb.Error, OSError) as error:
                self._open = False
                _warn("W&B", error)

    def finish(self, status: Status) -> None:
        """End the run; anything but `finished` shows as failed."""
        try:
            self._run.finish(exit_code=0 if status == "finished" else 1)
        except (self._wandb.Error, OSError) as error:
            _warn("W&B", error)


class MlflowSink:
    """A run of MLflow, in the experiment MLFLOW_EXPERIMENT_NAME or `echelon`."""

    def __init__(self, directory: Path, run_name: str) -> None:
        # Read on import. Who asked for a local log did not ask to report its use to anyone.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._mlflow = _require("mlflow", "use_mlflow")
        self._errors = (self._mlflow.exceptions.MlflowException, OSError)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (directory.resolve() / "mlruns").as_uri()
            # MLflow 3 wants a database or this word; mlflow-skinny has no database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        known = _known_ids(directory).get("mlflow")
        try:
            self._client: Any = self._mlflow.MlflowClient(tracking_uri=uri)
            if known:
                self._id = known
                self._client.update_run(self._id, status="RUNNING")
            else:
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
                there = self._client.get_experiment_by_name(name)
                place = there.experiment_id if there else self._client.create_experiment(name)
                self._id = self._client.create_run(place, run_name=run_name).info.run_id
        except self._errors as error:
            raise _unreachable("MLflow", "use_mlflow", "MLFLOW_*", error) from None
        _remember(directory, mlflow=self._id)
        self._open = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._open:
            return
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        batch = [metric(name, float(value), now, step) for name, value in metrics.items()]
        try:
            self._client.log_batch(self._id, metrics=batch)
        except self._errors as error:
            self._open = False
            _warn("MLflow", error)

    def finish(self, status: Status) -> None:
        words = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        try:
            self._client.set_terminated(self._id, status=words[status])
        except self._errors as error:
            _warn("MLflow", error)


def _require(module: str, key: str) -> Any:  # noqa: ANN401 (a module without types)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"logging.{key} is true, but {module} cannot be imported ({error}). Run "
            f'`pip install "echelon[tracking]"`, or set logging.{key}: false.'
        ) from None


def _known_ids(directory: Path) -> dict[str, str]:
    path = directory / IDS
    if not path.exists():
        return {}
    return read_json(path, dict[str, str], "Delete it: new runs are opened.")


def _remember(directory: Path, **ids: str) -> None:
    write_json(directory / IDS, _known_ids(directory) | ids, sort_keys=True)


def _unreachable(service: str, key: str, variables: str, error: Exception) -> ConfigError:
    """Without the service's address, which may have a password in it."""
    return ConfigError(
        f"{service} cannot be opened ({type(error).__name__}). Check the environment variables "
        f"{variables} and the network; where the run was deleted there, delete {IDS} in the run "
        f"directory. Or set logging.{key}: false."
    )


def _warn(service: str, error: Exception, why: str | None = None) -> None:
    """why: in words; None: only the kind of error, which has no password in it"""
    warnings.warn(
        f"{service} takes no more metrics ({why or type(error).__name__}); training goes on, and "
        "the run's own metric log has every row.",
        RuntimeWarning,
        stacklevel=3,
    )
