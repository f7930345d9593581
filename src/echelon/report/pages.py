"""Pages: templates filled with tables and charts.

templates/page.html is the frame of every page and templates/blocks.html has the parts that pages
share; a page's own template says what is on it, in what order. Strings are escaped. A table, and a
cell of one that is more than text, prints itself through the macro of its class's name. A page is
one file: style, script and charts are inside, and its own security policy forbids every connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from echelon.report.charts.chart import DARK, LIGHT, Chart, Plot, css_variables
from echelon.report.charts.interactive import PlotlyTree, page_chart
from echelon.report.texts import Words, file_name

_TITLES = {"en": ("en", "English"), "zh": ("zh-CN", "中文")}
"""Language → its code in HTML, and its own name."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SCRIPT = "; script-src 'unsafe-inline'; img-src data: blob:; font-src data:"
"""What charts need besides: plotly.js draws and saves pictures through data: and blob: only."""


class Block:
    """Something that prints itself."""

    def __html__(self) -> str:
        return str(getattr(_macros(), type(self).__name__.lower())(self))


Content = str | Block


@dataclass(frozen=True)
class Named(Block):
    """A name. meaning: shown on hover; colour: of a swatch before it"""

    text: str
    meaning: str = ""
    strong: bool = False
    colour: str = ""


@dataclass(frozen=True)
class Cell(Block):
    """A cell that is more than its text. why: on hover; small: below; strength: of its colour, %"""

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


def headed_table(
    words: Words,
    prefix: str,
    names: Sequence[str],
    rows: Iterable[Sequence[Content]],
    kind: str = "",
) -> Table | None:
    """A table whose heads are the texts PREFIX_NAME; None: there are no rows."""
    every = list(rows)
    head = [words(f"{prefix}_{name}") for name in names]
    return Table(head, every, f"measures {kind}".strip()) if every else None


class NotedTable(NamedTuple):
    """A table, and what must be said of it."""

    table: Table
    note: str


class Headline(NamedTuple):
    """A measure in large: the agent's value with its spread, and the values of others."""

    name: str
    meaning: str
    value: str
    spread: str
    others: Mapping[str, str]


def render_page(
    name: str,
    words: Words,
    title: str,
    *,
    stem: str,
    written: Sequence[str] = (),
    interactive: bool = True,
    **context: object,
) -> str:
    """The page of templates/NAME.html.

    stem: of the names of its files in all languages; written: languages that there are pages in
    interactive: whether it has charts; else it has no script
    """
    links = [
        {"file": file_name(stem, "html", lang), "code": code, "name": own}
        for lang, (code, own) in _TITLES.items()
        if lang in written and lang != words.lang
    ]
    sheets = ["style.css"] if interactive else ["style.css", "certificate.css"]
    frame = {"policy": _POLICY, "style": "\n".join([css_variables(), *map(_read, sheets)])}
    frame |= dict.fromkeys(("script", "plotly"), "")
    if interactive:
        frame |= {"policy": _POLICY + _SCRIPT, "script": _read("script.js")}
        frame |= {"plotly": get_plotlyjs()}
    return render_part(
        name,
        words,
        title=title,
        language=_TITLES[words.lang][0],
        links=links,
        **{key: Markup(text) for key, text in frame.items()},  # noqa: S704 (no user's text)
        **context,
    )


def render_part(name: str, words: Words, **context: object) -> str:
    """templates/NAME.html, which has `words`, `chart` and `chart_data` besides its context."""
    trees: dict[str, PlotlyTree] = {}

    def chart(key: str, drawn: Chart | Plot | Mapping[str, Chart], **look: Any) -> Markup:  # noqa: ANN401 (fields of Chart)
        """The place of a chart, or of several by key of which a choice of that key shows one."""
        if isinstance(drawn, Plot):
            drawn = Chart([[drawn]], **look)
        charts = [drawn] if isinstance(drawn, Chart) else list(drawn.values())
        trees[key] = (
            page_chart(drawn)
            if isinstance(drawn, Chart)
            else {"variants": {variant: page_chart(own) for variant, own in drawn.items()}}
        )
        place = Markup('<div class="chart" data-chart="{}"></div>')
        if any(len(row) > 1 for chart in charts for row in chart.rows):
            # Plots side by side have no room on a phone: there they scroll, as wide tables do.
            place = Markup(
                '<div class="scroll"><div class="chart several" data-chart="{}"></div></div>'
            )
        return place.format(key)

    def chart_data() -> Markup:
        """Charts so far, as JSON that cannot end the script element it stands in."""
        tree = {"palette": {"light": dict(LIGHT), "dark": dict(DARK)}, "charts": trees}
        text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return Markup(text.replace("<", "\\u003c"))  # noqa: S704 (nothing in it is markup)

    template = _templates().get_template(f"{name}.html")
    return template.render(words=words, chart=chart, chart_data=chart_data, **context)


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
