"""The decision service: the engine over HTTP, with a token; nothing that is sent breaks it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import torch
from engines import Served, daily, payload
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from test_metrics import read_page

from echelon.files import exclusive_lock
from echelon.serving.engine import DecisionEngine
from echelon.serving.service import MAX_BODY, create_app

TOKEN = "a-token-of-some-length"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Iterator[Served]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield daily(tmp_path_factory.mktemp("service"), bars_file, "HIERARCHY")
    torch.set_num_threads(before)


def _bodies(served: Served, engine: DecisionEngine, count: int) -> list[dict[str, Any]]:
    return [
        {"time": str(bars.time)[:10], "bars": payload(engine, bars)}
        for bars in served.bar_sets(engine, count)
    ]


@pytest.fixture
def engine(served: Served, tmp_path: Path) -> DecisionEngine:
    return served.engine(6, tmp_path / "state")


@pytest.fixture
def client(engine: DecisionEngine) -> TestClient:
    return TestClient(create_app(engine, TOKEN), raise_server_exceptions=False)


def test_bars_are_answered_as_the_engine_decides(
    served: Served, engine: DecisionEngine, client: TestClient
) -> None:
    bodies = _bodies(served, engine, 4)
    twin = served.engine(6)
    for body, bars in zip(bodies, served.bar_sets(twin, 4), strict=True):
        answer = client.post("/v1/bars", json=body, headers=AUTH)
        assert answer.status_code == 200, answer.text
        assert answer.json() == json.loads(json.dumps(twin.push(bars).to_dict()))
        assert client.get("/v1/decision", headers=AUTH).json() == answer.json()
    state = client.get("/v1/state", headers=AUTH).json()
    assert state["time"] == str(engine.time)
    assert state["bundle"] == served.bundle.id


def test_same_bars_again_get_the_same_answer_and_others_a_conflict(
    served: Served, engine: DecisionEngine, client: TestClient
) -> None:
    first, second = _bodies(served, engine, 2)
    answer = client.post("/v1/bars", json=first, headers=AUTH)
    again = client.post("/v1/bars", json=first, headers=AUTH)
    assert (answer.status_code, again.status_code) == (200, 200)
    assert answer.json() == again.json()
    other = {**first, "bars": [{**bar, "close": bar["close"] * 1.001} for bar in first["bars"]]}
    conflict = client.post("/v1/bars", json=other, headers=AUTH)
    assert conflict.status_code == 409
    assert "other bars" in conflict.json()["error"]
    assert client.post("/v1/bars", json=second, headers=AUTH).status_code == 200
    late = client.post("/v1/bars", json=first, headers=AUTH)
    assert late.status_code == 409
    assert "not after the last" in late.json()["error"]


def test_restart_goes_on_behind_the_last_answer(
    served: Served, engine: DecisionEngine, client: TestClient, tmp_path: Path
) -> None:
    bodies = _bodies(served, engine, 4)
    expected = [client.post("/v1/bars", json=body, headers=AUTH).json() for body in bodies]
    other = served.engine(6, tmp_path / "other")
    answers = []
    for body in bodies:
        service = TestClient(create_app(other, TOKEN))
        answers.append(service.post("/v1/bars", json=body, headers=AUTH).json())
        other = DecisionEngine.restore(served.bundle, tmp_path / "other")
        again = TestClient(create_app(other, TOKEN)).post("/v1/bars", json=body, headers=AUTH)
        assert again.json() == answers[-1]
    assert answers == expected


def test_nothing_is_answered_without_the_token(client: TestClient) -> None:
    wrong = {"Authorization": "Bearer wrong"}
    for headers in ({}, wrong, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "Bearer ü"}):
        encoded = {k: v.encode() for k, v in headers.items()}
        for method, path in (("POST", "/v1/bars"), ("GET", "/v1/decision"), ("GET", "/v1/state")):
            answer = client.request(method, path, headers=encoded, json={})
            assert answer.status_code == 401, (method, path, headers)
            assert "token" in answer.json()["error"]
    assert client.get("/healthz").json() == {"status": "ok"}


def test_bad_requests_are_refused_with_a_reason_and_change_nothing(
    served: Served, engine: DecisionEngine, client: TestClient
) -> None:
    body = _bodies(served, engine, 1)[0]
    bar = body["bars"][0]
    for change, status, part in (
        ({"time": "not a time"}, 422, "is no time"),
        ({"time": "1999-01-04"}, 409, "not after the last"),
        ({"bars": [{**bar, "close": -1.0}]}, 422, "greater than 0"),
        ({"bars": [{**bar, "symbol": "NOPE"}]}, 422, "not in the bundle's universe"),
        ({"bars": [bar, bar]}, 422, "given twice"),
        ({"bars": [{**bar, "extra": 1}]}, 422, "extra"),
        ({"account": {"cash": -5.0}}, 422, "cash"),
        ({"account": {"cash": 5.0, "positions": {"NOPE": 1.0}}}, 422, "'NOPE'"),
        ({"benchmark": 100.0}, 422, "benchmark"),
        ({"benchmark": 1e300}, 422, "benchmark"),
        ({"time": "2016-06-29T20:00-04:00"}, 422, "is no time"),
        ({"time": "300000-01-01"}, 422, "is no time"),
        ({"time": "9999-12-31"}, 422, "calendar"),
        ({"bars": [{**bar, "close": True}]}, 422, "valid number"),
        ({"bars": [{**bar, "close": "1e2"}]}, 422, "valid number"),
    ):
        answer = client.post("/v1/bars", json={**body, **change}, headers=AUTH)
        assert answer.status_code == status, answer.text
        assert part in answer.text
    for data in (b"", b"{", b"[]", b'{"time": "2015-01-05", "bars": [NaN]}', b"\xff\xfe"):
        answer = client.post("/v1/bars", content=data, headers=AUTH)
        assert answer.status_code in (400, 422), data
        assert answer.json()["error"]
    assert client.get("/nowhere", headers=AUTH).json()["error"] == "Not Found"
    assert client.get("/v1/decision", headers=AUTH).status_code == 404
    assert client.post("/v1/bars", json=body, headers=AUTH).status_code == 200


def test_bar_whose_state_cannot_be_written_is_not_answered_until_a_restart(
    served: Served, tmp_path: Path
) -> None:
    place = tmp_path / "states"
    engine = served.engine(6, place / "state")
    service = TestClient(create_app(engine, TOKEN), raise_server_exceptions=False)
    first, second = _bodies(served, engine, 2)
    assert service.post("/v1/bars", json=first, headers=AUTH).status_code == 200
    place.rename(tmp_path / "away")
    place.write_text("a file where the directory was")
    for _ in range(2):
        refused = service.post("/v1/bars", json=second, headers=AUTH)
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]
    again = DecisionEngine.restore(served.bundle, tmp_path / "away" / "state")
    expected = TestClient(create_app(again, TOKEN)).post("/v1/bars", json=second, headers=AUTH)
    assert expected.status_code == 200


def test_command_refuses_what_it_cannot_serve(
    served: Served, shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = str(served.bundle.path)
    monkeypatch.delenv("ECHELON_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = str(busy.getsockname()[1])
        for words, token, code, message in (
            ((), None, 3, "ECHELON_TOKEN is not set"),
            ((), "short", 2, "at least 16 characters"),
            ((), "ü" * 20, 2, "ASCII"),
            (("--host", "0.0.0.0"), TOKEN, 2, "--allow-remote"),
            (("--host", "0.0.0.0", "--allow-remote", "--no-token"), None, 2, "Set a token"),
            (("--port", taken), TOKEN, 2, "cannot listen there"),
            (("--state", f"{bundle}/engine.state"), TOKEN, 2, "inside of the bundle"),
        ):
            if token is None:
                monkeypatch.delenv("ECHELON_TOKEN", raising=False)
            else:
                monkeypatch.setenv("ECHELON_TOKEN", token)
            ended, _, err = shell("serve", bundle, *words, columns=2000)
            assert (ended, message in err) == (code, True), err
        file = tmp_path / "state"
        with exclusive_lock(tmp_path / "state.lock", "the state"):
            ended, _, err = shell("serve", bundle, "--state", str(file), columns=2000)
        assert ended == 5
        assert "written by another process" in err


def test_large_body_is_not_read(client: TestClient) -> None:
    headers = {**AUTH, "content-length": str(MAX_BODY + 1)}
    answer = client.post("/v1/bars", content=b"{}", headers=headers)
    assert answer.status_code == 413


def test_schema_finds_no_server_error(served: Served, tmp_path: Path) -> None:
    app = create_app(served.engine(6, tmp_path / "state"), TOKEN)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=60,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            nonlocal tried
            case.call_and_validate(headers=AUTH, checks=[not_a_server_error])
            tried += 1

        call()
    assert tried >= 100


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(url: str, token: str | None = None) -> tuple[int, dict[str, Any]]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as ok:
            return ok.status, json.load(ok)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_command_serves_on_loopback_only_and_the_example_client_is_answered(
    served: Served, tmp_path: Path
) -> None:
    port, root = _free_port(), Path(__file__).parents[1]
    environment = os.environ | {"ECHELON_TOKEN": TOKEN}
    command = [sys.executable, "-m", "echelon", "serve", str(served.bundle.path)]
    command += ["--port", str(port), "--state", str(tmp_path / "state")]
    engine = served.engine(6, tmp_path / "state")
    first, second = _bodies(served, engine, 2)
    before = engine.answer(next(served.bar_sets(engine)))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as service:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(300):
                try:
                    assert _get(f"{url}/healthz") == (200, {"status": "ok"})
                    break
                except (OSError, urllib.error.URLError):
                    time.sleep(0.1)
            assert _get(f"{url}/v1/state")[0] == 401
            assert _get(f"{url}/v1/decision", TOKEN) == (200, json.loads(json.dumps(before)))
            listening = Path("/proc/net/tcp").read_text(encoding="utf-8")
            assert f"0100007F:{port:04X}" in listening
            assert f"00000000:{port:04X}" not in listening
            file = tmp_path / "bars.json"
            file.write_text(json.dumps(second), encoding="utf-8")
            script = root / "examples" / "decision_client.py"
            code = (
                f"import json, runpy; client = runpy.run_path({str(script)!r}); "
                f"bars = json.load(open({str(file)!r})); "
                f"print(len(client['decide'](bars, {url!r})['orders']))"
            )
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            assert int(done.stdout) >= 0
            assert _get(f"{url}/v1/decision", TOKEN)[1]["time"].startswith(second["time"])
        finally:
            service.send_signal(signal.SIGINT)
            said = service.communicate(timeout=30)[0]
    assert f"on http://127.0.0.1:{port}" in said
    assert TOKEN not in said
    assert first["time"] < second["time"]


def test_prometheus_reads_requests_and_how_long_decisions_take(
    served: Served, engine: DecisionEngine, client: TestClient
) -> None:
    (body,) = _bodies(served, engine, 1)
    assert client.get("/metrics").status_code == 401
    assert client.post("/v1/bars", json=body, headers=AUTH).status_code == 200
    assert client.post("/v1/bars", json={"time": "no"}, headers=AUTH).status_code == 422
    assert client.post("/v1/bars", content=b"x" * (MAX_BODY + 1)).status_code == 413
    answer = client.get("/metrics", headers=AUTH)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    page = read_page(answer.content)
    requests = {key[1]: count for key, count in page.items() if key[0] == "service_requests_total"}
    assert requests == {"200": 1.0, "401": 1.0, "413": 1.0, "422": 1.0}
    assert page["service_decision_seconds_count",] == 1.0
