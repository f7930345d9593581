"""Write the report of a trained run: one HTML file, and pictures for slides.

    RUN/report/report.html      everything, self-contained; in Chinese report.zh.html
    RUN/report/equity.png       equity and drawdown on the main split
    RUN/report/monthly.png, holdings.png, training.png
    RUN/report/command.png, experts.png, population.png   of a hierarchy

Pictures in Chinese are equity.zh.png and so on. What is there in another language stays as it is.

The directory is made next to its place and moved there whole. The same results give the same page,
byte for byte: no clock of the report's own is written into it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from echelon.errors import StoreError
from echelon.files import (
    exclusive_lock,
    link_or_copy,
    recover_directory,
    staging_directory,
    swap_directory,
    sync_tree,
)
from echelon.report.charts.run import draw_slides
from echelon.report.run.gather import gather
from echelon.report.run.page import STEM, render
from echelon.report.texts import Words, file_name, language_of, languages_with


def write_report(run: Path, splits: Sequence[str] | None = None, lang: str = "en") -> Path:
    """Write RUN/report and return the path of the page asked for.

    splits: of test, valid and train; None: all the run was evaluated on
    lang: en or zh
    """
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


def command_for(run: Path, splits: Sequence[str] | None, lang: str) -> str:
    """The command that makes the report, as the report names it."""
    parts = ["echelon", "report", str(run)]
    for split in splits or ():
        parts += ["--split", split]
    if lang != "en":
        parts += ["--lang", lang]
    return shlex.join(parts)
