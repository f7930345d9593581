"""The report of a trained run: one HTML page, and pictures for slides.

    RUN/report/report.html      everything, self-contained; in Chinese report.zh.html
    RUN/report/equity.png       equity and drawdown on the main split
    RUN/report/monthly.png, holdings.png, training.png
    RUN/report/command.png, experts.png, population.png   of a hierarchy

Pictures in Chinese are equity.zh.png and so on. What is there in another language stays as it is.
templates/run.html says what is on the page.

The directory is made next to its place and moved there whole. The same results give the same page,
byte for byte: no clock of the report's own is written into it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.errors import StoreError
from echelon.files import (
    exclusive_lock,
    link_or_copy,
    recover_directory,
    staging_directory,
    swap_directory,
    sync_tree,
)
from echelon.report import hierarchy
from echelon.report.charts import books as charts
from echelon.report.charts import hierarchy as hierarchy_charts
from echelon.report.charts.slides import Slide, draw_slide, slide_words
from echelon.report.pages import render_page
from echelon.report.rules import idle_text, recorded_rules
from echelon.report.run import tables, trust
from echelon.report.run.facts import CODE, run_facts
from echelon.report.run.gather import RunData, gather
from echelon.report.texts import Words, file_name, language_of, languages_with

STEM = "report"
"""Of the names of a page in all languages."""
PARTS: dict[str, Any] = {
    "charts": charts,
    "tables": tables,
    "trust": trust,
    "hierarchy": hierarchy,
    "hierarchy_charts": hierarchy_charts,
    "idle_text": idle_text,
    "recorded_rules": recorded_rules,
    "code": CODE,
}
"""What templates of results take their tables, charts and texts from."""


def write_report(run: Path, splits: Sequence[str] | None = None, lang: str = "en") -> Path:
    """Write RUN/report; returns the path of the page. splits: None: all it was evaluated on"""
    words = Words(lang)
    data = gather(run, splits)
    target = run / "report"
    with exclusive_lock(run / ".report.lock", f"the report of {run}"):
        recover_directory(target)
        written = languages_with(target, STEM, lang)
        page = render(data, words, command_for(run, splits, lang), written)
        try:
            with staging_directory(run, ".report-") as staging:
                (staging / file_name(STEM, "html", lang)).write_text(page, encoding="utf-8")
                draw_slides(data, words, staging)
                for file in target.iterdir() if target.is_dir() else ():
                    if file.is_file() and language_of(file.name) != lang:
                        link_or_copy(file, staging / file.name)
                sync_tree(staging)
                swap_directory(staging, target)
        except OSError as error:
            raise StoreError(
                f"{target}: cannot be written ({error.strerror or error}). Make room or mend the "
                f"disk, then run `echelon report {run}` again."
            ) from error
    return target / file_name(STEM, "html", lang)


def command_for(path: Path, splits: Sequence[str] | None, lang: str) -> str:
    """The command that makes the report, as the report names it."""
    parts = ["echelon", "report", str(path)]
    for split in splits or ():
        parts += ["--split", split]
    if lang != "en":
        parts += ["--lang", lang]
    return shlex.join(parts)


def render(run: RunData, words: Words, command: str, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    facts = run_facts(run, words, command)
    own = {"run": run, "facts": facts}
    return render_page("run", words, run.name, stem=STEM, written=written, **PARTS | own)


def draw_slides(run: RunData, words: Words, directory: Path) -> None:
    said = slide_words(words)
    for name, slide in run_slides(run, said).items():
        path = directory / file_name(name, "png", words.lang)
        path.write_bytes(draw_slide(slide, said.lang))


def run_slides(run: RunData, words: Words) -> dict[str, Slide]:
    """Slides of the main split and its median agent; a hierarchy's where there is one."""
    slides = charts.book_slides(run, words) | {"training": charts.training_slide(run, words)}
    agents = hierarchy.commanding_agents(run.main)
    if agents:
        slides |= hierarchy_charts.hierarchy_slides(run, next(iter(agents.values())), words)
    if run.populations:
        first = next(iter(agents), "")
        key = first if first in run.populations else next(iter(run.populations))
        slides["population"] = hierarchy_charts.population_slide(run, key, words)
    return slides
