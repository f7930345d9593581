"""The dashboards as pictures: what a real Prometheus answers to their queries, drawn by matplotlib.

    python -m scripts.dashboard_pictures --output-dir docs/img

It needs Prometheus and Alertmanager (Debian packages), no Grafana and no container:

1. Prometheus and Alertmanager run with the files of deploy/, on free loopback ports.
2. The demonstration's hierarchy is trained and exported while Prometheus reads its metrics.
3. The engine trades the year 2022 on paper, a bar set every few tenths of a second, and is stopped
   once for the summary of a day; the decision service answers the same bars.
4. Every query of every dashboard is asked of Prometheus, and its answer is drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, PercentFormatter

from echelon.serving.bundle import load_bundle
from echelon.serving.engine import DecisionEngine
from scripts.dashboards import DASHBOARDS, FOLDER
from scripts.services import ROOT, Running, alertmanager, free_port, prometheus, running

DEPLOY = ROOT / "deploy"
CONFIG, BEGIN = "configs/demo-hierarchy.yaml", "2021-12-31"
SHORT = tuple(
    f"-otrain.{setting}"
    for setting in (
        "total_env_steps=80000",
        "log_interval_steps=2560",
        "validate_every_steps=12800",
        "checkpoint_every_steps=80000",
    )
)
"""Half of the demonstration's training, and more points of it."""
SPEED = 86_400.0 * 3
"""Of the market's time in the demonstration: three days a second."""
Span = tuple[float, float]
Points = list[Span]


class Series(NamedTuple):
    """One line of an answer: its labels, and (time, value) of each point."""

    labels: dict[str, str]
    points: Points


def fill_in(expr: str, window: str = "1m") -> str:
    """A query as Grafana sends it where everything is chosen."""
    expr = expr.replace("$window", window).replace("$__range", "1h")
    return re.sub(r"\$(engine|run|seed)\b", ".*", expr)


def ask(url: str, expr: str, begin: float, end: float, points: int = 240) -> list[Series]:
    """What Prometheus answers over a time."""
    step = max(0.2, (end - begin) / points)
    query = {"query": expr, "start": f"{begin:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
    address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        rows = json.load(answer)["data"]["result"]
    return [
        Series(row["metric"], [(at, float(value)) for at, value in row["values"]]) for row in rows
    ]


@contextmanager
def watch(
    directory: Path, token: str, ports: Mapping[str, int], webhook: str, every: str = "1s"
) -> Iterator[tuple[Running, Running]]:
    """Prometheus and Alertmanager with the files of deploy/, but for where everything is.

    ports: job → port of this machine that it reads
    """
    (directory / "token").write_text(token, encoding="utf-8")
    routes = (DEPLOY / "alertmanager" / "alertmanager.yml").read_text(encoding="utf-8")
    routes = routes.replace("url_file: /run/secrets/alert_webhook", f'url: "{webhook}"')
    (directory / "alertmanager.yml").write_text(routes, encoding="utf-8")
    with running(alertmanager(directory / "alertmanager.yml")) as alerts:
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
        text = text.replace("/run/secrets/echelon_token", str(directory / "token"))
        text = text.replace("rules.yml", str(DEPLOY / "prometheus" / "rules.yml"))
        text = text.replace("alertmanager:9093", f"127.0.0.1:{alerts.port}")
        text = text.replace("_interval: 5s", f"_interval: {every}")
        for job, port in ports.items():
            place = re.compile(rf"(job_name: {job}\b.*?127\.0\.0\.1:)\d+", re.DOTALL)
            text = place.sub(rf"\g<1>{port}", text, count=1)
        (directory / "prometheus.yml").write_text(text, encoding="utf-8")
        with running(prometheus(directory / "prometheus.yml")) as up:
            yield up, alerts


def draw(url: str, name: str, live: Span, training: Span, file: Path) -> None:
    """One dashboard, from the committed file, of these times; the axes have minutes."""
    tree = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in tree["panels"])
    with mpl.rc_context({"font.size": 7, "axes.titlesize": 8, "axes.titlelocation": "left"}):
        figure = Figure(figsize=(13, 0.26 * rows))
        grid = figure.add_gridspec(rows, 24, left=0.05, right=0.995, top=0.985, bottom=0.02)
        for panel in tree["panels"]:
            at = panel["gridPos"]
            if panel["type"] == "row":
                place = figure.add_subplot(grid[at["y"], :])
                place.text(0, 0.2, panel["title"], fontsize=9, weight="bold", color="#334")
                place.axis("off")
                continue
            low, right = at["y"] + at["h"] - (2 if at["h"] > 4 else 1), at["x"] + at["w"]
            place = figure.add_subplot(grid[at["y"] + 1 : low, at["x"] : right - 1])
            place.set_title(panel["title"])
            of_training = "echelon_training" in panel["targets"][0]["expr"]
            _draw_panel(place, panel, url, *(training if of_training else live))
        figure.savefig(file, dpi=110)


def _draw_panel(place: Axes, panel: Mapping[str, Any], url: str, begin: float, end: float) -> None:
    lines: list[tuple[str, Points]] = []
    for target in panel["targets"]:
        for series in ask(url, fill_in(target["expr"]), begin, end):
            label = target["legendFormat"]
            for name, value in series.labels.items():
                label = label.replace(f"{{{{{name}}}}}", value)
            lines.append((label, series.points))
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if panel["type"] == "stat":
        shown = [(label, points[-1]) for label, points in lines]
        last = max((at for _, (at, _) in shown), default=end)
        texts = [_text(panel, label, value, unit) for label, (at, value) in shown if at == last]
        size = 10 if len(texts) < 2 else 8
        place.text(0, 0.5, "\n".join(texts), fontsize=size, va="center", color="#1a6")
        place.axis("off")
        return
    if not lines:
        place.text(0.5, 0.5, "no data", transform=place.transAxes, ha="center", color="#999")
    stacked = "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})
    height = np.zeros(1)
    for k, (label, points) in enumerate(lines):
        times = np.array([(at - begin) / 60.0 for at, _ in points])
        values = np.array([value for _, value in points])
        if panel["type"] == "state-timeline":
            on = np.where(values > 0, float(k), np.nan)
            place.plot(times, np.full(len(times), float(k)), color="#ddd", lw=5)
            place.plot(times, on, color=f"C{k % 10}", lw=5, solid_capstyle="butt")
        elif stacked and len(points) == len(lines[0][1]):
            place.fill_between(times, height, height + values, label=label, lw=0)
            height = height + values
        else:
            place.plot(times, values, lw=1, label=label, color=f"C{k % 10}")
    if panel["type"] == "state-timeline":
        for k, (label, _) in enumerate(lines):
            place.text(0.0, k, f" {label}", fontsize=6, va="center")
        place.set_yticks([])
        place.set_ylim(-0.7, len(lines) - 0.3)
    else:
        _scale(place, panel["fieldConfig"]["defaults"]["unit"])
        if 0 < len(lines) <= 8:
            place.legend(loc="upper left", fontsize=6, framealpha=0.6, ncols=2)
    place.set_xlim(0.0, (end - begin) / 60.0)
    place.grid(color="#eee")


def _scale(place: Axes, unit: str) -> None:
    """Numbers of an axis as people read them; what hardly moves is shown as what it is."""
    low, high = place.get_ylim()
    if high - low < 0.01 * max(abs(low), abs(high)):
        place.set_ylim(low - 0.05 * abs(low), high + 0.05 * abs(high))
    engineering = EngFormatter("s" if unit == "s" else "B" if unit == "bytes" else "", sep="")
    plain = FuncFormatter(lambda value, _: f"{value:.4g}")
    large = unit in ("s", "bytes") or max(abs(low), abs(high)) >= 10_000
    percent = PercentFormatter(1.0)
    place.yaxis.set_major_formatter(
        percent if unit == "percentunit" else engineering if large else plain
    )


def _text(panel: Mapping[str, Any], label: str, value: float, unit: str) -> str:
    """What a panel of one number says."""
    mode = panel["options"]["textMode"]
    if mode == "name":
        return label
    if unit == "dateTimeAsIso":
        said = f"{datetime.fromtimestamp(value / 1000, UTC):%Y-%m-%d %H:%M}"
    else:
        said = f"{value:.1%}" if unit == "percentunit" else f"{value:,.0f}"
    return f"{label} {said}" if mode == "value_and_name" else said


def demonstrate(directory: Path, pictures: Path) -> None:
    """Steps 1 to 4."""
    ports = {job: free_port() for job in ("engine", "decisions", "training")}
    os.environ["ECHELON_TOKEN"] = token = secrets.token_hex(16)
    with watch(directory, token, ports, "http://127.0.0.1:9/") as (up, _):
        begin = time.time()
        metrics = ("--metrics-port", str(ports["training"]), f"-odata.store={directory / 'store'}")
        _run("train", "--config", CONFIG, "--output-dir", str(directory / "run"), *SHORT, *metrics)
        trained = ask(up.url, "echelon_training_steps", begin, time.time())[0].points[-1][0]
        _run("export", str(directory / "run"), "--seed=42", f"--output-dir={directory / 'bundle'}")
        started = time.time()
        _trade(directory, token, ports)
        end = time.time() - 1.0
        pictures.mkdir(parents=True, exist_ok=True)
        for dashboard in DASHBOARDS:
            name = dashboard.uid.removeprefix("echelon-")
            file = pictures / f"dashboard-{name}.png"
            draw(up.url, name, (started, end), (begin, trained), file)


def _trade(directory: Path, token: str, ports: Mapping[str, int]) -> None:
    """Step 3."""
    bundle, store, state = (directory / name for name in ("bundle", "store", "state"))
    journal = ("--bundle", str(bundle), "--journal", str(directory / "live.db"))
    about = (f"--store={store}", f"--from={BEGIN}")
    bars = directory / "bars.jsonl"
    _run("live", "publish", *journal[:2], *about, "--to", f"file:{bars}")
    day_before = date.fromisoformat(BEGIN) - timedelta(days=1)
    DecisionEngine.from_store(load_bundle(bundle), store, until=day_before).save(state)
    port = ports["decisions"]
    paced = (f"--feed=store?speed={SPEED:.0f}", f"-ometrics.port={ports['engine']}")
    engine = ("live", "run", *journal, *about, *paced)
    serve = ("serve", str(bundle), f"--store={store}", f"--state={state}", f"--port={port}")
    with _started(*serve):
        _run(*engine, "--bars=80")
        _run("live", "summary", *journal)
        with _started(*engine) as live:
            for body in _read_bars(bars):
                if live.poll() is not None:
                    break
                _post(f"http://127.0.0.1:{port}/v1/bars", token, body)
            live.wait()


def _run(*arguments: str) -> None:
    """A command of Echelon, to its end."""
    with _started(*arguments) as process:
        if process.wait():
            raise SystemExit(f"echelon {arguments[0]} ended with {process.returncode}.")


@contextmanager
def _started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of Echelon, until the block ends."""
    print(f"$ echelon {' '.join(arguments)}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "echelon", *arguments])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _read_bars(messages: Path) -> Iterator[dict[str, Any]]:
    """The bars of each time, as the decision service takes them."""
    bars: list[dict[str, Any]] = []
    for line in messages.read_text(encoding="utf-8").splitlines():
        message = json.loads(line)
        if message.pop("type") == "bar":
            bars.append({k: v for k, v in message.items() if k not in ("schema", "time")})
        elif bars:
            yield {"time": message["time"], "bars": bars}
            bars = []


def _post(url: str, token: str, body: Mapping[str, Any]) -> None:
    """Send bars, and wait a little; a service that starts is asked again."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    for _ in range(200):
        time.sleep(0.3)
        try:
            urllib.request.urlopen(request, timeout=30).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            continue
    raise SystemExit(f"{url} does not answer.")


def main(argv: list[str] | None = None) -> int:
    """Run the demonstration and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output-dir", type=Path, default=ROOT / "docs" / "img")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="echelon-dashboards-") as directory:
        demonstrate(Path(directory), args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
