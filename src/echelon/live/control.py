"""Operators: status and commands of a running engine, over loopback and with a token.

The engine listens on a free port of 127.0.0.1, or on `metrics.port`; `NAME.control` beside the
journal says which. The token is ECHELON_TOKEN on both sides. Prometheus reads `/metrics`. Commands
wait in the engine's queue and are carried out between two bars, each written into the journal
first. Where no engine runs, those that only change the mode are written into the journal directly,
and hold when it starts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, UsageError, shorten
from echelon.files import Closing, read_json, write_json
from echelon.live.brokers import BrokerError
from echelon.live.engine import MODES, Command, LiveEngine
from echelon.live.http import Server, call, metrics_route
from echelon.live.journal import Journal
from echelon.monitoring.metrics import Metrics

_SECONDS = 30.0
"""That a command is waited for: a bar may be in the middle of its step."""


class ControlServer(Closing):
    """Where a running engine hears its operators."""

    def __init__(
        self, engine: LiveEngine, token: str, metrics: Metrics | None = None, port: int = 0
    ) -> None:
        """port: 0 takes any that is free"""
        self._engine = engine
        self._file = control_file(engine.journal.path)
        self._key = secrets.token_hex(8)
        routes = {("GET", "/v1/status"): self._status, ("POST", "/v1/command"): self._command}
        pages = {} if metrics is None else metrics_route(metrics)
        self._server = Server({**routes, **pages}, token, port)
        self.port = self._server.port
        write_json(self._file, {"port": self.port, "pid": os.getpid(), "engine": self._key})

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
        self._server.close()

    def _is_for_another(self, body: Mapping[str, Any]) -> bool:
        """Whether one is meant that had this port, and left its file behind when it was killed."""
        return bool(body.get("engine", self._key) != self._key)

    def _status(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {} if self._is_for_another(body) else self._engine.published

    def _command(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_for_another(body):
            return {}
        odd = set(body) - {*Command._fields, "engine"}
        if odd or not isinstance(body.get("name"), str):
            raise UsageError(f"expected the fields {', '.join(Command._fields)}.")
        flags = {name: body.get(name, False) for name in ("adopt", "undo")}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise UsageError(f"{name} is {shorten(repr(flag), 60)}, expected true or false.")
        command = Command(body["name"], str(body.get("by", ""))[:100], **flags)
        answer: Future[dict[str, Any]] = Future()
        self._engine.commands.put((command, answer))
        try:
            return answer.result(_SECONDS)
        except Late:
            raise EchelonError(
                f"{command.name}: the engine has it, and was busy for {_SECONDS:.0f} s. Look at "
                "`echelon live status` in a moment."
            ) from None


def control_file(journal: Path) -> Path:
    """Where a running engine says its port."""
    return journal.with_name(f"{journal.name}.control")


def ask_engine(journal: Path, token: str, command: Command | None = None) -> dict[str, Any] | None:
    """What the running engine of a journal answers to a command, or its status; None: none runs."""
    file = control_file(journal)
    if not file.is_file():
        return None
    about = read_json(file, dict[str, Any], "Remove the file if no engine runs.")
    url = f"http://127.0.0.1:{about.get('port')}"
    try:
        key = {"engine": about.get("engine")}
        if command is None:
            return call(url, "GET", "/v1/status", key, token, _SECONDS) or None
        body = {**command._asdict(), **key}
        return call(url, "POST", "/v1/command", body, token, 2 * _SECONDS) or None
    except BrokerError:
        return None


def write_mode(journal: Path, command: Command) -> None:
    """Write a command down that holds when the engine starts."""
    if command.name not in MODES:
        raise UsageError(
            f"{command.name}: no engine runs on {journal}, and this needs its broker. Start it."
        )
    with Journal.read(journal) as reading:
        about = {k: v for k, v in reading.about().items() if k != "format"}
    with Journal.open(journal, about) as writing:
        writing.append("command", command._asdict())
        writing.commit()
