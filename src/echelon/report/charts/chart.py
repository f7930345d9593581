"""What a chart is, without how it is drawn: plots in rows, each of layers on two axes.

`interactive.page_chart` and `slides.draw_slide` draw the same chart; what only one of them can show
(hovering, lines that are hidden at first) the other leaves out. Texts are in the reader's language
already. Colours are roles of the palette below: one accent for the agent, muted ones for what it is
held to. Gains are blue and losses orange: red and green mean opposite things in China and in the
West, and one reader in twelve cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from echelon.config.agents import EvalConfig
from echelon.files import package_yaml
from echelon.types import Floats, Ints, Times

Places: TypeAlias = "Floats | Times | Ints | Sequence[str] | Sequence[float]"
"""Where values stand along x: numbers, times, or categories by name."""
MOST_LABELS = 40
"""Rows of which every one is labelled; of more, one in so many is."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What all layers have.

    group: layers of one group are shown and hidden together by one entry of the legend
    listed: whether it has that entry; lead: as the first one
    hover: d3 format of its values; empty: it says nothing
    label: its name on hover where that is another than in the legend
    texts: what it says instead, a text a value
    """

    name: str = ""
    role: str = "accent"
    group: str = ""
    listed: bool = True
    lead: bool = False
    hover: str = ".3g"
    label: str = ""
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class Curve(Layer):
    """A line through y[T] at x[T], broken where y is NaN.

    fill: to zero, or stacked upon the layers before it
    marked: with a mark at each value; shown: False where only a click in the legend shows it
    """

    x: Places
    y: Floats | Sequence[float]
    width: float = 1.6
    dash: Literal["solid", "dash", "dot"] = "solid"
    fill: Literal["", "zero", "stack"] = ""
    step: bool = False
    marked: bool = False
    shown: bool = True


@dataclass(frozen=True)
class Points(Layer):
    """A symbol at each x[P], y[P].

    symbol: as plotly.js names it; size: pixels across, of all or of each
    roles: of the colours of each, in place of one role
    labels: written above each, or below where `below` says so
    low, high: ends of an interval around each, along the axis `along`
    at_foot: so many that they would hide the curve; a page shows them on request, a slide at the
        foot of the plot
    """

    x: Places
    y: Floats | Sequence[float]
    symbol: str = "circle"
    size: float | Floats = 9.0
    roles: Sequence[str] = ()
    labels: Sequence[str] = ()
    below: Sequence[bool] = ()
    low: Floats | None = None
    high: Floats | None = None
    along: Literal["x", "y"] = "x"
    opacity: float = 1.0
    at_foot: bool = False


@dataclass(frozen=True)
class BarStack(Layer):
    """A bar of values[P] at each place[P], stacked. across: bars lie; low, high: an interval"""

    at: Times | Sequence[int]
    values: Floats
    across: bool = False
    roles: Sequence[str] = ()
    low: Floats | None = None
    high: Floats | None = None


@dataclass(frozen=True)
class Spans(Layer):
    """Spans of time first[P] … stop[P], each in its row."""

    rows: Sequence[float]
    first: Times
    stop: Times
    thickness: float = 0.66


@dataclass(frozen=True)
class Cells(Layer):
    """Coloured cells: values[R,C] in ±limit and their texts; one without a value is a total."""

    values: Floats
    written: Sequence[Sequence[str]]
    limit: float = 1.0


@dataclass(frozen=True)
class RefLine(Layer):
    """A straight line through the whole plot at a value of an axis; until: a band to that value."""

    at: float | str
    axis: Literal["x", "y"] = "y"
    dash: Literal["solid", "dash", "dot"] = "dash"
    width: float = 1.5
    until: float | None = None


@dataclass(frozen=True)
class Axis:
    """An axis of a plot.

    form: how its numbers are written; steps: with k, M
    low, high: its ends where they do not follow from the values
    labels: of the rows 0, 1, … from the top down, or of all categories in their order
    strong: rows whose labels are bold
    columns: head and texts of the rows, which a slide writes at the right (a page has tables)
    ticks: at most about so many; top: labels are at the top
    bare: no ticks; the title, next to the middle, lies
    """

    title: str = ""
    kind: Literal["linear", "log", "date", "category"] = "linear"
    form: Literal["", "percent", "steps", "integer"] = ""
    low: float | None = None
    high: float | None = None
    labels: Sequence[str] = ()
    strong: Sequence[int] = ()
    columns: Sequence[tuple[str, Sequence[str]]] = ()
    ticks: int | None = None
    bare: bool = False
    top: bool = False


DATES = Axis(kind="date")


@dataclass(frozen=True)
class Plot:
    """Layers on two axes.

    legend: where a slide lists its layers: with those of the whole chart, by itself inside or
        above the plot, or nowhere
    note: what stands in the place of a plot that has nothing to show
    """

    layers: Sequence[Layer]
    x: Axis = DATES
    y: Axis = Axis()
    title: str = ""
    legend: Literal["chart", "inside", "above", "none"] = "chart"
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """Plots in rows; None: an empty place.

    height: pixels on a page; ratios: heights of the rows
    shared: the plots, one below the other, have one x axis
    hover: what a page tells of: all values of an x, of a y, or the closest one
    """

    rows: Sequence[Sequence[Plot | None]]
    height: int
    ratios: Sequence[float] = ()
    shared: bool = False
    legend: Literal["above", "right", "none"] = "above"
    hover: Literal["x unified", "y unified", "closest"] = "x unified"

    @property
    def plots(self) -> list[Plot]:
        return [plot for row in self.rows for plot in row if plot is not None]


BASELINES: tuple[str, ...] = EvalConfig().baselines
"""Baselines with colours of their own; any other one is grey."""
BACKTEST = "backtest"
"""Key of the backtest that live trading is held to."""
ASSET_COLOURS = 16

_PALETTE = package_yaml("echelon.report", "palette.yaml")
_ROLES: Mapping[str, tuple[str, str]] = _PALETTE["roles"] | {
    f"asset{k}": (colour, colour) for k, colour in enumerate(_PALETTE["assets"])
}
LIGHT: Mapping[str, str] = {role: light for role, (light, _) in _ROLES.items()}
DARK: Mapping[str, str] = {role: dark for role, (_, dark) in _ROLES.items()}


def colour_of(key: str) -> str:
    """Role of the colour of a baseline, or of the backtest beside live trading."""
    return key if key in BASELINES or key == BACKTEST else "random"


def css_variables() -> str:
    """Both palettes as CSS variables, by the reader's screen; paper is always light."""

    def block(palette: Mapping[str, str]) -> str:
        names = ("page", "card", "ink", "soft", "faint", "line", "accent", "gain", "loss")
        return "".join(f"--{name}:{palette[name]};" for name in names)

    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {block(DARK)} }} }}"
    paper = f"@media print {{ :root {{ {block(LIGHT)} }} }}"
    return f":root {{ {block(LIGHT)} }}\n{dark}\n{paper}"
