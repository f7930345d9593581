"""The service runner and the isolation that every test runs under."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from needed import need

from scripts import services
from scripts.services import (
    BROWSER,
    REDIS,
    TANSU,
    Running,
    Service,
    ServiceError,
    free_port,
    running,
)

ROOT = Path(__file__).resolve().parent.parent


def client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=5)


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def soon_refuses(port: int) -> bool:
    """Whether nobody listens within seconds: the kernel closes a killed child's sockets later."""
    deadline = time.monotonic() + 10
    while not refuses(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_redis_of_the_session_answers_and_keeps_a_value(redis_url: str) -> None:
    with client(redis_url) as link:
        link.set("test_services", b"\x00\xff")
        assert link.get("test_services") == b"\x00\xff"
        assert link.config_get("save") == {"save": ""}, "it must not write to disk"


def test_redis_of_one_test_is_its_own_and_stops(redis_server: Running, redis_url: str) -> None:
    assert redis_server.url != redis_url
    redis_server.stop()
    assert redis_server.process.returncode == 0
    assert soon_refuses(redis_server.port)
    redis_server.stop()  # a second time does nothing


def test_killed_redis_is_gone_at_once(redis_server: Running) -> None:
    redis_server.kill()
    assert redis_server.process.returncode == -signal.SIGKILL
    assert soon_refuses(redis_server.port)


def test_running_leaves_no_directory_and_no_process_behind() -> None:
    need(REDIS)
    with running(REDIS) as up:
        directory = up.log.parent
        assert directory.is_dir()
    assert not directory.exists()
    assert up.process.returncode == 0


def scripted(code: str) -> Service:
    """A service whose program is Python running `code`, with the port as its argument."""
    return Service(
        name="scripted",
        program=sys.executable,
        package="python3",
        arguments=lambda port, _: ["-c", code, str(port)],
        ready=lambda port: not refuses(port),
        url="tcp://127.0.0.1:{port}",
    )


def test_missing_program_is_named_with_its_package() -> None:
    service = replace(REDIS, program="no-such-server", package="no-such-package")
    assert "apt-get install no-such-package" in (service.missing() or "")
    with pytest.raises(ServiceError, match="no-such-server is not installed"), running(service):
        pass


@pytest.mark.parametrize("service", [REDIS, TANSU])
def test_missing_service_skips_a_test_and_on_ci_fails_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = replace(service, program="no-such-server")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-server"):
        need(missing)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(
        pytest.fail.Exception, match=r"no-such-server.*missing service is a failure"
    ):
        need(missing)


def test_fetched_service_says_how_it_is_had() -> None:
    service = replace(TANSU, program="/nowhere/tansu")
    assert "tansu is not in .services/: python scripts/services.py --fetch" in (
        service.missing() or ""
    )


def test_a_stopped_service_starts_again_on_its_port() -> None:
    listen = (
        "import socket, sys, time\n"
        "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); time.sleep(60)\n"
    )
    with running(scripted(listen)) as up:
        port = up.port
        up.kill()
        assert soon_refuses(port)
        up.restart()
        assert up.port == port
        assert not refuses(port)


def test_a_program_may_go_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"google-chrome": "/somewhere/google-chrome"}
    monkeypatch.setattr(shutil, "which", there.get)
    assert BROWSER.path() == "/somewhere/google-chrome"
    assert BROWSER.missing() is None
    there.clear()
    assert "chromium is not installed: apt-get install chromium" in (BROWSER.missing() or "")


def test_service_that_dies_shows_the_end_of_its_log() -> None:
    service = scripted("import sys; sys.exit('bad option --frobnicate')")
    with (
        pytest.raises(ServiceError, match=r"ended with 1(?s:.*)bad option --frobnicate"),
        running(service),
    ):
        pass


def test_silent_service_is_given_up_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "START_SECONDS", 0.3)
    with (
        pytest.raises(ServiceError, match=r"did not come up \(silent for"),
        running(scripted("import time; time.sleep(60)")),
    ):
        pass


def test_port_taken_in_between_leads_to_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listen = (
        "import socket, sys, time\n"
        "s = socket.socket()\n"
        "try: s.bind(('127.0.0.1', int(sys.argv[1])))\n"
        "except OSError as e: sys.exit(str(e))\n"
        "s.listen(); time.sleep(60)\n"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(services, "free_port", lambda: next(ports))
        with running(scripted(listen)) as up:
            assert up.port != taken.getsockname()[1]
            assert up.log.name == "scripted-2.log"


def test_stubborn_service_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "STOP_SECONDS", 0.3)
    code = (
        "import os, signal, socket, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen()\n"
        "os.fork(); time.sleep(60)\n"
    )
    with running(scripted(code)) as up:
        pass
    assert up.process.returncode == -signal.SIGKILL
    assert soon_refuses(up.port), "a child still listens"


def test_script_prints_the_url_and_takes_its_service_along() -> None:
    need(REDIS)
    script = subprocess.Popen(
        [sys.executable, "scripts/services.py", "redis"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert script.stdout is not None
    with script, client(script.stdout.readline().decode().strip()) as link:
        assert link.ping()
        script.terminate()
        assert script.wait(10) == 143
        with pytest.raises(redis.ConnectionError):
            link.ping()


def test_script_lists_services_and_missing_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert services.main(["--missing"]) == 0
    assert capsys.readouterr().out == "chromium prometheus prometheus-alertmanager redis-server\n"
    assert services.main(["--list"]) == 0
    assert "redis: redis-server is not installed" in capsys.readouterr().out
    assert services.main(["redis"]) == 1
    assert "redis-server is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["192.0.2.1", "example.invalid", "8.8.8.8"])
def test_connections_that_leave_the_machine_fail_the_test(address: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="tests have no network") as caught:
        socket.create_connection((address, 80), timeout=1)
    assert not isinstance(caught.value, Exception), "a careless `except Exception` would hide it"


def test_bare_sockets_cannot_leave_the_machine_either() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram,
        pytest.raises(pytest.fail.Exception, match="192\\.0\\.2\\.1"),
    ):
        datagram.sendto(b"x", ("192.0.2.1", 53))
    with (
        socket.socket(socket.AF_INET6) as stream,
        pytest.raises(pytest.fail.Exception, match="2001:db8::1"),
    ):
        stream.connect_ex(("2001:db8::1", 80))


def test_tests_run_in_a_clean_environment_with_few_threads() -> None:
    import polars as pl

    assert pl.thread_pool_size() <= max(2, int(os.environ["POLARS_MAX_THREADS"]))
    assert not [n for n in os.environ if n.startswith("ECHELON_") or n == "TUSHARE_TOKEN"]
