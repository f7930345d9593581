"""A run directory holds the resolved configuration, its hash, and where data and code came from.

config.yaml     the resolved configuration: `--config run/config.yaml` makes the run again
run.json        config hash, seed, data hash, code version, library versions, command
prepared/       features and prices (`echelon prepare`)
evaluations/    by split (`echelon evaluate`)
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from echelon import __version__
from echelon.errors import StoreError
from echelon.files import check_tree, read_json, sweep, sweep_scratch, write_atomic, write_json

if TYPE_CHECKING:
    from echelon.config import Config

_REMEDY = "Start the run again."
log = logging.getLogger(__name__)

_LIBRARIES = ("numpy", "polars", "pyarrow", "numba", "torch", "skfolio")


class DataFacts(TypedDict):
    """What a run.json says of the data."""

    name: str
    content_hash: str


class OutcomeFacts(TypedDict):
    """What a run.json says of a seed's training that others read."""

    seed: int
    best_score: float


class RunFacts(TypedDict, total=False):
    """What a run.json says that others read; it may say more, and a batch's says less."""

    config_hash: str
    seed: int
    command: str
    finished: str
    echelon: str
    code: str
    python: str
    platform: str
    libraries: dict[str, str]
    data: DataFacts
    outcomes: list[OutcomeFacts]


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def claim(path: Path) -> RunDirectory:
        """Check that it can be a run directory, and sweep it; nothing is written yet."""
        if path.exists() and not path.is_dir():
            raise StoreError(f"{path}: is a file. Name a directory for --output-dir.")
        sweep(path, deep=True)
        sweep_scratch()
        return RunDirectory(path)

    def record(self, config: Config, command: str, **facts: Any) -> None:  # noqa: ANN401 (JSON)
        """Write down what was run, once its result is there: else it may stand next to another."""
        from echelon.config import fingerprint, to_yaml

        tree = {
            "config_hash": fingerprint(config),
            "seed": config.seed,
            "command": command,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "echelon": __version__,
            "code": code_version(),
            "python": platform.python_version(),
            "platform": f"{sys.platform}-{platform.machine()}",
            "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        } | facts
        write_atomic(self.path / "config.yaml", to_yaml(config))
        write_json(self.path / "run.json", tree, sort_keys=True, allow_nan=True)

    @property
    def is_trained(self) -> bool:
        """Whether agents were trained there, or began to be."""
        return (self.path / "seeds").exists()

    def trained_on(self) -> str | None:
        """Content hash of the prepared set its agents learned from; None where nothing says it."""
        if not self.is_trained or not (self.path / "run.json").is_file():
            return None
        prepared = self.facts().get("prepared")
        if isinstance(prepared, str):
            return prepared
        log.warning(
            "%s: does not say which prepared set the agents were trained on (`prepared`), so only "
            "the set's own manifest vouches for it",
            self.path / "run.json",
        )
        return None

    def evaluated_splits(self) -> list[str]:
        splits = ("train", "valid", "test")
        return [s for s in splits if (self.path / "evaluations" / s / "summary.json").is_file()]

    def facts(self) -> dict[str, Any]:
        path = self.path / "run.json"
        tree = read_json(path, dict[str, Any], _REMEDY)
        check_tree(tree, RunFacts, path, _REMEDY)
        return tree


def code_version() -> str:
    """The commit of the checkout the package runs from, marked if changed; else the version."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return __version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return __version__
    return done.stdout.strip() or __version__
