"""Start the services that tests and developers need, each on a free loopback port.

    python scripts/services.py redis        run one in the foreground, print its URL, stop on Ctrl-C
    python scripts/services.py --list       say which ones can run here
    python scripts/services.py --missing    Debian packages that the tests would like to have

Tests use the same code through the fixtures of `tests/conftest.py`. A service is one `Service`
record: the program, its arguments, the question that proves it is up. It keeps its data in a
temporary directory, persists nothing, listens on 127.0.0.1 only and goes with its parent. A program
that tests merely call, such as a browser, is a `Program`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
START_SECONDS = 20.0
STOP_SECONDS = 5.0
ATTEMPTS = 5


class ServiceError(RuntimeError):
    """A service that is missing or does not come up. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Program:
    """What tests call.

    names: of the executable, any of which will do, looked up on PATH
    package: the Debian package that has the first
    """

    names: tuple[str, ...]
    package: str

    def path(self) -> str | None:
        """Where it is, or None where it is not installed."""
        return next(filter(None, map(shutil.which, self.names)), None)

    def missing(self) -> str | None:
        """Say why it cannot be called here, or None where it can."""
        return None if self.path() else _absent(self.names[0], self.package)


def _absent(program: str, package: str) -> str:
    return f"{program} is not installed: apt-get install {package} (as root, `make test` does it)"


@dataclass(frozen=True, slots=True)
class Service:
    """How to run one service.

    program: the executable, looked up on PATH
    package: the Debian package that has it
    arguments: (port, directory) → command line after the program
    ready: (port) → whether it answers; may raise OSError while it does not yet
    url: format of the address, with `{port}`
    """

    name: str
    program: str
    package: str
    arguments: Callable[[int, Path], list[str]]
    ready: Callable[[int], bool]
    url: str

    def missing(self) -> str | None:
        """Say why the service cannot run here, or None where it can."""
        return None if shutil.which(self.program) else _absent(self.program, self.package)


@dataclass(slots=True)
class Running:
    """A service that is up."""

    service: Service
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """Where to reach it."""
        return self.service.url.format(port=self.port)

    def stop(self) -> None:
        """Ask the process group to end, then make it. Does nothing if it has ended."""
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process group at once, as a crash would."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            # The leader was started in a session of its own: its pid is the group's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(service: Service) -> Iterator[Running]:
    """Run `service` on a free port in a temporary directory until the block ends."""
    reason = service.missing()
    if reason is not None:
        raise ServiceError(reason)
    with tempfile.TemporaryDirectory(
        prefix=f"echelon-{service.name}-", ignore_cleanup_errors=True
    ) as directory:
        up = _start(service, Path(directory))
        try:
            yield up
        finally:
            up.stop()


def _start(service: Service, directory: Path) -> Running:
    """Start until it answers; another port each time, for one may be taken in between."""
    for attempt in range(1, ATTEMPTS + 1):
        port = free_port()
        log = directory / f"{service.name}-{attempt}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [service.program, *service.arguments(port, directory)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
            )
        up = Running(service, port, process, log)
        if _answers(up):
            return up
        ended = process.poll()
        up.kill()
        text = log.read_text(errors="replace")
        if ended is None or "in use" not in text.lower():
            break
    state = f"ended with {ended}" if ended is not None else f"silent for {START_SECONDS:.0f} s"
    raise ServiceError(f"{service.name} did not come up ({state}); its log ends:\n{text[-2000:]}")


def _answers(up: Running) -> bool:
    """Wait until the service answers; False when it ends or stays silent."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and up.process.poll() is None:
        with contextlib.suppress(OSError):
            # Checked again: the answer could be another process's on the same port.
            if up.service.ready(up.port) and up.process.poll() is None:
                return True
        time.sleep(0.02)
    return False


def _redis_arguments(port: int, directory: Path) -> list[str]:
    options = {
        "port": str(port),
        "bind": HOST,
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
    }
    return [part for key, value in options.items() for part in (f"--{key}", value)]


def _redis_ready(port: int) -> bool:
    with socket.create_connection((HOST, port), timeout=1) as link:
        link.sendall(b"PING\r\n")
        return link.recv(16) == b"+PONG\r\n"


REDIS = Service(
    name="redis",
    program="redis-server",
    package="redis-server",
    arguments=_redis_arguments,
    ready=_redis_ready,
    url="redis://127.0.0.1:{port}/0",
)

SERVICES = {service.name: service for service in (REDIS,)}

BROWSER = Program(names=("chromium", "google-chrome"), package="chromium")
"""Draws the reports' pages."""


def main(argv: list[str] | None = None) -> int:
    """Run one service by hand."""
    parser = argparse.ArgumentParser(description="Run a service on a free loopback port.")
    parser.add_argument("name", nargs="?", choices=sorted(SERVICES), help="which service")
    parser.add_argument("--list", action="store_true", help="say which services can run here")
    parser.add_argument("--missing", action="store_true", help="print missing Debian packages")
    args = parser.parse_args(argv)
    if args.missing:
        wanted: list[Service | Program] = [*SERVICES.values(), BROWSER]
        print(*sorted({one.package for one in wanted if one.missing()}))
        return 0
    if args.list:
        for name, service in sorted(SERVICES.items()):
            print(f"{name}: {service.missing() or 'ready to run'}")
        return 0
    if args.name is None:
        parser.error("name a service, or use --list")
    # Told to end, leave through the context manager, or the service would outlive us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with running(SERVICES[args.name]) as up:
            print(up.url, flush=True)
            ended = up.process.wait()
            print(f"{args.name} ended with {ended}", file=sys.stderr)
            return 1
    except ServiceError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
