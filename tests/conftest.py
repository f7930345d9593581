"""What every test runs under: few threads, a clean environment, no network, real services.

- Thread limits are set before anything heavy is imported.
- Variables of the developer's shell that change what Echelon does are removed.
- A connection to anything but this machine fails the test, whatever the code under test catches.
- Services (Redis, Kafka) are real processes on free loopback ports; where one is not installed, the
  tests that need it are skipped and say why. On CI (the variable CI is set) they fail instead.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from needed import need

from scripts.services import (
    MOTO,
    REDIS,
    TANSU,
    Running,
    running,
    running_durable_kafka,
)

ROOT = Path(__file__).resolve().parent.parent

# Two cores are what the tests may count on; numpy, numba, polars and torch read these on import.
THREADS = (
    "POLARS_MAX_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
# Secrets and settings of the developer, and what makes rich and typer colour or wrap output.
FOREIGN = ("TUSHARE_TOKEN", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS")

for name in THREADS:
    os.environ.setdefault(name, "2")
os.environ["MPLBACKEND"] = "Agg"
for name in list(os.environ):
    if name.startswith("ECHELON_") or name in FOREIGN:
        del os.environ[name]

# On CI the same examples every time; at a desk new ones, and failures are remembered.
settings.register_profile("desk", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--services",
        choices=("all", "none", "only"),
        default="all",
        help="whether to run the tests marked `services`, which want the machine for themselves",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--services")
    if wanted == "all":
        return
    kept = [i for i in items if (i.get_closest_marker("services") is None) == (wanted == "none")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _is_loopback(host: object) -> bool:
    if host in (None, "", "localhost", b"localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).split("%")[0]).is_loopback
    except ValueError:
        return False


def _refuse_unless_loopback(host: object) -> None:
    if not _is_loopback(host):
        # Not an Exception: code that retries or falls back on errors must not hide it.
        pytest.fail(f"tests have no network, but the code under test reached for {host!r}")


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Fail on name look-ups and connections that would leave this machine."""
    real = {n: getattr(socket.socket, n) for n in ("connect", "connect_ex", "sendto")}
    getaddrinfo = socket.getaddrinfo

    def guarded(name: str) -> Any:
        def call(self: socket.socket, *args: Any) -> Any:
            address = args[-1]
            if self.family in (socket.AF_INET, socket.AF_INET6):
                _refuse_unless_loopback(address[0])
            return real[name](self, *args)

        return call

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_unless_loopback(host)
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(socket.socket, name, guarded(name))
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of real market data next to the project; skips where it is absent."""
    directory = ROOT.parent / "shared" / "data"
    if not directory.is_dir():
        pytest.skip("no real data next to the project: ../shared/data does not exist")
    return directory


@pytest.fixture(scope="session")
def bars_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file of two years of made-up bars for the 16 symbols of configs/qtmrl.yaml."""
    from markets import write_qtmrl_parquet  # after the thread limits above

    return write_qtmrl_parquet(tmp_path_factory.mktemp("bars") / "bars.parquet")


@pytest.fixture
def shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The command line, in a directory of its own: see `shells.Shell`."""
    from shells import Shell  # after the thread limits above

    monkeypatch.chdir(tmp_path)
    return Shell(capsys, monkeypatch)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a Redis shared by the whole session; use keys of your own."""
    need(REDIS)
    with running(REDIS) as up:
        yield up.url


@pytest.fixture
def redis_server() -> Iterator[Running]:
    """A Redis of one test's own, to fill, `stop()` or `kill()`."""
    need(REDIS)
    with running(REDIS) as up:
        yield up


@pytest.fixture(scope="session")
def kafka() -> Iterator[Running]:
    """A Kafka broker shared by the whole session; use topics of your own."""
    need(TANSU)
    with running(TANSU) as up:
        yield up


@pytest.fixture
def durable_kafka() -> Iterator[Running]:
    """A Kafka broker of one test's own that loses nothing, to `kill()` and `restart()`."""
    need(TANSU, MOTO)
    with running_durable_kafka() as up:
        yield up
