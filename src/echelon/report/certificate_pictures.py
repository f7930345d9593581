"""Pictures of the certificate as inline SVG: a line a policy, values along one axis.

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


class Mark(NamedTuple):
    """A vertical line at a value, and what stands above it."""

    value: float
    label: str


@dataclass(frozen=True)
class Line:
    """One line: the rings or ticks, the interval of their mean, what stands at its right end."""

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


def dots(lines: Sequence[Line], *, unit: Literal["share", "sharpe"], bars: Sequence[Mark]) -> str:
    """A ring a value, a dot at the mean, its interval, and the mean in figures at the right."""
    shown = [value for line in lines for value in line.values]
    shown += [bar.value for bar in bars] + [0.0]
    axis = _Axis(shown, unit)
    parts = []
    for k, line in enumerate(lines):
        y = _middle(k)
        strong = " strong" if line.strong else ""
        parts.append(_label(line, y))
        found = seed_interval(line.values)
        ends = line.interval or ((found.low, found.high) if found.n > 1 else None)
        if ends is not None:
            low, high = (axis.at(end) for end in ends)
            parts.append(f'<line class="reach{strong}" x1="{low}" x2="{high}" y1="{y}" y2="{y}"/>')
        if len(line.values) > 1:
            parts += [
                f'<circle class="ring{strong}" cx="{axis.at(v)}" cy="{y}" r="4"/>'
                for v in line.values
            ]
        mean = found.estimate
        parts.append(f'<circle class="mean{strong}" cx="{axis.at(mean)}" cy="{y}" r="5"/>')
        text = f"{mean:.1%}" if unit == "share" else f"{mean:.2f}"
        parts.append(_right(text, y, strong))
    return _svg(lines, axis, bars, parts)


def strip(lines: Sequence[Line], *, head: str) -> str:
    """A tick a value, and a line at zero."""
    axis = _Axis([value for line in lines for value in line.values] + [0.0], "sharpe")
    parts = [f'<text class="faint" x="{_WIDTH - _RIGHT + 24}" y="12">{escape(head)}</text>']
    for k, line in enumerate(lines):
        y = _middle(k)
        strong = " strong" if line.strong else ""
        parts.append(_label(line, y))
        parts += [
            f'<line class="tick{strong}" x1="{axis.at(v)}" x2="{axis.at(v)}" '
            f'y1="{y - 8}" y2="{y + 8}"/>'
            for v in line.values
        ]
        parts.append(_right(line.right, y, strong))
    return _svg(lines, axis, [Mark(0.0, "")], parts)


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
    lines = [Line(words.hidden, (), strong=True), *(Line(lane.label, ()) for lane in choices)]
    for k, line in enumerate(lines):
        y = _middle(k)
        number = choices[k - 1].number if k else None
        here = [number is None or one == number for one in chosen]
        parts.append(_label(line, y))
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
    return _svg(lines, axis, [], parts)


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


def _label(line: Line, y: int) -> str:
    strong = " class='strong'" if line.strong else ""
    return f'<text{strong} x="0" y="{y + 4}">{escape(line.label)}</text>'


def _right(text: str, y: int, strong: str) -> str:
    return (
        f'<text class="figure{strong}" x="{_WIDTH - _RIGHT + 24}" y="{y + 4}">{escape(text)}</text>'
    )


def _svg(lines: Sequence[Line], axis: _Axis, bars: Sequence[Mark], parts: Sequence[str]) -> str:
    bottom = _TOP + _ROW * len(lines)
    height = bottom + _BOTTOM
    grid = []
    for tick in axis.ticks():
        x = axis.at(tick)
        grid.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>')
        grid.append(
            f'<text class="faint" x="{x}" y="{bottom + 17}" text-anchor="middle">'
            f"{axis.text(tick)}</text>"
        )
    for bar in bars:
        x = axis.at(bar.value)
        grid.append(f'<line class="bar" x1="{x}" x2="{x}" y1="{_TOP - 3}" y2="{bottom}"/>')
        if bar.label:
            anchor = _anchor(x, [axis.at(other.value) for other in bars])
            grid.append(
                f'<text class="bar-label" x="{x}" y="11" text-anchor="{anchor}">'
                f"{escape(bar.label)}</text>"
            )
    label = escape("; ".join(line.label for line in lines))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        f"{''.join(grid)}{''.join(parts)}</svg>"
    )


def _anchor(x: float, places: Sequence[float]) -> str:
    """Labels of bars side by side grow away from one another."""
    if any(0 < other - x < _NEAR for other in places):
        return "end"
    return "start" if any(0 < x - other < _NEAR for other in places) else "middle"
