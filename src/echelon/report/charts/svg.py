"""Pictures of a certificate as inline SVG: a row a policy, values along one axis.

`dots` and `strip` show values; `lanes` shows who was in charge, bar by bar, of what was hidden.
Here is where things stand; the macro `picture` of templates/blocks.html draws them. Colours come
from the page's style sheet by class, so a picture is right in light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from echelon.evaluation.statistics import seed_interval
from echelon.report.pages import Block
from echelon.report.texts import DASH

_WIDTH, _LEFT, _RIGHT = 1100, 300, 150
_ROW, _TOP, _BOTTOM = 26, 18, 30
_NEAR = 40

Unit = Literal["share", "sharpe"]


@dataclass(frozen=True)
class PolicyRow:
    """One row: values as rings around a dot at their mean, or as ticks where there is no dot.

    interval: of the mean; paths: class and outline of what fills a lane
    right, far: text in the first and in the last column at the right
    """

    label: str
    values: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None
    right: str = ""
    strong: bool = False
    mean: float | None = None
    paths: Sequence[tuple[str, str]] = ()
    far: str = ""


@dataclass(frozen=True)
class Picture(Block):
    """Rows over an axis from `low` to `high`.

    thresholds: value of a vertical line → what stands above it
    heads: over the columns at the right; keys: class of a square's colour, its x, what it means
    """

    rows: Sequence[PolicyRow]
    low: float
    high: float
    unit: Unit = "sharpe"
    thresholds: Mapping[float, str] = field(default_factory=dict)
    heads: Sequence[str] = ()
    keys: Sequence[tuple[str, int, str]] = ()
    width: ClassVar = _WIDTH
    right: ClassVar = _WIDTH - _RIGHT + 24

    def at(self, value: float) -> float:
        """The place of a value; what lies outside is drawn at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    @staticmethod
    def middle(k: int) -> int:
        """Where the middle of row k is, from the top."""
        return _TOP + _ROW * k + _ROW // 2

    @property
    def bottom(self) -> int:
        """Where the axis is, from the top."""
        return _TOP + _ROW * len(self.rows)

    @property
    def height(self) -> int:
        """Of all."""
        return self.bottom + _BOTTOM

    @property
    def grid(self) -> list[tuple[float, str]]:
        """Places and labels of about six round values."""
        rough = (self.high - self.low) / 6
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [(self.at(v), self._text(v)) for v in (round(k * step, 10) for k in numbers)]

    def _text(self, value: float) -> str:
        if self.unit == "share":
            return f"{value:.0%}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"

    @property
    def bars(self) -> list[tuple[float, str, str]]:
        """Place, label and anchor of thresholds; labels side by side grow away from one another."""
        places = [self.at(value) for value in self.thresholds]
        bars = []
        for x, label in zip(places, self.thresholds.values(), strict=True):
            before = any(0 < x - place < _NEAR for place in places)
            after = any(0 < place - x < _NEAR for place in places)
            bars.append((x, label, "end" if after else "start" if before else "middle"))
        return bars


def dots(rows: Sequence[PolicyRow], *, unit: Unit, thresholds: Mapping[float, str]) -> Picture:
    """A ring a value, a dot at the mean, its interval, and the mean in figures at the right."""
    drawn = []
    for row in rows:
        over_seeds = seed_interval(row.values)
        ends = row.interval or ((over_seeds.low, over_seeds.high) if over_seeds.n > 1 else None)
        mean = over_seeds.estimate
        right = f"{mean:.1%}" if unit == "share" else f"{mean:.2f}"
        drawn.append(replace(row, interval=ends, mean=mean, right=right))
    return Picture(drawn, *_ends(rows, thresholds), unit, thresholds)


def strip(rows: Sequence[PolicyRow], *, head: str) -> Picture:
    """A tick a value, and a line at zero."""
    return Picture(rows, *_ends(rows, ()), thresholds={0.0: ""}, heads=[head])


def _ends(rows: Sequence[PolicyRow], thresholds: Iterable[float]) -> tuple[float, float]:
    """Of an axis that shows all values, thresholds and zero, with a little room at both ends."""
    values = [*(v for row in rows for v in row.values), *thresholds, 0.0]
    low, high = min(values), max(values)
    room = 0.04 * (high - low) or 0.5
    return low - room, high + room


def lanes(
    hidden: Sequence[int],
    chosen: Sequence[int],
    choices: Mapping[str, int],
    texts: Mapping[str, str],
) -> Picture:
    """A band of what was hidden at each bar (±1), and below it a lane for each choice.

    A lane is filled where its choice was in charge, in the colour of what was hidden then: one of a
    single colour knows when it is its turn. Figures at the right: its share of the bars, and how
    much of that share lies in the first state.

    choices: what one is called → its number in `chosen`
    texts: hidden, its states up and down, heads in_charge and of_that
    """
    assert len(hidden) == len(chosen) > 0, "a state and a choice for every bar"
    places = {"up": _LEFT, "down": _LEFT + (_WIDTH - _LEFT - _RIGHT) // 2}
    keys = [(kind, x, texts[kind]) for kind, x in places.items()]
    heads = [texts["in_charge"], texts["of_that"]]
    empty = Picture((), 0.0, float(len(hidden)), heads=heads, keys=keys)
    rows = []
    for k, (label, number) in enumerate([(texts["hidden"], None), *choices.items()]):
        here = [number is None or choice == number for choice in chosen]
        y, paths = Picture.middle(k), []
        for state, kind in ((1, "up"), (-1, "down")):
            runs = _runs([a and b == state for a, b in zip(here, hidden, strict=True)])
            outline = "".join(
                f"M{empty.at(first)} {y - 8}H{empty.at(last)}v16H{empty.at(first)}z"
                for first, last in runs
            )
            if outline:
                paths.append((kind, outline))
        bars = sum(here)
        up = sum(b == 1 for a, b in zip(here, hidden, strict=True) if a)
        right = "" if number is None else f"{bars / len(hidden):.0%}"
        far = f"{up / bars:.0%}" if bars else DASH
        rows.append(PolicyRow(label, strong=number is None, paths=paths, right=right, far=far))
    return replace(empty, rows=rows)


def _runs(here: Sequence[bool]) -> list[tuple[int, int]]:
    """Stretches of true ones: the first, and the one after the last."""
    edges = [k for k in range(len(here)) if here[k] != (k > 0 and here[k - 1])]
    if here[-1]:
        edges.append(len(here))
    return list(zip(edges[::2], edges[1::2], strict=True))
