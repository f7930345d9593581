"""Interactive charts of a population in training: how different, how fit, who came from whom."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from echelon.population.artefacts import PopulationHistory
from echelon.report.figures import (
    Figure,
    axis,
    axis_title,
    colour,
    legend_above,
    make_layout,
    numbers,
    panel_title,
)
from echelon.report.hierarchy_charts import threshold_line
from echelon.report.hierarchy_data import Tree, expert_role, family_tree
from echelon.report.hierarchy_sayings import event_kind, said_name
from echelon.report.texts import Words

LIFE_SYMBOLS: Mapping[str, tuple[str, str]] = {
    "founder": ("circle", "o"),
    "exploit": ("triangle-up", "^"),
    "migrate": ("triangle-right", ">"),
    "borrow": ("square", "s"),
    "propose": ("circle-open", "o"),
    "keep": ("cross", "P"),
    "revert": ("triangle-left", "<"),
    "reseed": ("star", "*"),
}
"""Kind of a life → symbols of plotly.js and of matplotlib."""
MOST_NAMED_MEMBERS = 40
MOST_MARKED_ROUNDS = 20
"""Rounds that are marked on a line: one alone would not be seen."""


def rounds_chart(
    history: PopulationHistory, threshold: float, floor: float, words: Words
) -> Figure:
    """MAPD, population volume, entropy of usage and fitness by round, a panel each."""
    rounds = [one.round for one in history.rounds]
    watched = [one.round for one in history.watched]
    most = math.log(len(history.experts))
    entropies = np.array([one.usage_entropy for one in history.rounds])
    share = entropies / most if most > 0.0 else entropies
    panels: tuple[tuple[str, list[Figure]], ...] = (
        (
            words("mapd_axis"),
            [
                _round_line(watched, [one.mapd for one in history.watched], "MAPD"),
                threshold_line(watched, threshold, words("threshold", value=f"{threshold:g}")),
            ],
        ),
        (
            words("volume"),
            [_round_line(watched, [one.volume for one in history.watched], words("volume"))],
        ),
        (
            words("usage_entropy_rounds"),
            [
                _round_line(rounds, share.tolist(), words("usage_entropy")),
                threshold_line(rounds, floor, words("entropy_floor", value=f"{floor:g}")),
            ],
        ),
        (words("fitness"), _fitness_lines(history, rounds, words)),
    )
    data: list[Figure] = []
    layout = make_layout(
        height=520,
        hovermode="x unified",
        legend=legend_above() | {"y": 1.07},
        margin={"l": 56, "r": 12, "t": 66, "b": 44},
        grid={"rows": 2, "columns": 2, "pattern": "independent", "xgap": 0.12, "ygap": 0.28},
        annotations=[],
    )
    for k, (title, traces) in enumerate(panels):
        suffix = "" if k == 0 else str(k + 1)
        data += [trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"} for trace in traces]
        layout[f"xaxis{suffix}"] = axis(nticks=6, showgrid=False, hoverformat=",d")
        layout[f"yaxis{suffix}"] = axis(nticks=5, rangemode="tozero" if k != 3 else "normal")
        if k >= 2:
            layout[f"xaxis{suffix}"]["title"] = axis_title(words("round"))
        layout["annotations"].append(panel_title(title, suffix))
    return {"data": data, "layout": layout}


def _round_line(
    rounds: Sequence[int], values: Iterable[float], name: str, role: str = "accent"
) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(rounds) <= MOST_MARKED_ROUNDS else "lines",
        "marker": {"size": 6},
        "name": name,
        "x": list(rounds),
        "y": numbers(np.array(list(values), dtype=np.float64)),
        "line": {"color": colour(role), "width": 2 if role == "accent" else 1.6},
        "showlegend": role != "accent",
        "hovertemplate": "%{y:.3g}",
    }


def _fitness_lines(history: PopulationHistory, rounds: Sequence[int], words: Words) -> list[Figure]:
    return [
        _round_line(
            rounds,
            [one.fitness[k] for one in history.rounds],
            said_name(name, words),
            expert_role(k, len(history.experts)),
        )
        for k, name in enumerate(history.experts)
    ]


def lineage_chart(history: PopulationHistory, words: Words) -> Figure | None:
    """The family tree: a line a member, rounds from left to right, what was copied from whom."""
    tree = family_tree(history)
    if tree is None:
        return None
    data = [*_branch_lines(tree, history), *_copy_lines(tree, words), *_life_marks(tree, words)]
    names = member_names(history, words)
    step = -(-tree.members // MOST_NAMED_MEMBERS)
    layout = make_layout(
        height=110 + max(200, min(22 * tree.members, 900)),
        hovermode="closest",
        legend=legend_above(),
        margin={"l": 100, "r": 16, "t": 54, "b": 44},
        xaxis=axis(
            title=axis_title(words("round")),
            range=[-0.02 * tree.last - 0.5, 1.02 * tree.last + 0.5],
        ),
        yaxis=axis(
            tickvals=list(range(0, tree.members, step)),
            ticktext=names[::step],
            range=[tree.members - 0.4, -0.6],
            showgrid=False,
            zeroline=False,
            automargin=True,
        ),
    )
    return {"data": data, "layout": layout}


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
        name = said_name(history.experts[niche], words) if named else f"niche {niche}"
        for place, member in enumerate(sorted(members)):
            names[member] = name if len(members) == 1 else f"{name} · {place + 1}"
    return names


def _branch_lines(tree: Tree, history: PopulationHistory) -> list[Figure]:
    """One trace a niche: breaks between its lives' lines."""
    lines: dict[int, tuple[list[float | None], list[float | None]]] = {}
    for branch in tree.branches:
        x, y = lines.setdefault(branch.niche, ([], []))
        x += [branch.first, branch.last, None]
        y += [branch.member, branch.member, None]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": x,
            "y": y,
            "line": {"color": colour(expert_role(niche, 10**6)), "width": 2.4},
            "showlegend": False,
            "hoverinfo": "skip",
        }
        for niche, (x, y) in lines.items()
    ]


def _copy_lines(tree: Tree, words: Words) -> list[Figure]:
    looks = ((True, "copy_weights", "solid", "soft"), (False, "copy_hyper", "dot", "faint"))
    traces: list[Figure] = []
    for weights, key, dash, role in looks:
        found = [copy for copy in tree.copies if copy.weights is weights]
        if found:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": words(key),
                    "x": [v for c in found for v in (c.at - tree.lead, c.at, None)],
                    "y": [v for c in found for v in (c.source, c.member, None)],
                    "line": {"color": colour(role), "width": 1.3, "dash": dash},
                    "hoverinfo": "skip",
                }
            )
    return traces


def _life_marks(tree: Tree, words: Words) -> list[Figure]:
    traces: list[Figure] = []
    for kind in [*LIFE_SYMBOLS, *sorted({b.kind for b in tree.branches} - set(LIFE_SYMBOLS))]:
        found = [branch for branch in tree.branches if branch.kind == kind]
        if not found:
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": event_kind(kind, words),
                "x": [branch.mark for branch in found],
                "y": [branch.member for branch in found],
                "customdata": [branch.first for branch in found],
                "marker": {
                    "symbol": LIFE_SYMBOLS.get(kind, ("diamond", "D"))[0],
                    "size": 12 if kind == "reseed" else 9,
                    "color": colour("loss" if kind == "reseed" else "ink"),
                    "line": {"width": 1, "color": colour("card")},
                },
                "hovertemplate": f"{event_kind(kind, words)}, {words('round')} %{{customdata}}"
                "<extra></extra>",
            }
        )
    return traces
