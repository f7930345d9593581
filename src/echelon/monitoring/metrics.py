"""Metrics: what is measured of a live engine, a training and the decision service, in one table.

`METRICS` says of each its name, kind, labels and meaning; nothing else is exported. `Metrics` holds
the numbers of one process, and `render` writes them as Prometheus reads them. Names have the prefix
`echelon_`; what comes before the first underscore is the group.

A gauge without a value has no series: of an engine without a hierarchy, `live_mapd` is not there.
Counters count from the start of the process, as Prometheus expects.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
NAMESPACE = "echelon"
_LONGEST_LABEL = 120
_MOST_OBSERVED = 500
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_COSTS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0)
_BASIS_POINTS = (*(-cost for cost in reversed(_COSTS)), 0.0, *_COSTS)
"""A fill at the next bar's close has the move of a whole bar in it."""

Kind = Literal["counter", "gauge", "histogram"]
_KINDS: Mapping[Kind, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class Metric(NamedTuple):
    """One line of the table; buckets: upper ends, of a histogram."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", labels, text)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", labels, text)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, "histogram", (), text, buckets)


_SEED = ("run", "seed")
METRICS: tuple[Metric, ...] = (
    _gauge("live_info", "1, of what is run.", "bundle", "policy", "broker", "feed"),
    _counter("live_bars_total", "Bar sets decided on."),
    _gauge("live_bar_time_seconds", "End of the last bar, Unix time."),
    _gauge("live_lag_seconds", "From the end of the last bar to its bar set."),
    _histogram("live_decision_seconds", "From bar set to sent orders.", _SECONDS),
    _gauge("live_orders", "Orders that are not final, by state.", "state"),
    _counter("live_orders_total", "Orders that passed the risk gate.", "side"),
    _counter("live_order_states_total", "Answers of the venue, by state.", "state"),
    _counter("live_fills_total", "Fills.", "side"),
    _counter("live_traded_value_total", "Value of fills, in money.", "side"),
    _counter("live_fees_total", "Commission and stamp duty, in money.", "kind"),
    _histogram(
        "live_slippage_basis_points", "Of fills, against the close decided on.", _BASIS_POINTS
    ),
    _counter("live_slippage_value_total", "Slippage that the venue states, in money."),
    _counter("live_stopped_orders_total", "Orders that the risk gate stops.", "reason"),
    _counter("live_rejected_orders_total", "Orders that the venue rejects.", "reason"),
    _counter("live_refused_bars_total", "Bars that the gate refuses.", "reason"),
    _gauge("live_equity", "Equity at the last decision, in money."),
    _gauge("live_cash", "Cash, in money."),
    _gauge("live_drawdown", "Loss from the highest equity, as a share of it."),
    _gauge("live_exposure", "Share of the equity that is in the market."),
    _gauge("live_turnover", "Value of the session's orders, in equities."),
    _gauge("live_positions", "Symbols held."),
    _gauge("live_in_charge", "1 of the expert in charge, 0 of the others.", "expert"),
    _gauge("live_router_probability", "Of the router's last decision.", "expert"),
    _gauge("live_router_entropy", "Entropy of these probabilities, in nats."),
    _gauge("live_masked", "1 of an expert that may not be in charge.", "expert"),
    _gauge("live_position_scale", "Risk control's factor on the position limit."),
    _gauge("live_mapd", "Mean pairwise distance of what the experts want, 0 to 1."),
    _gauge("live_cvar", "Expected tail loss (95 %) of the last bars' returns."),
    _gauge("live_mode", "1 of the present mode, 0 of the others.", "mode"),
    _counter("live_halts_total", "Halts.", "reason"),
    _counter("live_commands_total", "Commands of operators.", "name"),
    _gauge("live_journal_bytes", "Size of the journal, with its write-ahead log."),
    _gauge("live_journal_entries", "Entries of the journal."),
    _gauge("live_venue_silent", "1 while the venue does not answer."),
    _counter("live_errors_total", "Errors that trading went on behind.", "kind"),
    _gauge(
        "guard_out_of_range_share", "Share of values outside the training range, of the last rows."
    ),
    _gauge("guard_feature_out_of_range_share", "The same share of one feature.", "feature"),
    _gauge("guard_distance", "Distance of the last rows to the training set."),
    _gauge("guard_threshold", "Threshold of a guard's statistic.", "statistic"),
    _gauge("guard_alarm", "1 while a statistic is beyond its threshold.", "statistic"),
    _gauge("drift_statistic", "Evidence (e-value) of drift.", "quantity"),
    _gauge("drift_threshold", "Evidence at which drift is reported."),
    _gauge("drift_alarm", "1 once drift is reported.", "quantity"),
    _gauge("reference_decisions_equal", "1 where the journal's decisions came out the same again."),
    _counter("alerts_sent_total", "Alerts delivered.", "channel", "severity"),
    _counter("alerts_failed_total", "Alerts given up.", "channel"),
    _counter("alerts_dropped_total", "Alerts not sent, by reason.", "reason"),
    _gauge("training_steps", "Environment steps so far.", *_SEED),
    _gauge("training_steps_per_second", "Environment steps per second.", *_SEED),
    _gauge("training_loss", "Losses of the last log interval, by name.", *_SEED, "name"),
    _gauge(
        "training_reward", "Mean reward of the last log interval, as the learner sees it.", *_SEED
    ),
    _gauge("training_valid", "Measures of the last validation.", *_SEED, "measure"),
    _gauge("training_mapd", "Mean pairwise distance of the experts' portfolios, 0 to 1.", *_SEED),
    _gauge("training_kl_lambda", "Weight of the router's diversity bonus.", *_SEED),
    _gauge("training_router_entropy", "Entropy of the router's probabilities, in nats.", *_SEED),
    _gauge(
        "training_usage_entropy", "Entropy of how often experts were in charge, in nats.", *_SEED
    ),
    _gauge(
        "training_responsibility", "Mean weight of the rows in an expert's loss.", *_SEED, "expert"
    ),
    _counter("training_worker_deaths_total", "Processes of experts that died.", *_SEED),
    _gauge("training_finished", "1 once the training has come to its end.", *_SEED),
    _gauge("training_jobs", "Jobs of the command, by state.", "state"),
    _counter("training_job_deaths_total", "Workers that died over a job, which was begun again."),
    _counter("service_requests_total", "Requests, by HTTP status.", "status"),
    _histogram("service_decision_seconds", "From bars to decision.", _SECONDS),
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
        self._observed: deque[tuple[str, float]] = deque()
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
        self._at(name, *labels).set(value)

    def show(self, name: str, values: Mapping[str, float]) -> None:
        """Set all of a gauge with one label; what had a value and is not among them is 0."""
        for known in [labels for labels in list(self._series) if labels[0] == name]:
            if known[1] not in values:
                self._series[known].set(0.0)
        for label, value in values.items():
            self.set(name, value, label)

    def observe(self, name: str, value: float) -> None:
        """Take a value into a histogram, at the next scrape."""
        self._observed.append((name, value))
        if len(self._observed) > _MOST_OBSERVED:  # nobody scrapes: one by one, not 500 at one bar
            self._take_observed(_MOST_OBSERVED)

    def render(self) -> bytes:
        """All of it in Prometheus's text format."""
        with self._scraping:
            for refresh in self.refresh:
                refresh()
            self._take_observed()
            return generate_latest(self)

    def collect(self) -> Iterator[Family]:
        """As prometheus-client asks for it.

        Its own registry refuses `live_orders` beside `live_orders_total`, which are one name in
        OpenMetrics and two in the text format.
        """
        for family in list(self._families.values()):
            yield from family.collect()

    def _take_observed(self, most: int = 0) -> None:
        with suppress(IndexError):  # another thread takes them too
            while len(self._observed) > most:
                name, value = self._observed.popleft()
                self._at(name).observe(value)

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
                namespace=NAMESPACE,
                registry=None,
                **more,
            )
        family = self._families[name]
        return family.labels(*(label[:_LONGEST_LABEL] for label in labels)) if labels else family
