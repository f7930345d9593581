"""Pictures of a hierarchy for slides: who was in charge, how experts differ, who came from whom.

Of the main split and its median agent; each is drawn only where there is something to draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.dates import date2num
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from echelon.population.artefacts import PopulationHistory
from echelon.population.attribution import SUMMED, Attribution
from echelon.population.record import CommandRecord
from echelon.report.gather import Record, RunData
from echelon.report.hierarchy import commanding, router_sentence
from echelon.report.hierarchy_charts import choice_name, padded_range
from echelon.report.hierarchy_data import (
    DISTANCE_BARS,
    Plane,
    attribution_of,
    correlations,
    expert_role,
    family_tree,
    marked,
    plane,
    portfolio_plane,
    reigns,
    trailing_mean,
    usage_entropy,
)
from echelon.report.hierarchy_sayings import event_kind, said_name
from echelon.report.palette import LIGHT
from echelon.report.pictures import (
    date_axis,
    house_style,
    new_figure,
    save_pictures,
    span_text,
)
from echelon.report.population_charts import (
    LIFE_SYMBOLS,
    MOST_MARKED_ROUNDS,
    MOST_NAMED_MEMBERS,
    member_names,
)
from echelon.report.texts import Words
from echelon.types import Times

_THRESHOLD: dict[str, Any] = {"color": LIGHT["loss"], "linewidth": 1.5, "linestyle": "--"}


def draw_hierarchy(run: RunData, words: Words, directory: Path) -> None:
    """Write command.png and experts.png of a run that commands, population.png of one that has."""
    agents = commanding(run.main)
    with house_style(words) as said:
        pictures: dict[str, Figure] = {}
        if agents:
            pictures |= {
                "command": _command(run, agents[0], said),
                "experts": _experts(run, agents[0], said),
            }
        if run.populations:
            seed = agents[0].seed if agents and agents[0].seed in run.populations else None
            seed = next(iter(run.populations)) if seed is None else seed
            pictures["population"] = _population(run, seed, said)
        save_pictures(pictures, directory, words.lang)


def _expert_colour(k: int, experts: int) -> str:
    return LIGHT[expert_role(k, experts)]


def _who(run: RunData, agent: Record, words: Words) -> str:
    name = words.name(agent.key)
    if len(run.main.agents) > 1 and agent is run.main.median_agent:
        name = words("median_seed", name=name)
    return f"{name} · {span_text(run.main, words)}"


def _command(run: RunData, agent: Record, words: Words) -> Figure:
    record = agent.command
    assert record is not None
    figure = new_figure(run, words, words("command"), _who(run, agent, words))
    ratios = [3.3, 0.32, 0.85, 0.95]
    growth, band, used, apart = figure.subplots(4, 1, sharex=True, height_ratios=ratios)
    _draw_growth(growth, agent, record, words)
    _draw_band(band, agent.times, record, words)
    curve = usage_entropy(record)
    used.plot(curve.times, curve.values, color=LIGHT["accent"], linewidth=1.8)
    used.set_ylim(0, 1.05)
    used.set_ylabel(words("entropy_short"))
    distance = record.portfolios.distance
    apart.plot(record.times, distance, color=LIGHT["accent"], alpha=0.3, linewidth=0.7)
    mean = trailing_mean(distance, DISTANCE_BARS)
    apart.plot(
        record.times,
        mean,
        color=LIGHT["accent"],
        linewidth=1.8,
        label=words("trailing", n=DISTANCE_BARS),
    )
    threshold = run.config.trainer.diversity_threshold
    apart.axhline(threshold, **_THRESHOLD, label=words("threshold", value=f"{threshold:g}"))
    apart.set_ylim(bottom=0)
    apart.set_ylabel(words("mapd_axis"))
    apart.legend(loc="best", ncols=2, fontsize=9.5)
    for axes in (used, apart):
        axes.yaxis.set_major_locator(MaxNLocator(3))
    figure.align_ylabels([growth, used, apart])
    apart.set_xlim(_dates(agent.times[:1])[0], _dates(agent.times[-1:])[0])
    date_axis(apart)
    return figure


def _draw_growth(axes: Axes, agent: Record, record: CommandRecord, words: Words) -> None:
    """The real book, the experts' own, and marks of what risk control did."""
    experts = len(record.experts)
    own = record.own_values / record.own_values[0]
    handles: list[Line2D | Patch] = []
    for k, name in enumerate(record.choices):
        colour = _expert_colour(k, experts)
        if k < experts:
            axes.plot(agent.times, own[:, k], color=colour, linewidth=1.0)
        handles.append(Patch(color=colour, label=choice_name(name, k, record, words)))
    real = axes.plot(
        agent.times, agent.growth, color=LIGHT["accent"], linewidth=2.4, label=words("real_book")
    )
    signs: list[Line2D] = []
    for found in marked(record):
        frequent = found.mark.key == "mark_cut"
        rows = list(found.rows)
        hollow = found.mark.key == "mark_freed"
        # Cuts happen at every other bar: on the curve they would hide it.
        at_foot: dict[str, Any] = {"transform": axes.get_xaxis_transform()} if frequent else {}
        signs += axes.plot(
            agent.times[rows],
            np.full(len(rows), 0.018) if frequent else agent.growth[rows],
            **at_foot,
            linestyle="",
            marker=found.mark.matplotlib,
            markersize=5 if frequent else 9,
            color=LIGHT[found.mark.role],
            markerfacecolor="white" if hollow else LIGHT[found.mark.role],
            markeredgecolor=LIGHT[found.mark.role] if hollow or frequent else "white",
            markeredgewidth=1.4 if hollow else 0.8,
            clip_on=False,
            label=words(found.mark.key),
            zorder=3 if frequent else 5,
        )
    if signs:
        axes.add_artist(
            axes.legend(handles=signs, loc="upper left", fontsize=9.5, handletextpad=0.3)
        )
    # The last one made is the one that the layout leaves room for.
    axes.legend(
        handles=[*real, *handles],
        loc="lower left",
        ncols=len(handles) + 1 if len(handles) <= 8 else 6,
        bbox_to_anchor=(0, 1.0),
        fontsize=10,
        columnspacing=1.4,
        handlelength=1.4,
        borderaxespad=0.2,
    )
    axes.set_ylabel(words("growth"))
    axes.margins(x=0.0, y=0.06)


def _draw_band(axes: Axes, times: Times, record: CommandRecord, words: Words) -> None:
    experts = len(record.experts)
    for k in range(experts + 1):
        mine = [reign for reign in reigns(record) if reign.who == k]
        first = _dates(times[[reign.first for reign in mine]])
        stop = _dates(times[[reign.stop for reign in mine]])
        spans = list(zip(first.tolist(), (stop - first).tolist(), strict=True))
        axes.broken_barh(spans, (0, 1), color=_expert_colour(k, experts), linewidth=0)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel(words("in_charge"), rotation=0, ha="right", va="center", fontsize=9.5)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _dates(times: Times) -> np.ndarray:
    return np.asarray(date2num(times), dtype=np.float64)  # type: ignore[no-untyped-call]


def _experts(run: RunData, agent: Record, words: Words) -> Figure:
    record = agent.command
    assert record is not None
    found = attribution_of(run.main, agent, run.config)
    below = _who(run, agent, words)
    if found is not None:
        # A number is not parted from its sign where the line is broken.
        below += " · " + router_sentence(found.router, words).replace(" %", "\N{NO-BREAK SPACE}%")
    figure = new_figure(run, words, words("attribution"), below)
    (parts, related), (portfolios, skills) = figure.subplots(2, 2)
    if found is None:
        _say(parts, words("attribution"), words("attribution_none"))
    else:
        _draw_parts(parts, found, words)
    _draw_correlations(related, record, words)
    flat = portfolio_plane(record)
    _draw_plane(portfolios, flat, record.experts, words("portfolio_map"), words)
    history = run.populations.get(agent.seed) if agent.seed is not None else None
    if history is None:
        skills.set_visible(False)
    else:
        flat = plane(history.skills)
        _draw_plane(skills, flat, history.experts, words("skill_map"), words)
    return figure


def _say(axes: Axes, title: str, text: str) -> None:
    """An empty panel that says why."""
    axes.set_title(title, loc="left", fontsize=12)
    axes.text(0.5, 0.5, text, ha="center", va="center", wrap=True, color=LIGHT["soft"])
    axes.set_axis_off()


def _draw_parts(axes: Axes, found: Attribution, words: Words) -> None:
    parts = [*((name, found.parts[name]) for name in SUMMED), ("total", found.total)]
    for y, (name, part) in enumerate(parts):
        role = "accent" if name == "total" else "gain" if part.total >= 0 else "loss"
        axes.barh(y, part.total * 100, height=0.55, color=LIGHT[role], alpha=0.85, linewidth=0)
        if math.isfinite(part.low):
            low, high = part.low * 100, part.high * 100
            axes.plot([low, high], [y, y], color=LIGHT["ink"], linewidth=1.2, marker="|", ms=7)
    axes.axvline(0, color=LIGHT["soft"], linewidth=1)
    axes.set_yticks(range(len(parts)), [words(f"part_{name}") for name, _ in parts])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
    axes.set_xlabel(words("log_return_axis"))
    title = f"{words('over_run')} · {words('interval_95')}"
    axes.set_title(title, loc="left", fontsize=12)


def _draw_correlations(axes: Axes, record: CommandRecord, words: Words) -> None:
    found = correlations(record)
    names = [said_name(name, words) for name in record.experts]
    scale = LinearSegmentedColormap.from_list("", [LIGHT["loss"], "#ffffff", LIGHT["gain"]])
    axes.imshow(found, cmap=scale, vmin=-1, vmax=1, aspect="auto")
    size = 11.0 if len(names) <= 6 else 8.0
    if len(names) <= 12:
        for row, col in np.ndindex(found.shape):
            value = found[row, col]
            if math.isfinite(value):
                ink = "#ffffff" if abs(value) > 0.75 else LIGHT["ink"]
                text = f"{value:.2f}".replace("-", "−")
                axes.text(col, row, text, ha="center", va="center", fontsize=size, color=ink)
    turned = 0 if len(names) <= 6 else 60
    axes.set_xticks(range(len(names)), names, rotation=turned, fontsize=9.5)
    axes.set_yticks(range(len(names)), names, fontsize=9.5)
    axes.set_xticks(np.arange(-0.5, len(names)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(names)), minor=True)
    axes.tick_params(which="both", length=0)
    axes.grid(visible=False)
    axes.grid(which="minor", color="#ffffff", linewidth=2.5)
    axes.spines[:].set_visible(False)
    axes.set_title(words("correlations"), loc="left", fontsize=12)


def _draw_plane(
    axes: Axes, found: Plane | None, names: Sequence[str], title: str, words: Words
) -> None:
    if found is None:
        _say(axes, title, words("no_map"))
        return
    limits = [padded_range(found.points[:, n], 0.22) for n in range(2)]
    axes.set(xlim=limits[0], ylim=limits[1])
    for k, down in enumerate(_below(found, limits)):
        x, y = found.points[k]
        axes.plot(
            x, y, "o", color=_expert_colour(k, len(names)), markersize=11, markeredgecolor="white"
        )
        axes.annotate(
            said_name(names[k], words),
            (x, y),
            xytext=(0, -9 if down else 8),
            textcoords="offset points",
            ha="center",
            va="top" if down else "bottom",
            fontsize=10,
        )
    first, second = (
        words("component", n=n + 1, share=f"{share:.0%}")
        for n, share in enumerate(found.explained.tolist())
    )
    axes.set_xlabel(first, fontsize=9.5)
    axes.set_ylabel(second, fontsize=9.5)
    axes.locator_params(nbins=5)
    axes.set_title(title, loc="left", fontsize=12)


def _below(found: Plane, limits: Sequence[Sequence[float]]) -> list[bool]:
    """Whether a point's name goes below it: where another point lies closely above."""
    wide, high = (limit[1] - limit[0] for limit in limits)
    out = [False] * len(found.points)
    for one, other in combinations(range(len(out)), 2):
        dx, dy = np.abs(found.points[one] - found.points[other]) / (wide, high)
        if dx < 0.22 and dy < 0.13:
            lower = one if found.points[one, 1] < found.points[other, 1] else other
            out[lower] = True
    return out


def _population(run: RunData, seed: int, words: Words) -> Figure:
    history = run.populations[seed]
    below = f"{words('seed_n', seed=seed)} · {words('lineage_note')}"
    figure = new_figure(run, words, words("population"), below)
    grid = figure.add_gridspec(2, 3, height_ratios=[1, 1.9])
    mapd, entropies, fitness = (figure.add_subplot(grid[0, n]) for n in range(3))
    rounds = [one.round for one in history.rounds]
    threshold, floor = run.config.trainer.diversity_threshold, run.config.meta_router.entropy_floor
    most = math.log(len(history.experts)) or 1.0
    panels = (
        (
            mapd,
            words("mapd_axis"),
            ([one.round for one in history.watched], [one.mapd for one in history.watched]),
            threshold,
            words("threshold", value=f"{threshold:g}"),
        ),
        (
            entropies,
            words("usage_entropy_rounds"),
            (rounds, [one.usage_entropy / most for one in history.rounds]),
            floor,
            words("entropy_floor", value=f"{floor:g}"),
        ),
    )
    for axes, title, (at, values), line, name in panels:
        axes.plot(at, values, color=LIGHT["accent"], linewidth=1.8, **_points(at))
        axes.axhline(line, **_THRESHOLD, label=name)
        axes.legend(loc="best", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=12)
    for k, name in enumerate(history.experts):
        colour = _expert_colour(k, len(history.experts))
        values = [one.fitness[k] for one in history.rounds]
        label = said_name(name, words)
        fitness.plot(rounds, values, color=colour, linewidth=1.6, label=label, **_points(rounds))
    fitness.set_title(words("fitness"), loc="left", fontsize=12)
    # The lineage below names the same colours.
    if not history.lineage and len(history.experts) <= 8:
        fitness.legend(fontsize=8.5, loc="best", handlelength=1.2)
    for axes in (mapd, entropies, fitness):
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _draw_lineage(figure.add_subplot(grid[1, :]), history, words)
    return figure


def _points(rounds: Sequence[int]) -> dict[str, Any]:
    """Marks on a line of so few rounds that they can be told apart."""
    return {"marker": "o", "ms": 4} if len(rounds) <= MOST_MARKED_ROUNDS else {}


def _draw_lineage(axes: Axes, history: PopulationHistory, words: Words) -> None:
    tree = family_tree(history)
    if tree is None:
        axes.set_visible(False)
        return
    handles: list[Line2D] = []
    for branch in tree.branches:
        colour = _expert_colour(branch.niche, 10**6)
        axes.plot([branch.first, branch.last], [branch.member] * 2, color=colour, linewidth=2.2)
    for weights, key, style in ((True, "copy_weights", "-"), (False, "copy_hyper", ":")):
        found = [copy for copy in tree.copies if copy.weights is weights]
        look: dict[str, Any] = {"color": LIGHT["soft"], "linewidth": 1.2, "linestyle": style}
        for copy in found:
            axes.plot([copy.at - tree.lead, copy.at], [copy.source, copy.member], **look)
        if found:
            handles.append(Line2D([], [], label=words(key), **look))
    kinds = [*LIFE_SYMBOLS, *sorted({b.kind for b in tree.branches} - set(LIFE_SYMBOLS))]
    for kind in kinds:
        lives = [branch for branch in tree.branches if branch.kind == kind]
        if not lives:
            continue
        ink = LIGHT["loss" if kind == "reseed" else "ink"]
        hollow = kind == "propose"
        handles += axes.plot(
            [branch.mark for branch in lives],
            [branch.member for branch in lives],
            linestyle="",
            marker=LIFE_SYMBOLS.get(kind, ("diamond", "D"))[1],
            markersize=10 if kind == "reseed" else 6.5,
            color=ink,
            markerfacecolor="white" if hollow else ink,
            markeredgecolor=ink if hollow else "white",
            markeredgewidth=1.3 if hollow else 0.7,
            label=event_kind(kind, words),
            zorder=4,
            clip_on=False,
        )
    names = member_names(history, words)
    step = -(-tree.members // MOST_NAMED_MEMBERS)
    size = 9.5 if tree.members <= 16 else 6.5
    axes.set_yticks(range(0, tree.members, step), names[::step], fontsize=size)
    axes.set_ylim(tree.members - 0.4, -0.6)
    axes.set_xlim(-0.01 * tree.last, 1.01 * tree.last + 0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(words("round"))
    axes.set_title(words("lineage"), loc="left", fontsize=12)
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        fontsize=9,
        columnspacing=1.2,
        handletextpad=0.4,
        borderaxespad=0.2,
    )
