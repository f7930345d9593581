"""Pages as data: blocks that print themselves through templates, and the frame around them.

A block is a frozen dataclass; the macro of its name in templates/blocks.html is its HTML. Strings
in it are escaped, blocks in it print themselves, so that nothing else writes HTML. A page is one
file: style, script and charts are inside, and its own security policy forbids every connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from echelon.report.charts.chart import Chart
from echelon.report.charts.interactive import PlotlyTree, page_chart
from echelon.report.charts.palette import DARK, LIGHT, css_variables
from echelon.report.texts import Words, file_name

_TITLES: Mapping[str, tuple[str, str]] = {"en": ("en", "English"), "zh": ("zh-CN", "中文")}
"""Language → its code in HTML, and its own name."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SCRIPT = "; script-src 'unsafe-inline'; img-src data: blob:; font-src data:"
"""What charts need besides: plotly.js draws and saves pictures through data: and blob: only."""


class Block:
    """Something on a page."""

    def __html__(self) -> str:
        """HTML of the block, which templates print as it is."""
        return str(getattr(_macros(), type(self).__name__.lower())(self))


Content = str | Block
Body = Sequence[Content | None]
"""Blocks one below the other; None: nothing."""


@dataclass(frozen=True)
class Card(Block):
    """A titled box. note: below the title; tools: next to it"""

    title: str
    note: str
    body: Body
    tools: Body = ()


@dataclass(frozen=True)
class Summary(Block):
    """The box that a page or a split begins with."""

    eyebrow: str
    body: Body


@dataclass(frozen=True)
class Section(Block):
    """All of one split. tab: whether a tab of the page shows it"""

    name: str
    body: Body
    tab: bool = False


@dataclass(frozen=True)
class Part(Block):
    """A part of a card, below a small title."""

    title: str
    body: Body


@dataclass(frozen=True)
class Two(Block):
    """Two parts side by side, where there is room."""

    left: Block
    right: Block


@dataclass(frozen=True)
class Folded(Block):
    """What a click on its title shows."""

    title: str
    body: Body


@dataclass(frozen=True)
class Text(Block):
    """A paragraph. kind: its class"""

    text: str
    kind: str = "note"


@dataclass(frozen=True)
class Lead(Block):
    """The first sentences, large. badge: before the first of them"""

    lines: Sequence[str]
    badge: Badge | None = None


@dataclass(frozen=True)
class Source(Block):
    """A text that keeps its lines."""

    text: str


@dataclass(frozen=True)
class ChartBox(Block):
    """A chart, or several by key of which a `Choice` of the same key shows one."""

    key: str
    chart: Chart | Mapping[str, Chart]


@dataclass(frozen=True)
class Picture(Block):
    """A picture below its title. svg: markup of our own"""

    title: str
    svg: Markup


@dataclass(frozen=True)
class Panes(Block):
    """Blocks by key, of which the one chosen in `Choice` is seen; at first the first."""

    group: str
    blocks: Mapping[str, Block]


@dataclass(frozen=True)
class Choice(Block):
    """A list to choose one of several from, key → name; nothing where there is only one."""

    group: str
    names: Mapping[str, str]
    label: str


@dataclass(frozen=True)
class Buttons(Block):
    """Buttons that change the chart `key`. titles: value → what the button says"""

    kind: str
    key: str
    titles: Mapping[str, str]
    pressed: str


@dataclass(frozen=True)
class Badge(Block):
    """A verdict in a word. kind: good, bad or neutral"""

    text: str
    kind: str


@dataclass(frozen=True)
class Named(Block):
    """A name. meaning: shown on hover; colour: of a swatch before it"""

    text: str
    meaning: str = ""
    strong: bool = False
    colour: str = ""


@dataclass(frozen=True)
class Cell(Block):
    """A cell of a table that is more than its text.

    kind: its class; why: shown on hover; small: below the text; strength: of its colour, per cent
    """

    text: str
    kind: str = ""
    why: str = ""
    small: str = ""
    strength: str = ""
    columns: int = 1


@dataclass(frozen=True)
class Table(Block):
    """A table; the first cell of a row is its heading.

    groups: heads over the columns; then every group has all columns of `head` but the first
    """

    head: Sequence[Content]
    rows: Sequence[Sequence[Content]]
    kind: str = "measures"
    groups: Sequence[Content] = ()


@dataclass(frozen=True)
class Tall(Block):
    """A long table, in a box that scrolls."""

    table: Table


@dataclass(frozen=True)
class Facts(Block):
    """Titles with lines of plain text. code: titles of what is set in a fixed width"""

    rows: Mapping[str, Sequence[str]]
    code: frozenset[str] = frozenset()


class Headline(NamedTuple):
    """A measure in large: the agent's value with its spread, and the values of others."""

    name: str
    meaning: str
    value: str
    spread: str
    others: Mapping[str, str]


@dataclass(frozen=True)
class Headlines(Block):
    """Measures side by side."""

    items: Sequence[Headline]


class Tab(NamedTuple):
    """A tab of a page: name of its section, title, and the span below it."""

    name: str
    title: str
    span: str


@dataclass(frozen=True)
class Page:
    """A whole page.

    stem: of the names of its files in all languages; written: languages that there are pages in
    interactive: whether it has charts; else it has no script
    """

    stem: str
    title: str
    eyebrow: str
    body: Body
    footer: str
    tabs: Sequence[Tab] = ()
    written: Sequence[str] = ()
    interactive: bool = True

    def render(self, words: Words) -> str:
        """HTML of the page."""
        sheets = ["style.css"] if self.interactive else ["style.css", "certificate.css"]
        own = {"policy": _POLICY, "style": "\n".join([css_variables(), *map(_read, sheets)])}
        own |= dict.fromkeys(("script", "data", "plotly"), "")
        if self.interactive:
            own |= {"policy": _POLICY + _SCRIPT, "script": _read("script.js")}
            own |= {"data": self._data(), "plotly": get_plotlyjs()}
        template = _templates().get_template("page.html")
        return template.render(
            page=self,
            language=_TITLES[words.lang][0],
            links=list(self._links(words.lang)),
            tabs_label=words("title"),
            no_script=words("no_script"),
            **{name: Markup(text) for name, text in own.items()},  # noqa: S704 (no user's text)
        )

    def _links(self, lang: str) -> Iterator[dict[str, str]]:
        """Links to the page in other languages."""
        for name, (code, title) in _TITLES.items():
            if name in self.written and name != lang:
                file = file_name(self.stem, "html", name)
                yield {"file": file, "code": code, "name": title}

    def _data(self) -> str:
        """What the script reads, as JSON that cannot end the script element it stands in."""
        charts = {box.key: _tree(box.chart) for box in chart_boxes(self.body)}
        tree = {"palette": {"light": dict(LIGHT), "dark": dict(DARK)}, "charts": charts}
        text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c")


def chart_boxes(content: object) -> Iterator[ChartBox]:
    """Every chart in a block, or in blocks."""
    if isinstance(content, ChartBox):
        yield content
    elif isinstance(content, Block):
        for field in fields(content):  # type: ignore[arg-type]
            yield from chart_boxes(getattr(content, field.name))
    elif isinstance(content, Mapping):
        yield from chart_boxes(list(content.values()))
    elif isinstance(content, list | tuple):
        for part in content:
            yield from chart_boxes(part)


def _tree(chart: Chart | Mapping[str, Chart]) -> PlotlyTree:
    if isinstance(chart, Chart):
        return page_chart(chart)
    return {"variants": {key: page_chart(variant) for key, variant in chart.items()}}


def _read(name: str) -> str:
    return files("echelon.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("echelon.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.tests["cell"] = lambda value: isinstance(value, Cell)
    return templates


@cache
def _macros() -> Any:  # noqa: ANN401 (a template's macros have no type)
    return _templates().get_template("blocks.html").module
