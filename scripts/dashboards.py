"""The Grafana dashboards, written from the tables below.

    python -m scripts.dashboards           write deploy/grafana/dashboards/*.json
    python -m scripts.dashboards --check   exit 1 where a file is not what the tables say

`DASHBOARDS` is all there is to edit: rows of panels, a panel with its queries. A panel that sums up
a time takes the window of the dashboard's variable `$window`, since a session of daily bars and one
of minutes want different ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    GridPos,
    VariableOption,
    VariableRefresh,
)

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WINDOW = "5m"
Now = Literal["value", "name", "both"]
TEXTS = {
    "value": BigValueTextMode.VALUE,
    "name": BigValueTextMode.NAME,
    "both": BigValueTextMode.VALUE_AND_NAME,
}


class Query(NamedTuple):
    """What is asked of Prometheus, and how an answer is named."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """One picture.

    unit: Grafana's name of it
    kind: value (of now), name (of what is so now), both, lines, stack (of shares), states (on or
        off)
    width: of 24
    """

    kind: Now | Literal["lines", "stack", "states"]
    title: str
    unit: str
    queries: tuple[Query, ...]
    width: int


class Dashboard(NamedTuple):
    """A page: rows of panels, each behind its heading, and the variables that choose the data."""

    uid: str
    title: str
    variables: tuple[tuple[str, str], ...]
    """(name, query of its values)"""
    parts: tuple[str | Panel, ...]


def lines(title: str, *queries: Query, unit: str = "none", width: int = 8) -> Panel:
    """Numbers over time."""
    return Panel("lines", title, unit, queries, width)


def now(kind: Now, title: str, query: Query, width: int, unit: str = "none") -> Panel:
    """What is so now."""
    return Panel(kind, title, unit, (query,), width)


def shares(title: str, *queries: Query, width: int = 8) -> Panel:
    """Shares over time."""
    return Panel("lines", title, "percentunit", queries, width)


def states(title: str, *queries: Query, width: int = 8) -> Panel:
    """What was on and off over time."""
    return Panel("states", title, "none", queries, width)


def live(name: str, more: str = "") -> str:
    """A number of the engines that were chosen."""
    return f'echelon_{name}{{instance=~"$engine"{more}}}'


def gauge(name: str, legend: str = "{{instance}}") -> Query:
    """A number as it is."""
    return Query(live(name), legend)


def growth(name: str, label: str) -> Query:
    """How much a counter grew within the window, by a label."""
    return Query(f"sum by ({label}) (increase({live(name)}[$window]))", f"{{{{{label}}}}}")


def quantiles(name: str, *shares: float) -> tuple[Query, ...]:
    """Quantiles of a histogram within the window."""
    buckets = f"sum by (le) (increase({live(f'{name}_bucket')}[$window]))"
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in shares)


def training(name: str, legend: str = "seed {{seed}}", more: str = "") -> Query:
    """A number of the trainings that were chosen."""
    return Query(f'echelon_training_{name}{{run=~"$run", seed=~"$seed"{more}}}', legend)


ENGINE = (("engine", 'label_values({__name__=~"echelon_(live_info|service_.+)"}, instance)'),)
TRAINING = (
    ("run", "label_values(echelon_training_steps, run)"),
    ("seed", 'label_values(echelon_training_steps{run=~"$run"}, seed)'),
)
BUNDLE = Query(
    f'label_replace({live("live_info")}, "short", "$1", "bundle", "(.{{8}}).*")',
    "{{policy}} ({{short}})",
)
MODE = Query(f"{live('live_mode')} == 1", "{{mode}}")
LAST_BAR = Query(f"{live('live_bar_time_seconds')} * 1000", "{{instance}}")
FIRING = Query('count(ALERTS{alertstate="firing"}) or vector(0)', "alerts")
OUTSIDE_LIMIT = Query(live("guard_threshold", ', statistic="out_of_range"'), "threshold")
DISTANCE_LIMIT = Query(live("guard_threshold", ', statistic="distance"'), "threshold")
WORST_FEATURES = Query(f"topk(5, {live('guard_feature_out_of_range_share')})", "{{feature}}")
TIME_IN_CHARGE = Query(f"avg_over_time({live('live_in_charge')}[$__range])", "{{expert}}")
FAILED = growth("alerts_failed_total", "channel")
DROPPED = growth("alerts_dropped_total", "reason")
REQUESTS = growth("service_requests_total", "status")
SERVICE = quantiles("service_decision_seconds", 0.5, 0.99)
LOSSES = training("loss", "{{name}} seed {{seed}}", ', name!~".*norm"')
NORMS = training("loss", "{{name}} seed {{seed}}", ', name=~".*norm"')
RATIOS = training(
    "valid", "{{measure}} seed {{seed}}", ', measure=~"sharpe_annual|sortino_annual|calmar"'
)
RETURNS = training(
    "valid", "{{measure}} seed {{seed}}", ', measure=~"annual_return|max_drawdown|cvar95"'
)
JOB_DEATHS = Query("echelon_training_job_deaths_total", "{{instance}}")
ROUTER = gauge("live_router_probability", "{{expert}}")
FEE_SHARE = Query(
    f"1e4 * sum(increase({live('live_fees_total')}[$window]))"
    f" / sum(increase({live('live_traded_value_total')}[$window]))",
    "fees",
)

DASHBOARDS = (
    Dashboard(
        "echelon-live",
        "Echelon / Live",
        ENGINE,
        (
            "Now",
            now("name", "Mode", MODE, 3),
            now("name", "Bundle", BUNDLE, 5),
            now("value", "Last bar", LAST_BAR, 4, "dateTimeAsIso"),
            now("value", "Equity", gauge("live_equity"), 3),
            now("value", "Drawdown", gauge("live_drawdown"), 3, "percentunit"),
            now("value", "Positions", gauge("live_positions"), 3),
            now("value", "Alerts that fire", FIRING, 3),
            "Account",
            lines("Equity and cash", gauge("live_equity", "equity"), gauge("live_cash", "cash")),
            shares(
                "Drawdown and tail risk",
                gauge("live_drawdown", "drawdown"),
                gauge("live_cvar", "CVaR"),
            ),
            shares(
                "Exposure and turnover",
                gauge("live_exposure", "exposure"),
                gauge("live_turnover", "turnover"),
                gauge("live_position_scale", "position scale"),
            ),
            "Engine",
            lines("Time of a decision", *quantiles("live_decision_seconds", 0.5, 0.99), unit="s"),
            lines("Lag behind the bar", gauge("live_lag_seconds"), unit="s"),
            lines("Bars", growth("live_bars_total", "instance")),
            lines("Bars refused", growth("live_refused_bars_total", "reason")),
            lines(
                "Halts and commands",
                growth("live_halts_total", "reason"),
                growth("live_commands_total", "name"),
            ),
            lines("Errors", growth("live_errors_total", "kind")),
            lines("Journal", gauge("live_journal_bytes"), unit="bytes"),
            lines("Entries of the journal", gauge("live_journal_entries")),
            states("Silent venue", gauge("live_venue_silent")),
            "Guards",
            shares(
                "Values outside the training range",
                gauge("guard_out_of_range_share", "share"),
                OUTSIDE_LIMIT,
            ),
            lines(
                "Distance to the training data", gauge("guard_distance", "distance"), DISTANCE_LIMIT
            ),
            shares("Features furthest outside", WORST_FEATURES),
            lines(
                "Drift",
                gauge("drift_statistic", "{{quantity}}"),
                gauge("drift_threshold", "threshold"),
            ),
            states(
                "Alarms",
                gauge("guard_alarm", "unlike training: {{statistic}}"),
                gauge("drift_alarm", "drift: {{quantity}}"),
            ),
            states("Decisions equal when made again", gauge("reference_decisions_equal")),
            "Alerts and the decision service",
            lines("Alerts sent", growth("alerts_sent_total", "channel"), width=6),
            lines("Alerts failed and dropped", FAILED, DROPPED, width=6),
            lines("Requests to the decision service", REQUESTS, width=6),
            lines("Time of a decision of the service", *SERVICE, unit="s", width=6),
        ),
    ),
    Dashboard(
        "echelon-experts",
        "Echelon / Experts and routing",
        (*ENGINE, *TRAINING),
        (
            "Live",
            states("In charge", gauge("live_in_charge", "{{expert}}"), width=16),
            now("both", "Share of the time in charge", TIME_IN_CHARGE, 8, "percentunit"),
            Panel("stack", "The router's probabilities", "percentunit", (ROUTER,), 8),
            lines("The router's entropy", gauge("live_router_entropy")),
            states("Masked experts", gauge("live_masked", "{{expert}}")),
            lines("MAPD", gauge("live_mapd"), width=12),
            shares("Position scale", gauge("live_position_scale"), width=12),
            "Training",
            lines("Responsibilities", training("responsibility", "{{expert}} seed {{seed}}")),
            lines("Entropy of usage", training("usage_entropy")),
            lines("Entropy of the router in training", training("router_entropy")),
        ),
    ),
    Dashboard(
        "echelon-execution",
        "Echelon / Execution",
        ENGINE,
        (
            "Orders",
            lines("Orders by state", gauge("live_orders", "{{state}}")),
            lines("Orders sent", growth("live_orders_total", "side")),
            lines("Changes of state", growth("live_order_states_total", "state")),
            lines("Fills", growth("live_fills_total", "side")),
            lines("Orders stopped", growth("live_stopped_orders_total", "reason")),
            lines("Orders rejected", growth("live_rejected_orders_total", "reason")),
            "Costs",
            lines("Value traded", growth("live_traded_value_total", "side")),
            lines("Fees", growth("live_fees_total", "kind")),
            lines(
                "Slippage against arrival, basis points",
                *quantiles("live_slippage_basis_points", 0.1, 0.5, 0.9),
            ),
            lines("Cost of slippage", growth("live_slippage_value_total", "instance"), width=12),
            lines("Fees, basis points of the value traded", FEE_SHARE, width=12),
        ),
    ),
    Dashboard(
        "echelon-training",
        "Echelon / Training",
        TRAINING,
        (
            "Progress",
            lines("Steps", training("steps", "{{run}} seed {{seed}}")),
            lines("Steps a second", training("steps_per_second")),
            states("Finished", training("finished", "{{run}} seed {{seed}}")),
            "Learning",
            lines("Losses", LOSSES),
            lines("Norms of the gradients", NORMS),
            lines("Reward", training("reward")),
            lines("Validation: Sharpe, Sortino, Calmar", RATIOS),
            shares("Validation: return and risk", RETURNS),
            lines("MAPD in training", training("mapd"), width=4),
            lines("λ, weight of diversity", training("kl_lambda"), width=4),
            "Health",
            lines("Jobs by state", Query("echelon_training_jobs", "{{instance}} {{state}}")),
            lines("Workers that died over a job", JOB_DEATHS),
            lines("Workers that died", training("worker_deaths_total")),
        ),
    ),
)


def panels(dashboard: Dashboard) -> Iterator[Panel]:
    """All of them, in order."""
    return (part for part in dashboard.parts if isinstance(part, Panel))


def render(dashboard: Dashboard) -> str:
    """The dashboard as Grafana imports it."""
    page = builders.Dashboard(dashboard.title).uid(dashboard.uid).tags(["echelon"]).editable()
    page.time("now-1h", "now").refresh("10s").timezone("browser")
    page.with_variable(builders.DatasourceVariable("datasource").type("prometheus"))
    for name, query in dashboard.variables:
        page.with_variable(
            builders.QueryVariable(name)
            .query(query)
            .datasource(SOURCE)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(VariableOption(text="All", value="$__all"))
        )
    windows = builders.IntervalVariable("window").values("1m,5m,15m,1h,1d,7d")
    page.with_variable(windows.current(VariableOption(text=WINDOW, value=WINDOW)))
    left = top = height = 0
    for number, part in enumerate(dashboard.parts, 1):
        if isinstance(part, str):
            left, top, height = 0, top + height, 0
            page.with_row(builders.Row(part).id(number).grid_pos(GridPos(1, 24, 0, top)))
            top += 1
            continue
        if left + part.width > 24:
            left, top = 0, top + height
        height = 4 if part.kind in TEXTS and part.width < 8 else 8
        page.with_panel(_build(part).id(number).grid_pos(GridPos(height, part.width, left, top)))
        left += part.width
    return json.dumps(page.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _build(panel: Panel) -> timeseries.Panel | stat.Panel | statetimeline.Panel:
    """The panel without its place."""
    made: timeseries.Panel | stat.Panel | statetimeline.Panel
    legend = VizLegendOptions().show_legend(True)
    legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    if panel.kind in TEXTS:
        made = stat.Panel().graph_mode(BigValueGraphMode.NONE).color_mode(BigValueColorMode.VALUE)
        made.text_mode(TEXTS[panel.kind])
        made.reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    elif panel.kind == "states":
        made = statetimeline.Panel().merge_values(True).legend(legend)
    else:
        made = timeseries.Panel().legend(legend).fill_opacity(70 if panel.kind == "stack" else 5)
        if panel.kind == "stack":
            made.stacking(StackingConfig().mode(StackingMode.NORMAL)).max(1)
    made.title(panel.title).unit(panel.unit).datasource(SOURCE)
    for letter, query in zip("ABC", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter)
        made.with_target(target.instant() if panel.kind in TEXTS else target.range())
    return made


def main(argv: list[str] | None = None) -> int:
    """Write the dashboards, or say which are not what the tables say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    stale = []
    FOLDER.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        file = FOLDER / f"{dashboard.uid.removeprefix('echelon-')}.json"
        text = render(dashboard)
        if not args.check:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(file.name)
    for name in stale:
        print(f"{name} is not what scripts/dashboards.py says: run it.", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
