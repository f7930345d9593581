"""The slides of a run, as files: equity, monthly returns, holdings, training, and a hierarchy's."""

from __future__ import annotations

from pathlib import Path

from echelon.report.charts.books import book_slides
from echelon.report.charts.hierarchy import hierarchy_slides
from echelon.report.charts.population import population_slide
from echelon.report.charts.slides import Slide, draw_slide, slide_words
from echelon.report.charts.training import training_slide
from echelon.report.hierarchy.data import commanding_agents
from echelon.report.run.gather import RunData
from echelon.report.texts import Words, file_name


def draw_slides(run: RunData, words: Words, directory: Path) -> None:
    """Write every slide as NAME.png, or as its name is in the language of `words`."""
    said = slide_words(words)
    for name, slide in run_slides(run, said).items():
        path = directory / file_name(name, "png", words.lang)
        path.write_bytes(draw_slide(slide, said.lang))


def run_slides(run: RunData, words: Words) -> dict[str, Slide]:
    """Slides of the main split and its median agent; a hierarchy's where there is one."""
    slides = book_slides(run, words) | {"training": training_slide(run, words)}
    agents = commanding_agents(run.main)
    if agents:
        slides |= hierarchy_slides(run, agents[0], words)
    if run.populations:
        seed = agents[0].seed if agents and agents[0].seed in run.populations else None
        seed = next(iter(run.populations)) if seed is None else seed
        slides["population"] = population_slide(run, seed, words)
    return slides
