"""Pictures of a certificate as inline SVG: a row a policy, values along one axis.

`dots` and `strip` show values; `lanes` shows who was in charge, bar by bar, of what was hidden.
Colours come from the page's style sheet by class, so a picture is right in light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

from echelon.evaluation.statistics.seeds import seed_interval

_WIDTH, _LEFT, _RIGHT = 1100, 300, 150
_ROW, _TOP, _BOTTOM = 26, 18, 30
_NEAR = 40


class Threshold(NamedTuple):
    """A vertical line at a value, and what stands above it."""

    value: float
    label: str


@dataclass(frozen=True)
class PolicyRow:
    """One row: the rings or ticks, the interval of their mean, what stands at its right end."""

    label: str
    values: tuple[float, ...]
    interval: tuple[float, float] | None = None
    right: str = ""
    strong: bool = False


class Lane(NamedTuple):
    """One of those a router chooses from: how it is called and the number it has in `chosen`."""

    label: str
    number: int


@dataclass(frozen=True)
class LaneWords:
    """Words around the lanes: what is hidden, its two states, heads of the figures at the right."""

    hidden: str
    up: str
    down: str
    in_charge: str
    of_that: str


class _Axis:
    """Values to places."""

    def __init__(
        self, values: Sequence[float], unit: Literal["share", "sharpe"], room: float | None = None
    ) -> None:
        """room: kept free at both ends; None: a little"""
        low, high = min(values), max(values)
        if room is None:
            room = 0.04 * (high - low) or 0.5
        self.low, self.high = low - room, high + room
        self.unit = unit

    def at(self, value: float) -> float:
        """The place of a value; what lies outside is drawn at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def ticks(self) -> list[float]:
        """About six round values."""
        rough = (self.high - self.low) / 6
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
        first = math.ceil(self.low / step)
        return [round(k * step, 10) for k in range(first, math.floor(self.high / step) + 1)]

    def text(self, value: float) -> str:
        """A tick's label."""
        if self.unit == "share":
            return f"{value:.0%}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def dots(
    rows: Sequence[PolicyRow], *, unit: Literal["share", "sharpe"], thresholds: Sequence[Threshold]
) -> str:
    """A ring a value, a dot at the mean, its interval, and the mean in figures at the right."""
    shown = [value for row in rows for value in row.values]
    shown += [line.value for line in thresholds] + [0.0]
    axis = _Axis(shown, unit)
    parts = []
    for k, row in enumerate(rows):
        y = _middle(k)
        strong = " strong" if row.strong else ""
        parts.append(_label(row, y))
        over_seeds = seed_interval(row.values)
        ends = row.interval or ((over_seeds.low, over_seeds.high) if over_seeds.n > 1 else None)
        if ends is not None:
            low, high = (axis.at(end) for end in ends)
            parts.append(f'<line class="reach{strong}" x1="{low}" x2="{high}" y1="{y}" y2="{y}"/>')
        if len(row.values) > 1:
            parts += [
                f'<circle class="ring{strong}" cx="{axis.at(v)}" cy="{y}" r="4"/>'
                for v in row.values
            ]
        mean = over_seeds.estimate
        parts.append(f'<circle class="mean{strong}" cx="{axis.at(mean)}" cy="{y}" r="5"/>')
        text = f"{mean:.1%}" if unit == "share" else f"{mean:.2f}"
        parts.append(_right(text, y, strong))
    return _svg(rows, axis, thresholds, parts)


def strip(rows: Sequence[PolicyRow], *, head: str) -> str:
    """A tick a value, and a line at zero."""
    axis = _Axis([value for row in rows for value in row.values] + [0.0], "sharpe")
    parts = [f'<text class="faint" x="{_WIDTH - _RIGHT + 24}" y="12">{escape(head)}</text>']
    for k, row in enumerate(rows):
        y = _middle(k)
        strong = " strong" if row.strong else ""
        parts.append(_label(row, y))
        parts += [
            f'<line class="tick{strong}" x1="{axis.at(v)}" x2="{axis.at(v)}" '
            f'y1="{y - 8}" y2="{y + 8}"/>'
            for v in row.values
        ]
        parts.append(_right(row.right, y, strong))
    return _svg(rows, axis, [Threshold(0.0, "")], parts)


def lanes(
    hidden: Sequence[int], chosen: Sequence[int], choices: Sequence[Lane], words: LaneWords
) -> str:
    """A band of what was hidden at each bar (±1), and below it a lane for each choice.

    A lane is filled where its choice was in charge, in the colour of what was hidden then: one of a
    single colour knows when it is its turn. Figures at the right: its share of the bars, and how
    much of that share lies in the first state.
    """
    assert len(hidden) == len(chosen) > 0, "a state and a choice for every bar"
    axis = _Axis([0.0, float(len(hidden))], "sharpe", room=0.0)
    left, right = _WIDTH - _RIGHT + 24, _WIDTH
    parts = [
        *_key("up", words.up, _LEFT),
        *_key("down", words.down, _LEFT + (_WIDTH - _LEFT - _RIGHT) // 2),
        f'<text class="faint" x="{left}" y="12">{escape(words.in_charge)}</text>',
        f'<text class="faint" x="{right}" y="12" text-anchor="end">{escape(words.of_that)}</text>',
    ]
    rows = [
        PolicyRow(words.hidden, (), strong=True),
        *(PolicyRow(lane.label, ()) for lane in choices),
    ]
    for k, row in enumerate(rows):
        y = _middle(k)
        number = choices[k - 1].number if k else None
        here = [number is None or choice == number for choice in chosen]
        parts.append(_label(row, y))
        for state, kind in ((1, "up"), (-1, "down")):
            runs = _runs([a and b == state for a, b in zip(here, hidden, strict=True)])
            drawn = "".join(
                f"M{axis.at(first)} {y - 8}H{axis.at(last)}v16H{axis.at(first)}z"
                for first, last in runs
            )
            if drawn:
                parts.append(f'<path class="{kind}" d="{drawn}"/>')
        bars = sum(here)
        up = sum(b == 1 for a, b in zip(here, hidden, strict=True) if a)
        if number is not None:
            parts.append(_right(f"{bars / len(hidden):.0%}", y, ""))
        parts.append(
            f'<text class="figure" x="{right}" y="{y + 4}" text-anchor="end">'
            f"{f'{up / bars:.0%}' if bars else '–'}</text>"
        )
    return _svg(rows, axis, [], parts)


def _runs(here: Sequence[bool]) -> list[tuple[int, int]]:
    """Stretches of true ones: the first, and the one after the last."""
    edges = [k for k in range(len(here)) if here[k] != (k > 0 and here[k - 1])]
    if here[-1]:
        edges.append(len(here))
    return list(zip(edges[::2], edges[1::2], strict=True))


def _key(kind: str, text: str, x: int) -> list[str]:
    """A square of a colour, and what it means."""
    return [
        f'<path class="{kind}" d="M{x} 3h10v10h-10z"/>',
        f'<text class="faint" x="{x + 16}" y="12">{escape(text)}</text>',
    ]


def _middle(k: int) -> int:
    return _TOP + _ROW * k + _ROW // 2


def _label(row: PolicyRow, y: int) -> str:
    strong = " class='strong'" if row.strong else ""
    return f'<text{strong} x="0" y="{y + 4}">{escape(row.label)}</text>'


def _right(text: str, y: int, strong: str) -> str:
    return (
        f'<text class="figure{strong}" x="{_WIDTH - _RIGHT + 24}" y="{y + 4}">{escape(text)}</text>'
    )


def _svg(
    rows: Sequence[PolicyRow], axis: _Axis, thresholds: Sequence[Threshold], parts: Sequence[str]
) -> str:
    bottom = _TOP + _ROW * len(rows)
    height = bottom + _BOTTOM
    grid = []
    for tick in axis.ticks():
        x = axis.at(tick)
        grid.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>')
        grid.append(
            f'<text class="faint" x="{x}" y="{bottom + 17}" text-anchor="middle">'
            f"{axis.text(tick)}</text>"
        )
    for threshold in thresholds:
        x = axis.at(threshold.value)
        grid.append(f'<line class="bar" x1="{x}" x2="{x}" y1="{_TOP - 3}" y2="{bottom}"/>')
        if threshold.label:
            anchor = _anchor(x, [axis.at(line.value) for line in thresholds])
            grid.append(
                f'<text class="bar-label" x="{x}" y="11" text-anchor="{anchor}">'
                f"{escape(threshold.label)}</text>"
            )
    label = escape("; ".join(row.label for row in rows))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        f"{''.join(grid)}{''.join(parts)}</svg>"
    )


def _anchor(x: float, places: Sequence[float]) -> str:
    """Labels of thresholds side by side grow away from one another."""
    if any(0 < place - x < _NEAR for place in places):
        return "end"
    return "start" if any(0 < x - place < _NEAR for place in places) else "middle"
