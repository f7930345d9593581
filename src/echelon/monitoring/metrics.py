"""Metrics: what is measured of a live engine, a training and the decision service, in one table.

`METRICS` says of each its name, kind, labels and meaning; nothing else is exported. `Metrics` holds
the numbers of one process, and `render` writes them as Prometheus reads them. Names have the prefix
`echelon_`; what comes before the first underscore is the group.

A gauge without a value has no series: of an engine without a hierarchy, `live_mapd` is not there.
Counters count from the start of the process, as Prometheus expects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_NAMESPACE = "echelon"
_LONGEST_LABEL = 120
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BASIS_POINTS = (-50.0, -20.0, -10.0, -5.0, -2.0, 0.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)

Kind = Literal["counter", "gauge", "histogram"]
_KINDS: Mapping[Kind, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class Metric(NamedTuple):
    """One line of the table; buckets: upper ends, of a histogram."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()


def _training(name: str, text: str, *labels: str, kind: Kind = "gauge") -> Metric:
    return Metric(f"training_{name}", kind, ("run", "seed", *labels), text)


METRICS: tuple[Metric, ...] = (
    Metric("live_info", "gauge", ("bundle", "policy", "broker", "feed"), "1, of what is run."),
    Metric("live_bars_total", "counter", (), "Bar sets decided on."),
    Metric("live_bar_time_seconds", "gauge", (), "End of the last bar, Unix time."),
    Metric("live_lag_seconds", "gauge", (), "From the end of the last bar to its bar set."),
    Metric("live_decision_seconds", "histogram", (), "From bar set to sent orders.", _SECONDS),
    Metric("live_orders", "gauge", ("state",), "Orders that are not final, by state."),
    Metric("live_orders_total", "counter", ("side",), "Orders that passed the risk gate."),
    Metric("live_order_states_total", "counter", ("state",), "Answers of the venue, by state."),
    Metric("live_fills_total", "counter", ("side",), "Fills."),
    Metric("live_traded_value_total", "counter", ("side",), "Value of fills, in money."),
    Metric("live_fees_total", "counter", ("kind",), "Commission and stamp duty, in money."),
    Metric(
        *("live_slippage_basis_points", "histogram", ()),
        "Price of a fill against the close of its decision; positive costs.",
        _BASIS_POINTS,
    ),
    Metric("live_slippage_value_total", "counter", (), "Slippage that the venue states, in money."),
    Metric("live_stopped_orders_total", "counter", ("reason",), "Orders that the risk gate stops."),
    Metric("live_rejected_orders_total", "counter", ("reason",), "Orders that the venue rejects."),
    Metric("live_refused_bars_total", "counter", ("reason",), "Bars that the gate refuses."),
    Metric("live_equity", "gauge", (), "Equity at the last decision, in money."),
    Metric("live_cash", "gauge", (), "Cash, in money."),
    Metric("live_drawdown", "gauge", (), "Loss from the highest equity, as a share of it."),
    Metric("live_exposure", "gauge", (), "Share of the equity that is in the market."),
    Metric("live_turnover", "gauge", (), "Value of the session's orders, in equities."),
    Metric("live_positions", "gauge", (), "Symbols held."),
    Metric("live_in_charge", "gauge", ("expert",), "1 of the expert in charge, 0 of the others."),
    Metric("live_router_probability", "gauge", ("expert",), "Of the router's last decision."),
    Metric("live_router_entropy", "gauge", (), "Entropy of these probabilities, in nats."),
    Metric("live_masked", "gauge", ("expert",), "1 of an expert that may not be in charge."),
    Metric("live_position_scale", "gauge", (), "Risk control's factor on the position limit."),
    Metric("live_mapd", "gauge", (), "Mean pairwise distance of what the experts want, 0 to 1."),
    Metric("live_cvar", "gauge", (), "Expected tail loss (95 %) of the last bars' returns."),
    Metric("live_mode", "gauge", ("mode",), "1 of the present mode, 0 of the others."),
    Metric("live_halts_total", "counter", ("reason",), "Halts."),
    Metric("live_commands_total", "counter", ("name",), "Commands of operators."),
    Metric("live_journal_bytes", "gauge", (), "Size of the journal, with its write-ahead log."),
    Metric("live_journal_entries", "gauge", (), "Entries of the journal."),
    Metric("live_venue_silent", "gauge", (), "1 while the venue does not answer."),
    Metric("live_errors_total", "counter", ("kind",), "Errors that trading went on behind."),
    Metric(
        *("guard_out_of_range_share", "gauge", ()),
        "Share of the last rows' values outside the training range.",
    ),
    Metric(
        *("guard_feature_out_of_range_share", "gauge", ("feature",)),
        "The same share of one feature.",
    ),
    Metric("guard_distance", "gauge", (), "Distance of the last rows to the training set."),
    Metric("guard_threshold", "gauge", ("statistic",), "Threshold of a guard's statistic."),
    Metric("guard_alarm", "gauge", ("statistic",), "1 while a statistic is beyond its threshold."),
    Metric("drift_statistic", "gauge", ("quantity",), "Evidence (e-value) of drift."),
    Metric("drift_threshold", "gauge", (), "Evidence at which drift is reported."),
    Metric("drift_alarm", "gauge", ("quantity",), "1 once drift is reported."),
    Metric(
        *("reference_decisions_equal", "gauge", ()),
        "1 where the journal's decisions came out the same when they were made again.",
    ),
    Metric("alerts_sent_total", "counter", ("channel", "severity"), "Alerts delivered."),
    Metric("alerts_failed_total", "counter", ("channel",), "Alerts given up."),
    Metric("alerts_dropped_total", "counter", ("reason",), "Alerts not sent, by reason."),
    _training("steps", "Environment steps so far."),
    _training("steps_per_second", "Environment steps per second."),
    _training("loss", "Losses of the last log interval, by name.", "name"),
    _training("reward", "Mean reward of the last log interval, as the learner sees it."),
    _training("valid", "Measures of the last validation.", "measure"),
    _training("mapd", "Mean pairwise distance of the experts' portfolios, 0 to 1."),
    _training("kl_lambda", "Weight of the router's diversity bonus."),
    _training("router_entropy", "Entropy of the router's probabilities, in nats."),
    _training("usage_entropy", "Entropy of how often experts were in charge, in nats."),
    _training("responsibility", "Mean weight of the rows in an expert's loss.", "expert"),
    _training("worker_deaths_total", "Processes of experts that died.", kind="counter"),
    _training("finished", "1 once the training has come to its end."),
    Metric("service_requests_total", "counter", ("status",), "Requests, by HTTP status."),
    Metric("service_decision_seconds", "histogram", (), "From bars to decision.", _SECONDS),
)
"""Everything that is measured, without the prefix."""

LIVE = ("live", "guard", "drift", "reference", "alerts")
"""Groups of a live engine; the others are `training` and `service`."""


class Metrics:
    """The numbers of these groups, of one process; any thread may change and read them."""

    def __init__(self, *groups: str) -> None:
        # A second series of every counter, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.refresh: list[Callable[[], None]] = []
        """Called before each scrape, by its thread: what need not be known sooner."""
        self._known = {m.name: m for m in METRICS if m.name.partition("_")[0] in groups}
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, ...], Any] = {}
        self._reached: dict[tuple[str, ...], float] = {}
        self._making, self._scraping = threading.Lock(), threading.Lock()
        for metric in self._known.values():
            if metric.kind != "gauge" and not metric.labels:
                self._at(metric.name)

    def add(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Count on; by 0: the series begins."""
        self._at(name, *labels).inc(by)

    def reach(self, name: str, total: float, *labels: str) -> None:
        """Count on to a total that is counted elsewhere."""
        key = (name, *labels)
        self._at(*key).inc(max(0.0, total - self._reached.get(key, 0.0)))
        self._reached[key] = total

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._at(name, *labels).set(value)

    def show(self, name: str, values: Mapping[str, float]) -> None:
        """Set all of a gauge with one label; what had a value and is not among them is 0."""
        for known in [labels for labels in list(self._series) if labels[0] == name]:
            if known[1] not in values:
                self._series[known].set(0.0)
        for label, value in values.items():
            self.set(name, value, label)

    def observe(self, name: str, value: float) -> None:
        """Take a value into a histogram."""
        self._at(name).observe(value)

    def render(self) -> bytes:
        """All of it in Prometheus's text format."""
        with self._scraping:
            for refresh in self.refresh:
                refresh()
            return generate_latest(self)

    def collect(self) -> Iterator[Family]:
        """As prometheus-client asks for it.

        Its own registry refuses `live_orders` beside `live_orders_total`, which are one name in
        OpenMetrics and two in the text format.
        """
        for family in list(self._families.values()):
            yield from family.collect()

    def _at(self, *key: str) -> Any:  # noqa: ANN401 (one of three classes)
        series = self._series.get(key)
        if series is None:
            with self._making:
                series = self._series[key] = self._make(*key)
        return series

    def _make(self, name: str, *labels: str) -> Any:  # noqa: ANN401
        if name not in self._families:
            metric = self._known[name]
            more: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            self._families[name] = _KINDS[metric.kind](
                metric.name,
                metric.text,
                metric.labels,
                namespace=_NAMESPACE,
                registry=None,
                **more,
            )
        family = self._families[name]
        return family.labels(*(label[:_LONGEST_LABEL] for label in labels)) if labels else family
