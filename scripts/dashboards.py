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

    kind: Literal["value", "name", "both", "lines", "stack", "states"]
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


def lines(title: str, unit: str, *queries: Query, width: int = 8) -> Panel:
    """Numbers over time."""
    return Panel("lines", title, unit, queries, width)


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


def training(name: str, legend: str = "seed {{seed}}") -> Query:
    """A number of the trainings that were chosen."""
    return Query(f'echelon_training_{name}{{run=~"$run", seed=~"$seed"}}', legend)


ENGINE = (("engine", 'label_values({__name__=~"echelon_(live_info|service_.+)"}, instance)'),)
TRAINING = (
    ("run", "label_values(echelon_training_steps, run)"),
    ("seed", 'label_values(echelon_training_steps{run=~"$run"}, seed)'),
)
MODE = Query(f"{live('live_mode')} == 1", "{{mode}}")
LAST_BAR = Query(f"{live('live_bar_time_seconds')} * 1000", "{{instance}}")
FIRING = Query('count(ALERTS{alertstate="firing"}) or vector(0)', "alerts")
OUTSIDE_LIMIT = Query(live("guard_threshold", ', statistic="out_of_range"'), "threshold")
DISTANCE_LIMIT = Query(live("guard_threshold", ', statistic="distance"'), "threshold")
WORST_FEATURES = Query(f"topk(5, {live('guard_feature_out_of_range_share')})", "{{feature}}")
TIME_IN_CHARGE = Query(f"avg_over_time({live('live_in_charge')}[$__range])", "{{expert}}")
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
            Panel("name", "Mode", "none", (MODE,), 3),
            Panel("name", "Bundle", "none", (gauge("live_info", "{{policy}} {{bundle}}"),), 5),
            Panel("value", "Last bar", "dateTimeAsIso", (LAST_BAR,), 4),
            Panel("value", "Equity", "none", (gauge("live_equity"),), 3),
            Panel("value", "Drawdown", "percentunit", (gauge("live_drawdown"),), 3),
            Panel("value", "Positions", "none", (gauge("live_positions"),), 3),
            Panel("value", "Alerts that fire", "none", (FIRING,), 3),
            "Account",
            lines(
                "Equity and cash",
                "none",
                gauge("live_equity", "equity"),
                gauge("live_cash", "cash"),
            ),
            lines(
                "Drawdown and tail risk",
                "percentunit",
                gauge("live_drawdown", "drawdown"),
                gauge("live_cvar", "CVaR"),
            ),
            lines(
                "Exposure and turnover",
                "percentunit",
                gauge("live_exposure", "exposure"),
                gauge("live_turnover", "turnover"),
                gauge("live_position_scale", "position scale"),
            ),
            "Engine",
            lines("Time of a decision", "s", *quantiles("live_decision_seconds", 0.5, 0.99)),
            lines("Lag behind the bar", "s", gauge("live_lag_seconds")),
            lines("Bars", "none", growth("live_bars_total", "instance")),
            lines("Bars refused", "none", growth("live_refused_bars_total", "reason")),
            lines(
                "Halts and commands",
                "none",
                growth("live_halts_total", "reason"),
                growth("live_commands_total", "name"),
            ),
            lines("Errors", "none", growth("live_errors_total", "kind")),
            lines("Journal", "bytes", gauge("live_journal_bytes")),
            lines("Entries of the journal", "none", gauge("live_journal_entries")),
            states("Silent venue", gauge("live_venue_silent")),
            "Guards",
            lines(
                "Values outside the training range",
                "percentunit",
                gauge("guard_out_of_range_share", "share"),
                OUTSIDE_LIMIT,
            ),
            lines(
                "Distance to the training data",
                "none",
                gauge("guard_distance", "distance"),
                DISTANCE_LIMIT,
            ),
            lines("Features furthest outside", "percentunit", WORST_FEATURES),
            lines(
                "Drift",
                "none",
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
            lines("Alerts sent", "none", growth("alerts_sent_total", "channel")),
            lines(
                "Alerts failed and dropped",
                "none",
                growth("alerts_failed_total", "channel"),
                growth("alerts_dropped_total", "reason"),
            ),
            lines(
                "Requests to the decision service",
                "none",
                growth("service_requests_total", "status"),
            ),
            lines(
                "Time of a decision of the service",
                "s",
                *quantiles("service_decision_seconds", 0.5, 0.99),
            ),
        ),
    ),
    Dashboard(
        "echelon-experts",
        "Echelon / Experts and routing",
        (*ENGINE, *TRAINING),
        (
            "Live",
            states("In charge", gauge("live_in_charge", "{{expert}}"), width=16),
            Panel("both", "Share of the time in charge", "percentunit", (TIME_IN_CHARGE,), 8),
            Panel(
                "stack",
                "The router's probabilities",
                "percentunit",
                (gauge("live_router_probability", "{{expert}}"),),
                8,
            ),
            lines("The router's entropy", "none", gauge("live_router_entropy")),
            states("Masked experts", gauge("live_masked", "{{expert}}")),
            lines("MAPD", "none", gauge("live_mapd"), width=12),
            lines("Position scale", "percentunit", gauge("live_position_scale"), width=12),
            "Training",
            lines(
                "Responsibilities",
                "percentunit",
                training("responsibility", "{{expert}} seed {{seed}}"),
            ),
            lines("Entropy of usage", "none", training("usage_entropy")),
            lines("Entropy of the router in training", "none", training("router_entropy")),
        ),
    ),
    Dashboard(
        "echelon-execution",
        "Echelon / Execution",
        ENGINE,
        (
            "Orders",
            lines("Orders by state", "none", gauge("live_orders", "{{state}}")),
            lines("Orders sent", "none", growth("live_orders_total", "side")),
            lines("Changes of state", "none", growth("live_order_states_total", "state")),
            lines("Fills", "none", growth("live_fills_total", "side")),
            lines("Orders stopped", "none", growth("live_stopped_orders_total", "reason")),
            lines("Orders rejected", "none", growth("live_rejected_orders_total", "reason")),
            "Costs",
            lines("Value traded", "none", growth("live_traded_value_total", "side")),
            lines("Fees", "none", growth("live_fees_total", "kind")),
            lines(
                "Slippage against arrival, basis points",
                "none",
                *quantiles("live_slippage_basis_points", 0.1, 0.5, 0.9),
            ),
            lines(
                "Cost of slippage",
                "none",
                growth("live_slippage_value_total", "instance"),
                width=12,
            ),
            lines("Fees, basis points of the value traded", "none", FEE_SHARE, width=12),
        ),
    ),
    Dashboard(
        "echelon-training",
        "Echelon / Training",
        TRAINING,
        (
            "Progress",
            lines("Steps", "none", training("steps", "{{run}} seed {{seed}}")),
            lines("Steps a second", "none", training("steps_per_second")),
            states("Finished", training("finished", "{{run}} seed {{seed}}")),
            "Learning",
            lines("Losses", "none", training("loss", "{{name}} seed {{seed}}"), width=12),
            lines("Reward", "none", training("reward"), width=12),
            lines("Validation", "none", training("valid", "{{measure}} seed {{seed}}"), width=12),
            lines("MAPD", "none", training("mapd"), width=6),
            lines("λ, weight of diversity", "none", training("kl_lambda"), width=6),
            "Health",
            lines("Workers that died", "none", training("worker_deaths_total"), width=24),
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
        height = 4 if part.width < 6 else 8
        page.with_panel(_build(part).id(number).grid_pos(GridPos(height, part.width, left, top)))
        left += part.width
    return json.dumps(page.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _build(panel: Panel) -> timeseries.Panel | stat.Panel | statetimeline.Panel:
    """The panel without its place."""
    made: timeseries.Panel | stat.Panel | statetimeline.Panel
    legend = VizLegendOptions().show_legend(True)
    legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    now = panel.kind in TEXTS
    if now:
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
        made.with_target(target.instant() if now else target.range())
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
