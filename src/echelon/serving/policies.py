"""Policies that decide by exported graphs: without torch, and with the same shapes for everyone.

A bundle names graphs (`encoder-0`, `actor-0`, …) and says, in a `PolicySpec`, how they make a
policy. `build_policy` puts that together from anything that computes a graph: an ONNX Runtime
session (`serving.sessions`) or, where that is not installed, a module of torch.

At a decision, for each book by itself:

1. The encoder sees the window up to the book's row, one window a call. It keeps the embeddings of
   the last rows, so a row is encoded once for all books, and for all experts on that encoder.
2. The actor sees the embedding and the book, one book a call.
3. What its numbers mean is decided in `envs.act`, in float64, as for every other policy.

Nothing is encoded ahead, so a world may grow while it is traded, and every graph is called with
batches of one: products of matrices round by their shapes, and so a decision has the same bits
whoever asks, alone or among other books.

Axes: `E` books, `N` assets, `W` window, `F` features, `D` embedding, `K` experts, `O` entries of a
router's observation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from echelon.backtest.baselines import make_baseline
from echelon.backtest.ensemble import EnsemblePolicy
from echelon.backtest.policy import Policy
from echelon.backtest.top_k import RowScores, TopKPolicy, TopKRule
from echelon.config import Config
from echelon.envs.act import (
    ActionKind,
    Holdings,
    free,
    weights_of_actions,
    weights_of_targets,
)
from echelon.envs.world import World
from echelon.errors import DataError, StoreError
from echelon.market import Rows
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HedgeRouter, RouterPolicy
from echelon.population.rule_expert import RuleExpert
from echelon.states import State
from echelon.types import Bools, Floats, Floats32, Ints

Graph = Callable[..., NDArray[Any]]
"""Computes the one output of an exported graph from its inputs, in the order of `GRAPH_INPUTS`; or
scores[N] of x[N,F], of the model of a forecaster, which is called by its name like a graph."""

GRAPH_INPUTS: Mapping[str, tuple[str, ...]] = {
    "encoder": ("x",),
    "flat": ("z", "weights", "cash", "present", "allowed"),
    "expert": ("z", "weights", "cash", "present"),
    "targets": ("z", "weights", "cash", "present", "free"),
    "router": ("obs", "allowed"),
}
"""Kind of a graph → its inputs. x[B,W,N,F] float32; z[B,N,D] float32; weights[B,N], cash[B]
float32; present, free[B,N] bool; allowed[B,N,3] bool, or [B,K+1] of a router; obs[B,O] float32.
They give z, logits[B,N,3], actions[B,N] in (−1, 1), target weights[B,N] and logits[B,K+1]."""

_KEPT_ROWS = 64
"""Rows whose embeddings an encoder remembers: as many books at different rows as share it."""


class ActorSpec(TypedDict):
    """A policy of one encoder and one actor: buys, sells and holds, or sets target weights.

    targets: the graph gives the weights themselves, not actions that the softmax makes them of
    """

    kind: Literal["discrete", "weights", "targets"]
    name: str
    encoder: str
    actor: str


class RuleSpec(TypedDict):
    """A baseline, or an expert of `experts.rules`: a rule, which has no graph."""

    kind: Literal["rule"]
    name: str


class ForecastSpec(TypedDict):
    """The baseline `forecast`: arrays of a model, in a file called `model`, and a `TopKRule`."""

    kind: Literal["forecast"]
    name: str
    model: str
    rule: TopKRule


class RouterSpec(TypedDict):
    """Who chooses the expert in charge; graph: None for the fixed-share rule."""

    graph: str | None


class HierarchySpec(TypedDict):
    """Experts under a router, with the risk control of the configuration."""

    kind: Literal["hierarchy"]
    name: str
    seed: int
    experts: list[ActorSpec | RuleSpec | ForecastSpec]
    router: RouterSpec


class EnsembleSpec(TypedDict):
    """The mean of several policies."""

    kind: Literal["ensemble"]
    name: str
    members: list[ActorSpec | HierarchySpec]


PolicySpec = ActorSpec | RuleSpec | ForecastSpec | HierarchySpec | EnsembleSpec
"""How graphs and rules make a policy."""


class FeatureRows(Protocol):
    """What of a world these policies look at: x[T,N,F] and present[T,N], by absolute rows."""

    @property
    def x(self) -> Floats32:
        """Scaled features."""

    @property
    def present(self) -> Bools:
        """Which assets have features."""


class WindowEncoder:
    """An encoder's graph and the embeddings of the last rows it was asked about."""

    def __init__(self, graph: Graph, window: int) -> None:
        self._graph, self.window = graph, window
        self._rows: FeatureRows | None = None
        self._kept: dict[int, Floats32] = {}

    def last_embedding(self, row: int) -> Floats32 | None:
        """Z[1,N,D] of a row that was asked about lately; None: it was not."""
        return self._kept.get(row)

    def embed(self, rows: FeatureRows, row: int) -> Floats32:
        if rows is not self._rows:
            self._rows, self._kept = rows, {}
        z = self._kept.get(row)
        if z is None:
            x = np.ascontiguousarray(rows.x[row - self.window + 1 : row + 1])
            assert len(x) == self.window, f"row {row} has no window of {self.window} bars"
            z = self._graph(x[None])
            if len(self._kept) >= _KEPT_ROWS:
                del self._kept[next(iter(self._kept))]
            self._kept[row] = z
        return z


class OnnxPolicy(ABC):
    """An encoder and an actor as graphs: what `OnnxActorPolicy` and `OnnxWeightPolicy` share."""

    kind: ActionKind

    def __init__(self, encoder: WindowEncoder, actor: Graph, name: str = "agent") -> None:
        self.name, self.encoder, self._actor = name, encoder, actor
        self._rows: FeatureRows | None = None

    @property
    def lookback(self) -> int:
        """Rows before a book's own that are read: the rest of the window."""
        return self.encoder.window - 1

    def start(self, world: World, span: range) -> None:
        """Nothing is computed ahead: the world may still grow."""
        self.read_from(world)

    def state(self) -> State:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Nothing to go on from; what another policy left is refused."""
        if state:
            raise StoreError(
                f"{self.name}: remembers nothing, and the saved state has {', '.join(state)}. "
                "Restore it with the policy it was saved with."
            )

    def read_from(self, rows: FeatureRows) -> None:
        self._rows = rows

    @abstractmethod
    def decide(self, row: Rows, held: Holdings) -> NDArray[Any]:
        """Actions[E,N] of books at `row`[E]."""

    def _ask(self, row: Rows, held: Holdings, *masks: Bools) -> NDArray[Any]:
        """What the actor's graph says of each book, one call a book: [E,N] or [E,N,3]."""
        rows = self._rows
        assert rows is not None, "start() comes before decide()"
        answers = []
        for e, t in enumerate(row.tolist()):
            one = slice(e, e + 1)
            z, present = self.encoder.embed(rows, t), np.ascontiguousarray(rows.present[t])[None]
            book = (held.weights[one], held.cash_share[one], present)
            answers.append(self._actor(z, *book, *(mask[one] for mask in masks)))
        said = np.concatenate(answers)
        if not np.isfinite(said).all():
            raise DataError(
                f"{self.name}: the network gives no finite numbers at row {row.tolist()}, so "
                "nothing can be decided. Look for features or holdings that are not numbers."
            )
        return said


class OnnxActorPolicy(OnnxPolicy):
    """Buys, sells or holds: the most probable action of each asset."""

    kind: ActionKind = "discrete"

    def probabilities(self, row: Rows, held: Holdings) -> Floats:
        """[E,N,3] by `envs.Action`, 0 for what is not allowed."""
        return softmax(self._ask(row, held, held.allowed))

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        return np.asarray(self._ask(row, held, held.allowed).argmax(axis=-1), dtype=np.int8)


class OnnxWeightPolicy(OnnxPolicy):
    """An expert: the middle of its actions, as target weights."""

    kind: ActionKind = "weights"

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Target weights[E,N] of books at `row`[E]; NaN: leave as it is."""
        return weights_of_actions(self._ask(row, held), held)


class OnnxTargetPolicy(OnnxPolicy):
    """An actor that gives target weights at once."""

    kind: ActionKind = "weights"

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Target weights[E,N] of books at `row`[E]; NaN: leave as it is."""
        return weights_of_targets(self._ask(row, held, free(held)), held)


class OnnxRouter:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._last: tuple[Floats32, Bools, NDArray[Any]] | None = None

    def follow(self, returns: Floats, fresh: Bools) -> None:
        """Not needed: what was earned is in the observations."""

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        """[E] the most probable choice of each of obs[E,O] among allowed[E,K+1]."""
        return np.asarray(self._logits(obs, allowed).argmax(axis=1), dtype=np.int64)

    def probabilities(self, obs: Floats32, allowed: Bools) -> Floats:
        """[E,K+1] of every choice; 0 for those not allowed."""
        return softmax(self._logits(obs, allowed))

    def _logits(self, obs: Floats32, allowed: Bools) -> NDArray[Any]:
        last = self._last
        if last is not None and last[0] is obs and last[1] is allowed:
            return last[2]  # its odds are asked for at every bar, new ones only now and then
        assert allowed.any(axis=1).all(), "there is nobody to choose"
        each = [self._graph(obs[e : e + 1], allowed[e : e + 1]) for e in range(len(obs))]
        logits = np.concatenate(each)
        if not np.isfinite(logits).all():
            raise DataError(
                "the router's network gives no finite numbers, so nobody can be put in charge. "
                "Look for returns of the experts' books that are not numbers."
            )
        self._last = obs, allowed, logits
        return logits


def softmax(logits: NDArray[Any]) -> Floats:
    wide = logits.astype(np.float64)
    odds = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return np.asarray(odds / odds.sum(axis=-1, keepdims=True))


_POLICIES: Mapping[str, type[OnnxPolicy]] = {
    "discrete": OnnxActorPolicy,
    "weights": OnnxWeightPolicy,
    "targets": OnnxTargetPolicy,
}
_ACTOR_GRAPHS = {"discrete": "flat", "weights": "expert", "targets": "targets"}
"""Kind of an actor → kind of its graph in `GRAPH_INPUTS`."""


def build_policy(spec: PolicySpec, graphs: Mapping[str, Graph], config: Config) -> Policy:
    """The policy that `spec` describes; raises KeyError for a graph that is not there."""
    encoders: dict[str, WindowEncoder] = {}
    return _build(spec, graphs, config, encoders)


def _build(
    spec: PolicySpec,
    graphs: Mapping[str, Graph],
    config: Config,
    encoders: dict[str, WindowEncoder],
) -> Policy:
    if spec["kind"] == "rule":
        return make_baseline(spec["name"], config)
    if spec["kind"] == "forecast":
        rule = TopKRule(*spec["rule"])
        return TopKPolicy(RowScores(graphs[spec["model"]]), rule, spec["name"])
    if spec["kind"] == "ensemble":
        members = [_build(member, graphs, config, encoders) for member in spec["members"]]
        return EnsemblePolicy(members, spec["name"])
    if spec["kind"] == "hierarchy":
        experts = [
            RuleExpert(make_baseline(expert["name"], config), config)
            if expert["kind"] == "rule"
            else _build(expert, graphs, config, encoders)
            for expert in spec["experts"]
        ]
        graph = spec["router"]["graph"]
        router: RouterPolicy = HedgeRouter() if graph is None else OnnxRouter(graphs[graph])
        return HierarchyPolicy(experts, router, config, spec["seed"], spec["name"])
    if spec["encoder"] not in encoders:
        encoders[spec["encoder"]] = WindowEncoder(graphs[spec["encoder"]], config.window)
    return _POLICIES[spec["kind"]](encoders[spec["encoder"]], graphs[spec["actor"]], spec["name"])


def actor_specs(spec: PolicySpec) -> list[ActorSpec]:
    """Every encoder with an actor in a policy, in order."""
    if spec["kind"] == "rule" or spec["kind"] == "forecast":
        return []
    if spec["kind"] == "hierarchy":
        experts = spec["experts"]
        return [e for e in experts if e["kind"] == "weights" or e["kind"] == "discrete"]
    if spec["kind"] == "ensemble":
        return [actor for member in spec["members"] for actor in actor_specs(member)]
    return [spec]


def forecast_specs(spec: PolicySpec) -> list[ForecastSpec]:
    """Every forecaster in a policy, in order."""
    if spec["kind"] == "ensemble":
        return [part for member in spec["members"] for part in forecast_specs(member)]
    parts = spec["experts"] if spec["kind"] == "hierarchy" else [spec]
    return [part for part in parts if part["kind"] == "forecast"]


def graph_kinds(spec: PolicySpec) -> dict[str, str]:
    """Name of every graph that a policy needs → its kind in `GRAPH_INPUTS`."""
    kinds: dict[str, str] = {}
    for actor in actor_specs(spec):
        kinds[actor["encoder"]] = "encoder"
        kinds[actor["actor"]] = _ACTOR_GRAPHS[actor["kind"]]
    members = spec["members"] if spec["kind"] == "ensemble" else [spec]
    for member in members:
        if member["kind"] == "hierarchy" and member["router"]["graph"] is not None:
            kinds[member["router"]["graph"]] = "router"
    return kinds
