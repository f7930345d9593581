"""Metrics: one table, right numbers, and an engine that no scraper can disturb."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from echelon.monitoring.metrics import LIVE, METRICS, Metrics


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


def test_unknown_metric_is_an_error() -> None:
    with pytest.raises(KeyError, match="live_equality"):
        Metrics("live").set("live_equality", 1.0)
