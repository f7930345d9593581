"""Charts of a population in training: how different, how fit, who came from whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from echelon.config import Config
from echelon.population.record import PopulationHistory
from echelon.report.charts.chart import Axis, Chart, Curve, Layer, Plot, Points, RefLine
from echelon.report.charts.slides import Slide
from echelon.report.hierarchy import FamilyTree, expert_role, family_tree
from echelon.report.run.gather import RunData
from echelon.report.texts import Words

LIFE_SYMBOLS: Mapping[str, str] = {
    "founder": "circle",
    "exploit": "triangle-up",
    "migrate": "triangle-right",
    "borrow": "square",
    "propose": "circle-open",
    "keep": "cross",
    "revert": "triangle-left",
    "reseed": "star",
}


def rounds_chart(history: PopulationHistory, config: Config, words: Words) -> Chart:
    """MAPD, population volume, entropy of usage and fitness by round, a plot each."""
    mapd, entropy, fitness = _round_plots(history, config, words)
    watched = [look.round for look in history.watched]
    volumes = [look.volume for look in history.watched]
    volume = _round_plot([_round_line(watched, volumes, words("volume"))], words("volume"))
    with_title = [
        replace(plot, x=replace(plot.x, title=words("round"))) for plot in (entropy, fitness)
    ]
    return Chart(((mapd, volume), with_title), 520)


def _round_plots(
    history: PopulationHistory, config: Config, words: Words
) -> tuple[Plot, Plot, Plot]:
    threshold, floor = config.trainer.diversity_threshold, config.meta_router.entropy_floor
    rounds = [r.round for r in history.rounds]
    watched = [look.round for look in history.watched]
    most = math.log(len(history.experts)) or 1.0
    entropies = [r.usage_entropy / most for r in history.rounds]
    mapd: list[Layer] = [
        _round_line(watched, [look.mapd for look in history.watched], "MAPD"),
        RefLine(threshold, name=words("threshold", value=f"{threshold:g}"), role="loss"),
    ]
    used: list[Layer] = [
        _round_line(rounds, entropies, words("usage_entropy")),
        RefLine(floor, name=words("entropy_floor", value=f"{floor:g}"), role="loss"),
    ]
    fitness: list[Layer] = []
    for k, name in enumerate(history.experts):
        line = _round_line(rounds, [r.fitness[k] for r in history.rounds], words.who(name))
        role = expert_role(k, len(history.experts))
        fitness.append(replace(line, role=role, width=1.6, listed=True))
    return (
        _round_plot(mapd, words("mapd_axis")),
        _round_plot(used, words("usage_entropy_rounds")),
        replace(_round_plot(fitness, words("fitness")), y=Axis(ticks=5)),
    )


def _round_line(rounds: Sequence[int], values: Sequence[float], name: str) -> Curve:
    few = len(rounds) <= 20  # a round alone would not be seen on a line
    return Curve(rounds, values, 2.0, marked=few, name=name, listed=False)


def _round_plot(layers: Sequence[Layer], title: str) -> Plot:
    x = Axis(form="integer", ticks=6)
    return Plot(layers, x, Axis(low=0, ticks=5), title, legend="inside")


def lineage_chart(history: PopulationHistory, words: Words) -> Chart | None:
    """The family tree: a line a member, rounds from left to right, what was copied from whom."""
    tree = family_tree(history)
    if tree is None:
        return None
    height = 110 + max(200, min(22 * tree.members, 900))
    return Chart([[_lineage_plot(tree, history, words)]], height, hover="closest")


def _lineage_plot(tree: FamilyTree, history: PopulationHistory, words: Words) -> Plot:
    """Lives as lines, a layer a niche; copies as lines between members; decisions as symbols."""
    lives: dict[int, tuple[list[float], list[float]]] = {}
    for branch in tree.branches:
        life = branch.life
        x, y = lives.setdefault(life.niche, ([], []))
        x += [life.round, branch.last, math.nan]
        y += [life.member, life.member, math.nan]
    layers: list[Layer] = [
        Curve(x, y, 2.4, role=expert_role(niche, 10**6), hover="")
        for niche, (x, y) in lives.items()
    ]
    for weights, key, role in ((True, "copy_weights", "soft"), (False, "copy_hyper", "faint")):
        copies = [copy for copy in tree.copies if copy.weights is weights]
        x = [v for c in copies for v in (c.at - tree.lead, c.at, math.nan)]
        y = [v for c in copies for v in (c.source, c.member, math.nan)]
        if copies:
            line = Curve(x, y, 1.3, name=words(key), role=role, hover="")
            layers.append(line if weights else replace(line, dash="dot"))
    for kind in [*LIFE_SYMBOLS, *sorted({b.life.kind for b in tree.branches} - set(LIFE_SYMBOLS))]:
        decided = [branch for branch in tree.branches if branch.life.kind == kind]
        if decided:
            name, restart = words.event_kind(kind), kind == "reseed"
            marks = np.array([branch.mark for branch in decided])
            members = [branch.life.member for branch in decided]
            symbol = LIFE_SYMBOLS.get(kind, "diamond")
            points = Points(marks, members, symbol, 13.0 if restart else 9.0, name=name)
            texts = [f"{name}, {words('round')} {branch.life.round}" for branch in decided]
            layers.append(replace(points, role="loss" if restart else "ink", texts=texts))
    low, high = -0.02 * tree.last - 0.5, 1.02 * tree.last + 0.5
    rounds = Axis(words("round"), form="integer", low=low, high=high)
    return Plot(layers, rounds, Axis(labels=member_names(history, words)), legend="above")


def member_names(history: PopulationHistory, words: Words) -> list[str]:
    """[M] what members are called: as their expert, with a number where a niche has several."""
    niches: dict[int, list[int]] = {}
    for life in history.lineage:
        members = niches.setdefault(life.niche, [])
        if life.member not in members:
            members.append(life.member)
    names = [""] * history.members
    for niche, members in niches.items():
        named = niche < len(history.experts)
        name = words.who(history.experts[niche]) if named else f"niche {niche}"
        for place, member in enumerate(sorted(members)):
            names[member] = name if len(members) == 1 else f"{name} · {place + 1}"
    return names


def population_slide(run: RunData, key: str, words: Words) -> Slide:
    """Rounds above, lineage below. key: of the agent whose population it is"""
    history = run.populations[key]
    mapd, entropy, fitness = _round_plots(history, run.config, words)
    tree = family_tree(history)
    if tree is not None or len(history.experts) > 8:
        # The lineage names the same colours.
        fitness = replace(fitness, legend="none")
    rows = [[mapd, entropy, fitness]]
    if tree is not None:
        rows.append([replace(_lineage_plot(tree, history, words), title=words("lineage"))])
    below = f"{words.name(key)} · {words('lineage_note')}"
    ratios = (1.0, 1.9)[: len(rows)]
    return Slide(f"{run.name} · {words('population')}", below, Chart(rows, 0, ratios))
