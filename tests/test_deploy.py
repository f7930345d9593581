"""What is deployed: dashboards, rules, routes, the compose file and the image.

Neither compose nor the image can be run here: the one is held against the published schema, the
other is linted, and every command and file that they name is one there is. Prometheus and
Alertmanager are real ones, and so is what they read.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema_rs
import pytest
import typer
import yaml
from engines import Served, daily, payload
from needed import need

from echelon import __version__
from echelon.cli import app
from echelon.config.alerts import AlertsConfig, ChannelConfig
from echelon.config.live import LimitsConfig, LiveConfig
from echelon.config.load import load_section
from echelon.live.alerts import AlertWatcher, metrics_of
from echelon.live.brokers import BrokerError, OrderRequest, OrderStatus, open_broker
from echelon.live.control import ControlServer
from echelon.live.engine import LiveEngine
from echelon.live.feeds import open_feed
from echelon.live.journal import Journal
from echelon.live.monitor import Monitor
from echelon.live.summary import summarise
from echelon.monitoring.alerts import Alerter
from echelon.monitoring.metrics import LIVE, METRICS, Metrics
from scripts import dashboards
from scripts.dashboard_pictures import ask, draw, fill_in, watch
from scripts.services import (
    ALERTMANAGER,
    AMTOOL,
    COMPOSE_SCHEMA,
    HADOLINT,
    PROMETHEUS,
    PROMTOOL,
    free_port,
)

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
BOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def call(*command: str | Path) -> str:
    """What a program prints; it must end with 0."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def queries(board: Path) -> list[tuple[str, str]]:
    """(panel, query) of a committed dashboard."""
    panels = json.loads(board.read_text(encoding="utf-8"))["panels"]
    return [(p["title"], t["expr"]) for p in panels for t in p.get("targets", ())]


def metrics_in(text: str) -> set[str]:
    """The metrics that a query names, as the table of metrics does."""
    names = set(re.findall(r"\bechelon_(\w+)", text))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def alert_rules() -> dict[str, Mapping[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_committed_dashboards_are_what_the_script_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dashboards.main(["--check"]) == 0
    assert [board.stem for board in BOARDS] == ["execution", "experts", "live", "training"]
    monkeypatch.setattr(dashboards, "FOLDER", tmp_path)
    assert dashboards.main([]) == 0
    (tmp_path / "live.json").write_text("{}")
    assert dashboards.main(["--check"]) == 1
    assert "live.json is not what scripts/dashboards.py says" in capsys.readouterr().err


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_panels_have_titles_of_their_own_and_do_not_overlap(board: Path) -> None:
    panels = json.loads(board.read_text(encoding="utf-8"))["panels"]
    assert (
        len({panel["title"] for panel in panels}) == len({p["id"] for p in panels}) == len(panels)
    )
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert x + w <= 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_dashboards_show_every_metric_and_no_other() -> None:
    shown = set().union(*(metrics_in(expr) for board in BOARDS for _, expr in queries(board)))
    assert shown == {metric.name for metric in METRICS}


def test_rules_ask_for_metrics_that_are_measured() -> None:
    text = "".join(rule["expr"] for rule in alert_rules().values())
    assert metrics_in(text) <= {metric.name for metric in METRICS}
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    for rule in alert_rules().values():
        asked = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        known = set().union(*(labels[name] for name in metrics_in(rule["expr"])), {"instance"})
        assert asked <= known, rule["alert"]


def test_rules_fire_when_they_must_and_are_silent_otherwise() -> None:
    need(PROMTOOL)
    call("promtool", "check", "rules", RULES)
    assert "SUCCESS" in call("promtool", "test", "rules", RULES.with_name("rules_test.yml"))
    tree = yaml.safe_load(RULES.with_name("rules_test.yml").read_text(encoding="utf-8"))
    cases = [case for test in tree["tests"] for case in test["alert_rule_test"]]
    for name, rule in alert_rules().items():
        kinds = {bool(case.get("exp_alerts")) for case in cases if case["alertname"] == name}
        assert kinds == {True, False}, f"{name}: a time when it fires, and one when it does not"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_guide_lists_the_alerts_by_severity() -> None:
    text = (ROOT / "docs" / "guide" / "deploy.md").read_text(encoding="utf-8")
    for severity in ("critical", "warning", "info"):
        (cell,) = re.findall(rf"^\| {severity} \| ([^|]+) \|", text, re.MULTILINE)
        known = {n for n, rule in alert_rules().items() if rule["labels"]["severity"] == severity}
        assert set(re.findall(r"`(\w+)`", cell)) == known


def test_prometheus_reads_the_ports_that_compose_gives() -> None:
    need(PROMTOOL)
    file = DEPLOY / "prometheus" / "prometheus.yml"
    call("promtool", "check", "config", "--syntax-only", file)
    jobs = {job["job_name"]: job for job in yaml.safe_load(file.read_text())["scrape_configs"]}
    asked = {}
    for name in ("engine", "decisions", "training"):
        assert jobs[name]["authorization"] == {"credentials_file": "/run/secrets/echelon_token"}
        ((asked[name],),) = (config["targets"] for config in jobs[name]["static_configs"])
    overrides = re.findall(r"-o (\S+)", SERVICES["engine"]["command"])
    port = load_section(LiveConfig, None, overrides).metrics.port
    (training,) = re.findall(r"--metrics-port (\d+)", SERVICES["training"]["command"][0])
    assert asked["engine"] == f"127.0.0.1:{port}"
    assert asked["training"] == f"127.0.0.1:{training}"
    assert asked["decisions"] in SERVICES["decisions"]["environment"]["HEALTH_URL"]


def test_alerts_take_the_route_of_their_severity(tmp_path: Path) -> None:
    need(AMTOOL)
    text = (DEPLOY / "alertmanager" / "alertmanager.yml").read_text(encoding="utf-8")
    # Debian's Alertmanager is older than `url_file`.
    text = text.replace("url_file: /run/secrets/alert_webhook", "url: http://127.0.0.1:9/")
    (tmp_path / "routes.yml").write_text(text)
    assert "SUCCESS" in call("amtool", "check-config", tmp_path / "routes.yml")
    for severity in ("critical", "warning", "info"):
        config = f"--config.file={tmp_path}/routes.yml"
        routed = call("amtool", "config", "routes", "test", config, f"severity={severity}")
        assert routed.strip() == severity


def test_compose_file_fits_the_published_schema() -> None:
    need(COMPOSE_SCHEMA)
    schema = json.loads(COMPOSE_SCHEMA.path.read_text(encoding="utf-8"))
    jsonschema_rs.validator_for(schema).validate(COMPOSE)


def test_compose_publishes_on_loopback_only_and_holds_no_secret() -> None:
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port}"
    for secret in COMPOSE["secrets"].values():
        assert set(secret) == {"environment"}
    example = (DEPLOY / ".env.example").read_text(encoding="utf-8")
    for secret in COMPOSE["secrets"].values():
        assert f"\n{secret['environment']}=" in example
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "/deploy/.env" in ignored


def test_compose_pins_images_names_files_there_are_and_checks_health() -> None:
    once = ("training", "bars", "loopback")
    for name, service in SERVICES.items():
        assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+", service["image"]), name
        assert name in once or "healthcheck" in service or service["image"].startswith("echelon:")
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            known = source in COMPOSE["volumes"] or (DEPLOY / source).exists()
            assert known, f"{name} mounts {source}"
        for other in service.get("depends_on", ()):
            assert other in SERVICES

    assert SERVICES["engine"]["image"] == f"echelon:{__version__}"


def compose_commands() -> list[str]:
    """The command lines of Echelon in the compose file."""
    script = SERVICES["training"]["command"][0].replace("\\\n", " ")
    lines = re.findall(r"\bechelon ([^\n;&|]+)", script)
    return [*lines, *(SERVICES[name]["command"] for name in ("engine", "decisions"))]


def test_compose_runs_commands_there_are() -> None:
    assert len(compose_commands()) == 5
    for line in compose_commands():
        command: Any = typer.main.get_command(app)
        words = shlex.split(line)
        while words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        context = command.make_context(line, words)  # parses, and does not run
        assert context.args == [], f"{line}: words left over"
    assert (ROOT / "configs" / "demo-hierarchy.yaml").is_file()


@pytest.mark.parametrize("there", [0, 7])
def test_compose_sends_every_message_in_order_into_an_empty_topic_only(
    tmp_path: Path, there: int
) -> None:
    tools = tmp_path / "opt" / "kafka" / "bin"
    tools.mkdir(parents=True)
    sent = tmp_path / "sent"
    for name, body in {
        "topics": "true",
        "get-offsets": f"echo bars:0:{there}",
        "console-producer": f"cat > {sent}",
    }.items():
        (tools / f"kafka-{name}.sh").write_text(f"#!/bin/sh\n{body}\n")
        (tools / f"kafka-{name}.sh").chmod(0o755)
    messages = [{"type": "bar", "close": 1.5}, {"type": "close", "time": "2020-01-02"}] * 3
    text = "".join(f"{json.dumps(message)}\n" for message in messages)
    (tmp_path / "bars.jsonl").write_text(text)
    script = SERVICES["bars"]["command"][0].replace("$$", "$").replace("/data/", f"{tmp_path}/")
    call("env", "-C", tmp_path, "SECONDS_PER_BAR=0", "bash", "-ec", script)
    assert (sent.read_text() if sent.exists() else "") == ("" if there else text)


def test_image_is_linted_small_and_not_of_root() -> None:
    need(HADOLINT)
    file = DEPLOY / "Dockerfile"
    assert call(HADOLINT.path() or "", file) == ""
    text = file.read_text(encoding="utf-8")
    assert "\nUSER 10001:10001\n" in text
    assert "\nHEALTHCHECK " in text
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"python:3.11.14-slim-bookworm"}
    sent = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for words in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in words.split():
            assert f"!{name}" in sent
            assert (ROOT / name).exists()


TOKEN = "a-token-of-some-length"
HOOKS = {"TAKEN": "", "REFUSED": "/refused"}
"""Name of a webhook for alerts → its path."""
BARS = 40


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(URL, what was posted to it); what is posted to URL/refused is."""
    posted: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(400 if self.path == "/refused" else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", posted
        server.shutdown()
        thread.join()


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of Echelon that runs as long as the block."""
    process = subprocess.Popen([sys.executable, "-m", "echelon", *arguments])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def until(said: Any, seconds: float = 180.0) -> Any:
    """What a question is answered with, once the answer is something."""
    deadline = time.monotonic() + seconds
    while not (answer := said()):
        assert time.monotonic() < deadline, "no answer in time"
        time.sleep(0.2)
    return answer


def scraped(url: str, job: str, begin: float) -> bool:
    """Whether Prometheus has read a job."""
    answers = ask(url, f'up{{job="{job}"}}', begin, time.time())
    return any(value == 1.0 for series in answers for _, value in series.points)


def post_bars(port: int, body: Mapping[str, Any]) -> bool:
    """Whether the decision service has answered bars."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/bars", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        raise
    except OSError:  # it is starting
        return False


def trade(served: Served, journal: Path, port: int, since: date) -> None:
    """An engine that meets all there is to meet: refused bars, orders stopped, refused and lost."""
    channels = [ChannelConfig(kind="webhook", url=f"ECHELON_ALERT_{name}") for name in HOOKS]
    settings = LiveConfig(
        sync=False,
        limits=LimitsConfig(max_position=0.2),
        alerts=AlertsConfig(channels=tuple(channels), per_minute=600),
    )
    broker = open_broker("paper", served.bundle, journal, served.store, since, settings)
    submit, asked = broker.submit, iter(range(BARS * 10))

    def fail_now_and_then(orders: list[OrderRequest]) -> list[OrderStatus]:
        turn = next(asked)
        if turn == 2:
            raise BrokerError("the venue is not there")
        if turn == 6:
            return [OrderStatus(order.id, "rejected", 0.0, "no_margin") for order in orders]
        return submit(orders)

    broker.submit = fail_now_and_then  # type: ignore[method-assign]
    feed = open_feed("store", served.bundle, served.store)
    place = served.bundle, served.store, journal
    opened = LiveEngine.open(*place, feed, broker, settings, until=since)
    with opened as engine, Alerter(settings.alerts) as alert:
        metrics = Metrics(*LIVE)
        engine.watchers += [AlertWatcher(alert, None), Monitor(metrics, engine, "store")]
        metrics.refresh.append(metrics_of(metrics, alert, journal))
        with ControlServer(engine, TOKEN, metrics, port):
            for bar in range(1, BARS + 1):
                engine.run(bars=1)
                time.sleep(0.25)  # so that the numbers of several bars are read
                if bar == BARS - 8:
                    engine.halt("test", "it decides on, and sends nothing")
            with Journal.read(journal) as reading:
                assert not summarise(served.bundle, reading).differences
            time.sleep(1.0)


@pytest.mark.services
@pytest.mark.timeout(900)
def test_every_panel_has_data_of_a_real_engine_and_alerts_arrive(
    tmp_path: Path, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(PROMETHEUS, ALERTMANAGER)
    monkeypatch.setenv("ECHELON_TOKEN", TOKEN)
    served = daily(tmp_path / "served", bars_file, "HIERARCHY")
    since = served.world.times[served.rows(BARS).start - 1].astype("datetime64[D]").item()
    ports = {job: free_port() for job in ("engine", "decisions", "training")}
    engine = served.engine(BARS)
    engine.save(tmp_path / "state")  # the service goes on from it
    bars = next(served.bar_sets(engine))
    body = {"time": str(bars.time)[:10], "bars": payload(engine, bars)}
    begin = time.time()
    with webhook() as (hook, posted), watch(tmp_path, TOKEN, ports, hook, "250ms") as (up, _):
        for name, path in HOOKS.items():
            monkeypatch.setenv(f"ECHELON_ALERT_{name}", hook + path)
        train = ("train", "--config", str(served.run / "config.yaml"))
        place = ("--output-dir", str(tmp_path / "run"), "--metrics-port", str(ports["training"]))
        serve = ("serve", str(served.run.parent / "bundle"), "--store", str(served.store))
        with (
            command(*train, *place) as training,
            command(*serve, "--port", str(ports["decisions"]), "--state", str(tmp_path / "state")),
        ):
            until(lambda: scraped(up.url, "decisions", begin))  # an increase needs a zero before
            until(lambda: post_bars(ports["decisions"], body))
            trade(served, tmp_path / "live.db", ports["engine"], since)
            assert training.wait(300) == 0
        empty = []
        for board in BOARDS:
            for panel, expr in queries(board):
                answers = ask(up.url, fill_in(expr), begin, time.time())
                if not any(math.isfinite(v) for series in answers for _, v in series.points):
                    empty.append(f"{board.stem}: {panel}: {expr}")
        assert not empty
        (message,) = until(lambda: [m for m in posted if "EngineHalted" in json.dumps(m)])[:1]
        assert message["receiver"] == "critical"
        assert message["alerts"][0]["labels"]["severity"] == "critical"
        assert TOKEN not in json.dumps(posted)
        for board in BOARDS:
            span = (begin, time.time())
            draw(up.url, board.stem, span, span, tmp_path / f"{board.stem}.png")
            assert (tmp_path / f"{board.stem}.png").stat().st_size > 20_000
