"""Whether graphs decide as the networks they were made from, and what they are held to later.

1. `shadow_policy` puts graphs behind a policy: it decides, on its own books, and at every book it
   is asked about the graphs are asked too. `Parity` counts how far apart they are.
2. Of the last books each actor and router saw, inputs are kept (`Parity.references`), and what the
   graphs decided: the reference decisions of a bundle. `decide_again` computes them anywhere.

Axes as in `policies`; `R` reference decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.ensemble import DiscretePolicy, EnsemblePolicy
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.market import Rows
from echelon.population.reference_policies import RouterPolicy
from echelon.serving.policies import (
    FeatureRows,
    Graph,
    OnnxActorPolicy,
    OnnxPolicy,
    OnnxRouter,
    PolicySpec,
    actor_specs,
    build_policy,
    graph_kinds,
)
from echelon.types import Bools, Floats, Floats32, Ints

TOLERANCE = 1e-5
"""Of target weights and probabilities; what rounding by another library or CPU may change."""
MARGIN = 1e-4
"""A choice whose probability leads by less may go to the next one."""
_REFERENCES = 24

Arrays = dict[str, NDArray[Any]]


class Choices(NamedTuple):
    """How many were compared, differed, and differed though the first choice led by `MARGIN`."""

    compared: int = 0
    differing: int = 0
    wrong: int = 0

    def add(self, expected: Floats, graph: Floats) -> Choices:
        """With those of probabilities[...,C]; the first choice is the largest."""
        ranked = np.sort(expected, axis=-1)
        differs = expected.argmax(axis=-1) != graph.argmax(axis=-1)
        wrong = differs & (ranked[..., -1] - ranked[..., -2] >= MARGIN)
        return Choices(
            self.compared + differs.size,
            self.differing + int(differs.sum()),
            self.wrong + int(wrong.sum()),
        )


class Parity:
    """What was compared so far.

    weights: target weights compared; weight_gap, probability_gap: the largest difference
    """

    def __init__(self) -> None:
        self.weights, self.weight_gap, self.probability_gap = 0, 0.0, 0.0
        self.actions, self.choices = Choices(), Choices()
        self._books: dict[str, deque[tuple[int, Holdings]]] = {}
        self._asked: dict[str, deque[tuple[Floats32, Bools]]] = {}

    @property
    def holds(self) -> bool:
        near = self.weight_gap <= TOLERANCE
        return near and not self.actions.wrong and not self.choices.wrong

    def facts(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "weight_gap": self.weight_gap,
            "actions": self.actions._asdict(),
            "router": self.choices._asdict(),
            "probability_gap": self.probability_gap,
        }

    def compare_weights(self, expected: Floats, graph: Floats) -> None:
        """Target weights[E,N] of both."""
        self.weights += expected.size
        self.weight_gap = max(self.weight_gap, gap(expected, graph))

    def compare_actions(self, expected: Floats, graph: Floats) -> None:
        """Probabilities[E,N,3] of both."""
        self.actions = self.actions.add(expected, graph)
        self.probability_gap = max(self.probability_gap, gap(expected, graph))

    def compare_choices(self, expected: Floats, graph: Floats) -> None:
        """Probabilities[E,K+1] of both."""
        self.choices = self.choices.add(expected, graph)
        self.probability_gap = max(self.probability_gap, gap(expected, graph))

    def keep_books(self, actor: str, row: Rows, held: Holdings) -> None:
        last = self._books.setdefault(actor, deque(maxlen=_REFERENCES))
        for e, t in enumerate(row.tolist()):
            last.append((t, held.take(slice(e, e + 1))))

    def keep_question(self, router: str, obs: Floats32, allowed: Bools) -> None:
        last = self._asked.setdefault(router, deque(maxlen=_REFERENCES))
        pairs = zip(obs, allowed, strict=True)
        last.extend((np.array(o[None]), np.array(a[None])) for o, a in pairs)

    def references(self, world: FeatureRows, window: int) -> Arrays:
        """Inputs of the last decisions: x[S,N,F] and present[S,N] of the rows they need, and by
        name of the graph the books (row[R], counted in x, and holdings) or observations.
        """
        arrays: Arrays = {}
        rows = [t for books in self._books.values() for t, _ in books]
        first = min(rows) - window + 1
        arrays["x"] = np.array(world.x[first : max(rows) + 1])
        arrays["present"] = np.array(world.present[first : max(rows) + 1])
        for actor, books in self._books.items():
            arrays[f"{actor}.row"] = np.array([t - first for t, _ in books], dtype=np.int64)
            for k, name in enumerate(Holdings._fields):
                arrays[f"{actor}.{name}"] = np.concatenate([held[k] for _, held in books])
        for router, asked in self._asked.items():
            obs, allowed = zip(*asked, strict=True)
            arrays[f"{router}.obs"], arrays[f"{router}.allowed"] = map(
                np.concatenate, (obs, allowed)
            )
        return arrays


def gap(expected: Floats, actual: Floats) -> float:
    """The largest difference; infinite where only one of them is a number."""
    if expected.shape != actual.shape or (np.isnan(expected) != np.isnan(actual)).any():
        return float("inf")
    return float(np.nanmax(np.abs(expected - actual), initial=0.0))


def shadow_policy(policy: Policy, twin: Policy, spec: PolicySpec, parity: Parity) -> Policy:
    """`policy`, as it decides, with its twin by graphs asked about the same books."""
    if spec["kind"] == "ensemble":
        assert isinstance(policy, EnsemblePolicy)
        assert isinstance(twin, EnsemblePolicy)
        parts = zip(policy.members, twin.members, spec["members"], strict=True)
        return EnsemblePolicy([shadow_policy(*part, parity) for part in parts], policy.name)
    if spec["kind"] == "hierarchy":
        from echelon.population.policy import HierarchyPolicy

        assert isinstance(policy, HierarchyPolicy)
        assert isinstance(twin, HierarchyPolicy)
        trios = zip(policy.experts, twin.experts, spec["experts"], strict=True)
        experts = [shadow_policy(*trio, parity) for trio in trios]
        router, name = policy.router, spec["router"]["graph"]
        if name is not None:
            router = _ShadowRouter(router, twin.router, name, parity)
        return HierarchyPolicy(experts, router, policy.config, policy.seed, policy.name)
    if spec["kind"] == "rule" or spec["kind"] == "forecast":
        return policy
    assert isinstance(twin, OnnxPolicy)
    return _ShadowActor(policy, twin, spec["actor"], parity)


class _ShadowActor:
    def __init__(self, policy: Policy, twin: OnnxPolicy, actor: str, parity: Parity) -> None:
        self._policy, self._twin, self._actor, self._parity = policy, twin, actor, parity
        self.name, self.kind = policy.name, policy.kind

    name: str
    kind: ActionKind

    def start(self, world: World, span: range) -> None:
        self._policy.start(world, span)
        self._twin.start(world, span)

    def decide(self, row: Rows, held: Holdings) -> NDArray[Any]:
        if self.kind == "discrete":
            return np.asarray(self.probabilities(row, held).argmax(axis=-1), dtype=np.int8)
        target = self._policy.decide(row, held)
        self._parity.compare_weights(target, self._twin.decide(row, held))
        self._parity.keep_books(self._actor, row, held)
        return target

    def probabilities(self, row: Rows, held: Holdings) -> Floats:
        policy: DiscretePolicy = self._policy  # type: ignore[assignment]  # its kind says so
        assert isinstance(self._twin, OnnxActorPolicy)
        expected = policy.probabilities(row, held)
        self._parity.compare_actions(expected, self._twin.probabilities(row, held))
        self._parity.keep_books(self._actor, row, held)
        return expected


class _ShadowRouter:
    def __init__(self, router: Any, twin: RouterPolicy, graph: str, parity: Parity) -> None:  # noqa: ANN401 (a router of torch)
        assert isinstance(twin, OnnxRouter)
        self._router, self._twin, self._graph, self._parity = router, twin, graph, parity

    def follow(self, returns: Floats, fresh: Bools) -> None:
        self._router.follow(returns, fresh)

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        self.probabilities(obs, allowed)
        chosen: Ints = self._router.choose(obs, allowed)
        return chosen

    def probabilities(self, obs: Floats32, allowed: Bools) -> Floats:
        expected: Floats = self._router.probabilities(obs, allowed)
        self._parity.compare_choices(expected, self._twin.probabilities(obs, allowed))
        self._parity.keep_question(self._graph, obs, allowed)
        return expected


class _Stretch(NamedTuple):
    """Features of reference decisions."""

    x: Floats32
    present: Bools


def decide_again(
    spec: PolicySpec, graphs: Mapping[str, Graph], config: Config, arrays: Mapping[str, Any]
) -> dict[str, Floats]:
    """What the graphs decide at `Parity.references`: name of an actor or router → [R,…].

    Target weights, or probabilities of actions or experts. Raises KeyError where an input is
    missing, and whatever numpy or the graphs say of wrong shapes.
    """
    decisions: dict[str, Floats] = {}
    if specs := actor_specs(spec):
        stretch = _Stretch(arrays["x"], arrays["present"])
    for actor in specs:
        policy, name = build_policy(actor, graphs, config), actor["actor"]
        assert isinstance(policy, OnnxPolicy)
        policy.read_from(stretch)
        held = Holdings(*(arrays[f"{name}.{field}"] for field in Holdings._fields))
        decide = policy.probabilities if isinstance(policy, OnnxActorPolicy) else policy.decide
        decisions[name] = decide(arrays[f"{name}.row"], held)
    for name, kind in graph_kinds(spec).items():
        if kind == "router":
            obs, allowed = arrays[f"{name}.obs"], arrays[f"{name}.allowed"]
            decisions[name] = OnnxRouter(graphs[name]).probabilities(obs, allowed)
    return decisions
