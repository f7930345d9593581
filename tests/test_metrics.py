"""Metrics: one table, right numbers, and an engine that no scraper can disturb."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from bundles import trained_run
from prometheus_client.parser import text_string_to_metric_families
from shells import Shell, tiny
from test_walkforward import FOLDS, MONTHS

from echelon.cli import batch
from echelon.cli import train as train_command
from echelon.errors import DamagedError
from echelon.live.http import Server, metrics_route
from echelon.monitoring.metrics import LIVE, METRICS, Metrics
from echelon.monitoring.training import training_metrics
from echelon.runs.metrics import LOG, LogTail, MetricLog, read_metrics

TOKEN = "a-token-of-enough-letters"


def read_page(page: bytes) -> dict[tuple[str, ...], float]:
    """(name without the prefix, values of the labels by name of label) → value."""
    return {
        (sample.name.removeprefix("echelon_"), *(v for _, v in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_table_has_each_name_once_and_by_prometheus_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]+[a-z]", metric.name), metric
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric
        assert metric.text.endswith("."), metric
        assert not {"le", "quantile", "job", "instance"} & set(metric.labels), metric


def test_every_metric_is_exported_as_the_table_says() -> None:
    metrics = Metrics(*LIVE, "training", "service")
    for metric in METRICS:
        labels = [f"a {name}" for name in metric.labels]
        if metric.kind == "histogram":
            metrics.observe(metric.name, 3.0)
        elif metric.kind == "counter":
            metrics.add(metric.name, *labels)
        else:
            metrics.set(metric.name, 3.0, *labels)
    families = {
        (f.name, f.type): f for f in text_string_to_metric_families(metrics.render().decode())
    }
    for metric in METRICS:
        family = families[f"echelon_{metric.name.removesuffix('_total')}", metric.kind]
        assert family.documentation == metric.text
        expected = {"counter": 1.0, "gauge": 3.0, "histogram": 1.0}[metric.kind]
        last = family.samples[-1]
        assert set(last.labels) - {"le"} == set(metric.labels)
        assert last.value == expected or last.name.endswith("_sum")
    assert len(families) == len(METRICS)


def test_gauge_without_a_value_is_not_there_and_a_counter_begins_at_zero() -> None:
    page = read_page(Metrics("live").render())
    assert page["live_bars_total",] == 0.0
    assert ("live_equity",) not in page
    assert not [key for key in page if not key[0].startswith("live_")]


def test_of_a_gauge_by_label_only_what_holds_now_has_a_value() -> None:
    metrics = Metrics("live")
    metrics.show("live_orders", {"accepted": 2.0, "unknown": 1.0})
    metrics.show("live_orders", {"accepted": 1.0})
    page = read_page(metrics.render())
    assert page["live_orders", "accepted"] == 1.0
    assert page["live_orders", "unknown"] == 0.0


def test_total_that_is_counted_elsewhere_is_reached_and_never_falls() -> None:
    metrics = Metrics("live")
    for total in (2.0, 5.0, 5.0, 1.0, 2.0):  # 1: counted anew there
        metrics.reach("live_errors_total", total, "venue")
    assert read_page(metrics.render())["live_errors_total", "venue"] == 6.0


def test_values_that_nobody_scrapes_are_taken_one_by_one_and_none_is_lost() -> None:
    metrics = Metrics("live")
    for k in range(700):
        metrics.observe("live_decision_seconds", 0.001)
        assert len(metrics._observed) == min(k + 1, 500)
    assert read_page(metrics.render())["live_decision_seconds_count",] == 700.0


def test_unknown_metric_is_an_error() -> None:
    with pytest.raises(KeyError, match="live_equality"):
        Metrics("live").set("live_equality", 1.0)


def test_training_exports_what_its_files_say(tmp_path: Path, bars_file: Path) -> None:
    run = trained_run(tmp_path / "run", bars_file, "HIERARCHY")
    place, metrics = run / "seeds" / "1", training_metrics(run)
    page = read_page(metrics.render())
    log = read_metrics(place)
    last = {name: log[name].drop_nulls().to_list()[-1] for name in log.columns if log[name].count()}
    seed = ("run", "1")

    def exported(name: str, *labels: str) -> float:
        return page[f"training_{name}", *sorted((*labels, *seed), key=[*labels, *seed].index)]

    assert page["training_steps", *seed] == last["step"]
    for name, column in (
        *(("steps_per_second", "time/steps_per_second"), ("reward", "charts/reward")),
        *(("mapd", "population/mapd"), ("kl_lambda", "router/kl_lambda")),
        *(("router_entropy", "router/entropy"), ("usage_entropy", "router/usage_entropy")),
    ):
        assert exported(name) == last[column]
    assert page["training_loss", "critic", *seed] == last["losses/critic"]
    sharpe = "sharpe_annual"
    assert page["training_valid", sharpe, *seed] == pytest.approx(
        last[f"valid/{sharpe}"], nan_ok=True
    )
    shares = {key[1]: value for key, value in page.items() if key[0] == "training_responsibility"}
    assert shares == {
        name.partition("/")[2]: value for name, value in last.items() if name.startswith("respons")
    }
    assert len(shares) >= 2
    assert page["training_finished", *seed] == 1.0
    assert page["training_worker_deaths_total", *seed] == 0.0

    population = json.loads((place / "population.json").read_text())
    population["events"] += [{"kind": "worker_lost"}, {"kind": "quarantine"}]
    (place / "population.json").write_text(json.dumps(population))
    (place / "result.json").unlink()
    page = read_page(metrics.render())
    assert page["training_worker_deaths_total", *seed] == 1.0
    assert page["training_finished", *seed] == 0.0


def test_end_of_a_log_is_followed_while_it_grows_and_when_it_is_written_again(
    tmp_path: Path,
) -> None:
    with MetricLog(tmp_path, resume_step=None) as log:
        log.write(1, {"losses/value": 1.0, "charts/reward": 0.5})
        tail = LogTail(tmp_path)
        assert tail.read()["losses/value"] == 1.0
        log.write(2, {"losses/value": 2.0})
        with (tmp_path / LOG).open("ab") as file:
            file.write(b'{"step": 3, "los')
            file.flush()
            values = tail.read()
            assert (values["step"], values["losses/value"], values["charts/reward"]) == (2, 2, 0.5)
            file.write(b'ses/value": 3.0, "seconds": 1.0}\n')
        assert tail.read()["losses/value"] == 3.0
    with MetricLog(tmp_path, resume_step=1) as log:
        assert tail.read()["losses/value"] == 1.0
        log.write(9, {"losses/value": 9.0})
        assert tail.read()["losses/value"] == 9.0
        assert tail.read()["losses/value"] == 9.0
    (tmp_path / LOG).write_text("nonsense\n")
    with pytest.raises(DamagedError, match="line 1"):
        LogTail(tmp_path).read()


def _scrape(port: int) -> dict[tuple[str, ...], float]:
    http = HTTPConnection("127.0.0.1", port, timeout=30.0)
    http.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    answer = http.getresponse()
    page = answer.read()
    http.close()
    assert answer.status == 200, page
    return read_page(page)


@pytest.mark.parametrize("command", ["train", "walk-forward"])
def test_command_that_trains_answers_prometheus_until_it_ends(
    shell: Shell, bars_file: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
    pages = []
    owner, name = (train_command, "train_run") if command == "train" else (batch, "run_steps")
    step = getattr(owner, name)

    def look(*args: Any, **kwargs: Any) -> Any:
        pages.append(_scrape(port))
        result = step(*args, **kwargs)
        pages.append(_scrape(port))
        return result

    monkeypatch.setattr(owner, name, look)
    monkeypatch.setenv("ECHELON_TOKEN", TOKEN)
    more = {"train": (), "walk-forward": MONTHS}[command]
    _, err = shell.works(
        *(command, *tiny(bars_file, *more), "--output-dir", "here"),
        *("--workers", "1", "--metrics-port", str(port)),
    )
    before, after = pages
    assert {key[0] for key in before} == {"training_jobs", "training_job_deaths_total"}
    assert not any(before.values())
    steps = {key[1:]: value for key, value in after.items() if key[0] == "training_steps"}
    expected = {"train": {"here": 800}, "walk-forward": {f"here/folds/{f}": 400 for f in FOLDS}}
    assert steps == {(run, "42"): steps for run, steps in expected[command].items()}
    assert {value for key, value in after.items() if key[0] == "training_finished"} == {1.0}
    jobs = {key[1]: value for key, value in after.items() if key[0] == "training_jobs"}
    assert jobs.pop("done") >= len(expected[command])
    assert jobs == dict.fromkeys(("waiting", "running", "failed"), 0.0)
    assert f"metrics: http://127.0.0.1:{port}/metrics" in err
    with pytest.raises(ConnectionRefusedError):
        _scrape(port)


def test_end_of_a_training_waits_for_who_reads_regularly_and_for_nobody_else() -> None:
    finished = threading.Event()
    metrics = Metrics("training")
    read = []
    with Server(metrics_route(metrics), TOKEN, 0) as server:
        server.wait_for_reader()
        _scrape(server.port)
        server.wait_for_reader()  # who looked once may never come again

        def scrape() -> None:
            for wait in (0.0, 2.0):
                time.sleep(wait)
                read.append(_scrape(server.port))
            finished.wait(30.0)
            read.append(_scrape(server.port))

        reader = threading.Thread(target=scrape)
        reader.start()
        while len(read) < 2:
            time.sleep(0.01)
        metrics.set("training_finished", 1.0, "here", "42")
        finished.set()
        server.wait_for_reader()
    reader.join()
    deaths = {("training_job_deaths_total",): 0.0}
    assert read[1] == deaths
    assert read[2] == {**deaths, ("training_finished", "here", "42"): 1.0}


def test_metrics_port_without_a_token_is_refused_before_anything_is_trained(
    shell: Shell, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ECHELON_TOKEN", raising=False)
    code, _, err = shell("train", *tiny(bars_file), "--output-dir", "run", "--metrics-port", "0")
    assert code == 3
    assert "ECHELON_TOKEN is not set" in err
    assert not Path("run").exists()
