"""A proof in parts: one list of jobs for all markets, each part's finding in a file of its own.

    DIR/parts/KEY/identity       what the part is of: configuration, market, sizes
    DIR/parts/KEY/part.json      its finding, once it has one
    DIR/parts/KEY/seeds/…        trainings, with checkpoints

Going on after a stop is the same as starting: what has a finding is not done again, a training
goes on from its checkpoint. A directory with parts of another configuration is refused.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from echelon import __version__
from echelon.config import Config, fingerprint
from echelon.config.agents import LoggingConfig
from echelon.errors import DamagedError, Stopped, StoreError, UsageError, shorten
from echelon.files import exclusive_lock, json_line, read_json, write_atomic, write_json
from echelon.market import drawn_market
from echelon.runs.directory import code_version
from echelon.workers import Report, ShouldStop, run_jobs

_FORMAT = 1
_REMEDY = "Delete it and run the command again."

Finding = Mapping[str, Any]
"""What a part found, as JSON has it."""


class Part(ABC):
    """A piece of work; a frozen dataclass, as it travels to another process.

    KEY: what its key is made of, as `str.format` takes it, 0 being the part
    """

    KEY: ClassVar[str]

    @property
    def key(self) -> str:
        """Its place below DIR/parts, and its name in the display."""
        return self.KEY.format(self)

    @property
    def steps(self) -> int:
        """Environment steps of its trainings; 0 without any."""
        return 0

    @abstractmethod
    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Do it, in a directory of its own; None: stopped before the end."""


@dataclass(frozen=True)
class Done:
    """A part's finding; code: version of the code that found it."""

    key: str
    finding: Finding
    seconds: float
    cpu_seconds: float
    code: str


@dataclass(frozen=True)
class _Job:
    part: Part
    directory: Path
    identity: str
    code: str

    locks = ()  # the proof holds one on all of them

    @property
    def title(self) -> str:
        """As a `cluster.Portable`, like all below."""
        return self.part.key

    @property
    def home(self) -> Path:
        """The directory of all parts."""
        return self.directory.parent

    @property
    def trees(self) -> tuple[str, ...]:
        """Its own, and those of parts that it reads."""
        return self.directory.name, *getattr(self.part, "sources", ())

    def at(self, home: Path) -> _Job:
        """The same in another directory."""
        return replace(self, directory=home / self.directory.name)

    def again(self) -> _Job:
        """The same: a part goes on from what is there."""
        return self


def identity_of(part: Part) -> str:
    """Hash of everything a part depends on, except where its log goes."""
    parts: dict[str, str] = {"part": type(part).__name__, "format": str(_FORMAT)}
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if isinstance(value, Config):
            value = fingerprint(value.model_copy(update={"logging": LoggingConfig()}))
        parts[field.name] = repr(value)
    return hashlib.sha256(json_line(parts, sort_keys=True).encode()).hexdigest()


def lock_proof(directory: Path) -> AbstractContextManager[None]:
    return exclusive_lock(directory / ".prove.lock", f"the proof in {directory}")


def run_all(
    parts: Sequence[Part],
    directory: Path,
    *,
    workers: int,
    on_report: Callable[[Part, object], None] = lambda _part, _message: None,
) -> dict[str, Done]:
    """Do every part that has no finding yet, so many at a time; the findings of all, by key.

    `on_report(part, message)` gets a training's `Progress`, and `Done` at the end of a part. Raises
    `Stopped` where Ctrl-C came before the last.
    """
    with lock_proof(directory):
        known = {part.key: load_part(part, directory) for part in parts}
        for part in parts:
            if (done := known[part.key]) is not None:
                on_report(part, done)
        code = code_version()
        jobs = [
            _Job(part, directory / "parts" / part.key, identity_of(part), code)
            for part in parts
            if known[part.key] is None
        ]
        made = run_jobs(
            _work,
            jobs,
            workers=workers,
            on_report=lambda n, message: on_report(jobs[n].part, message),
        )
        ready = {key: done for key, done in known.items() if done is not None}
        ready |= {done.key: done for done in made.all_or_raise() if done is not None}
    if made.stopped or len(ready) < len(parts):
        raise Stopped(
            f"{len(ready)} of {len(parts)} parts are done and kept in {directory / 'parts'}. Run "
            "the same command again to go on."
        )
    return ready


def clear_proof(directory: Path, outcome: Sequence[str]) -> None:
    """Remove the parts and the files `outcome` that an earlier proof left in the directory."""
    with lock_proof(directory):  # not below the feet of a proof that runs there
        for name in outcome:
            (directory / name).unlink(missing_ok=True)
        shutil.rmtree(directory / "parts", ignore_errors=True)


def proof_facts(config: Config, command: str, parts: Collection[Done]) -> dict[str, Any]:
    """What findings were made with: command, configuration, versions, machine, time."""
    return {
        "command": command,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "config_hash": fingerprint(config),
        "rules": drawn_market(config).facts(),
        "seed": config.seed,
        "echelon": __version__,
        "code": sorted({part.code for part in parts}),
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "cores": os.cpu_count() or 1,
        "cpu_seconds": sum(part.cpu_seconds for part in parts),
    }


def time_spent(parts: Sequence[Done]) -> dict[str, float]:
    return {name: sum(getattr(part, name) for part in parts) for name in ("seconds", "cpu_seconds")}


def load_part(part: Part, directory: Path) -> Done | None:
    """The part's finding, if it was made before; refuses one of another configuration."""
    place = directory / "parts" / part.key
    identity = place / "identity"
    if not identity.is_file():
        return None
    try:
        known = identity.read_bytes().strip()
    except OSError as error:
        what = error.strerror or str(error)
        raise DamagedError(identity, what, f"Delete {place} and run the command again.") from None
    if known != identity_of(part).encode():
        raise UsageError(
            f"{directory}: holds a proof of another configuration, mode or version ({part.key} "
            "differs). Name another directory (--output-dir), or prove again in its place "
            "(--overwrite)."
        )
    path = place / "part.json"
    if not path.is_file():
        return None
    done = read_json(path, Done, _REMEDY)
    if done.key != part.key:
        raise DamagedError(path, f"of the part {shorten(done.key)!r}", _REMEDY)
    return done


def _work(job: _Job, report: Report, should_stop: ShouldStop) -> Done | None:
    began, worked = time.perf_counter(), time.process_time()
    write_atomic(job.directory / "identity", job.identity + "\n")
    try:
        finding = job.part.run(job.directory, report, should_stop)
    except StoreError as error:
        if str(job.directory) not in str(error):
            raise  # of a file elsewhere, about which it says what to do
        raise StoreError(
            f"{error} In a proof there is no --resume, and --overwrite proves everything again. To "
            f"do this part alone again, delete {job.directory} and run the same command: what is "
            "done elsewhere is kept."
        ) from error
    if finding is None:
        return None
    done = Done(
        key=job.part.key,
        finding=finding,
        seconds=round(time.perf_counter() - began, 2),
        cpu_seconds=round(time.process_time() - worked, 2),
        code=job.code,
    )
    write_json(job.directory / "part.json", done.__dict__)
    report(done)
    return done
