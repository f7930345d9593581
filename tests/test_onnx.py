"""Exported graphs: every encoder and actor computes what torch does, whatever it is asked about."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from worlds import at, make_config, make_world

from echelon.backtest.run import run_backtest
from echelon.config import Config
from echelon.config.agents import ENCODERS, ModelConfig
from echelon.envs.act import Holdings
from echelon.errors import ConfigError, DamagedError, DataError, StoreError
from echelon.models.actor_critic import ActorCritic
from echelon.models.encoders import build_encoder, build_served, served_width
from echelon.models.expert import ExpertActor, TopKActor
from echelon.serving.graphs import (
    ExpertActorGraph,
    Exporter,
    FlatActorGraph,
    TargetGraph,
    as_graph,
)
from echelon.serving.parity import TOLERANCE, Choices, gap
from echelon.serving.policies import (
    GRAPH_INPUTS,
    Graph,
    OnnxActorPolicy,
    OnnxRouter,
    OnnxWeightPolicy,
    WindowEncoder,
    softmax,
)
from echelon.serving.sessions import OnnxGraph

F, W, D = 5, 10, 8
KINDS = get_args(ModelConfig.model_fields["cross_asset"].annotation)
Rng = np.random.Generator


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(*overrides: str) -> Config:
    sizes = (f"window={W}", f"model.d_model={D}", "model.n_layers=2", "model.hidden=8")
    return make_config(*sizes, "expert.hidden=8", *overrides)


def open_graph(data: bytes, kind: str) -> OnnxGraph:
    return OnnxGraph(data, GRAPH_INPUTS[kind], Path("graph.onnx"), "Export it again.")


def exported(module: torch.nn.Module, kind: str, config: Config) -> OnnxGraph:
    return open_graph(Exporter(config, F).to_onnx(module.eval(), kind), kind)


def book(rng: Rng, batch: int, assets: int) -> dict[str, np.ndarray]:
    """Random inputs of an actor; some assets are absent, of the last row all but none."""
    present = rng.random((batch, assets)) < 0.7
    present[-1] = False
    return {
        "z": rng.standard_normal((batch, assets, D)).astype(np.float32),
        "weights": rng.dirichlet(np.ones(assets), batch).astype(np.float32),
        "cash": rng.random(batch).astype(np.float32),
        "present": present,
    }


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("served", [(), ("model.direct=6", "pretrain.cross_fit=2")])
def test_every_encoder_exports_and_embeds_as_torch_does(name: str, served: tuple[str, ...]) -> None:
    config = small(f"model.encoder={name}", *served)
    torch.manual_seed(1)
    encoder = build_served(config, F).eval()
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((3 * W, 6, F)).astype(np.float32))
    x[W : W + 2, 4] = 0.0  # absent
    encoder.fit(x)
    with torch.no_grad():
        expected = encoder(x).numpy()
    data = Exporter(config, F).to_onnx(encoder.for_export().eval(), "encoder")
    graph = open_graph(data, "encoder")
    for batch in (1, 4):  # neither the rows nor the assets it was traced with
        windows = np.stack([x[k : k + W].numpy() for k in range(batch)])
        assert gap(expected[:batch], graph(windows)) < TOLERANCE
    model = onnx.load_model_from_string(data)
    assert len(model.graph.node) < 150
    assert b".py" not in data  # nothing of where it was traced


def test_timesnet_without_periods_is_not_exported() -> None:
    with pytest.raises(ConfigError, match="no periods yet"):
        build_encoder(small("model.encoder=TimesNet"), F).for_export()


@pytest.mark.parametrize("cross", KINDS)
def test_flat_actor_of_every_kind_decides_as_torch_does(cross: str) -> None:
    flags = {"mlp": (), "none": ("state.include_pos=false", "state.include_cash=false")}
    config = small(f"model.cross_asset={cross}", *flags.get(cross, ("state.include_cash=false",)))
    torch.manual_seed(2)
    module = FlatActorGraph(ActorCritic(config, F), config).eval()
    rng, graph, eager = np.random.default_rng(3), exported(module, "flat", config), as_graph(module)
    for batch, assets in ((1, 7), (5, 2)):
        allowed = rng.random((batch, assets, 3)) < 0.6
        allowed[..., 0] = True
        inputs = [*book(rng, batch, assets).values(), allowed]
        logits = graph(*inputs)
        assert gap(eager(*inputs), logits) < TOLERANCE
        assert (softmax(logits)[~allowed] == 0.0).all()


@pytest.mark.parametrize("skill", [0, 3])
def test_expert_actor_decides_as_torch_does(skill: int) -> None:
    config = small()
    torch.manual_seed(4)
    actor = ExpertActor(D, 8, config.state, skill).eval()
    if skill:
        actor.skill.copy_(torch.randn(skill))
    module = ExpertActorGraph(actor)
    rng, eager = np.random.default_rng(5), as_graph(module)
    graph = exported(module, "expert", config)
    for batch, assets in ((1, 6), (4, 9)):
        inputs = book(rng, batch, assets)
        for present in (inputs["present"], np.ones((batch, assets), dtype=bool)):
            every = [*(inputs | {"present": present}).values()]
            assert gap(eager(*every), graph(*every)) < TOLERANCE


def test_actor_of_wide_universes_sets_the_weights_that_torch_does() -> None:
    config = small("train.algo=APG", "expert.actor=top_k", "pretrain.cross_fit=2")
    torch.manual_seed(4)
    width = served_width(config)
    actor = TopKActor(width, config.expert, config.state).eval()
    with torch.no_grad():
        actor.last.weight.normal_(std=0.1)
        actor.moved.normal_(std=0.2)
    module = TargetGraph(actor)
    rng, eager = np.random.default_rng(5), as_graph(module)
    graph = exported(module, "targets", config)
    for batch, assets in ((1, 40), (4, 9)):
        seen = book(rng, batch, assets)
        seen["z"] = rng.standard_normal((batch, assets, width)).astype(np.float32)
        inputs = [*seen.values(), rng.random((batch, assets)) < 0.8]
        target = graph(*inputs)
        assert gap(eager(*inputs), target) < TOLERANCE
        assert (target[~(inputs[3] & inputs[4])] == 0.0).all()
    assert target[0].sum() > 0.3


def test_modules_of_one_structure_are_traced_once_and_keep_their_own_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, traced = small(), []
    trace = Exporter._trace
    monkeypatch.setattr(
        Exporter, "_trace", lambda self, *a: (traced.append(a[1]), trace(self, *a))[1]
    )
    monkeypatch.setattr(Exporter, "_traced", {})
    exporter, rng = Exporter(config, F), np.random.default_rng(6)
    inputs = [*book(rng, 3, 4).values()]
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = ExpertActorGraph(ExpertActor(D, 8)).eval()
        graph = open_graph(exporter.to_onnx(module, "expert"), "expert")
        assert gap(as_graph(module)(*inputs), graph(*inputs)) < TOLERANCE
    assert traced == ["expert"]


def counting(graph: Graph) -> tuple[Graph, list[tuple[int, ...]]]:
    """The graph, and the shapes of the first input of its calls."""
    calls: list[tuple[int, ...]] = []

    def run(*arrays: np.ndarray) -> np.ndarray:
        calls.append(arrays[0].shape)
        return graph(*arrays)

    return run, calls


@pytest.fixture(scope="module")
def networks() -> tuple[Graph, Graph, Graph]:
    """Of an encoder, a flat actor and an expert; by torch, which is quicker to make."""
    config = small()
    torch.manual_seed(7)
    encoder = as_graph(build_encoder(config, F).eval().for_export())
    flat = as_graph(FlatActorGraph(ActorCritic(config, F), config).eval())
    return encoder, flat, as_graph(ExpertActorGraph(ExpertActor(D, 8)).eval())


def some_books(n_books: int, n_assets: int) -> Holdings:
    rng = np.random.default_rng(8)
    weights = rng.dirichlet(np.ones(n_assets + 1), n_books).astype(np.float32)
    allowed = rng.random((n_books, n_assets, 3)) < 0.8
    allowed[..., 0] = True
    parts: dict[str, Any] = {
        "weights": weights[:, 1:].copy(),
        "cash_share": weights[:, 0].copy(),
        "allowed": allowed,
        "value": np.full(n_books, 1e6),
    }
    return Holdings(*(parts[name] for name in Holdings._fields))


@pytest.mark.parametrize("kind", ["discrete", "weights"])
def test_decision_has_the_same_bits_alone_and_among_other_books(
    kind: str, networks: tuple[Graph, Graph, Graph]
) -> None:
    world = make_world(n_features=F, n_assets=5, window=W)
    encoder, flat, expert = networks
    make: Callable[[], Any] = (
        (lambda: OnnxActorPolicy(WindowEncoder(encoder, W), flat))
        if kind == "discrete"
        else (lambda: OnnxWeightPolicy(WindowEncoder(encoder, W), expert))
    )
    held, rows = some_books(4, 5), at(30, 30, 31, 40)
    together = make()
    together.start(world, range(20, 50))
    decided = together.decide(rows, held)
    for e in range(4):
        alone = make()
        alone.start(world, range(20, 50))
        one = alone.decide(rows[e : e + 1], held.take(slice(e, e + 1)))
        np.testing.assert_array_equal(one[0], decided[e])


def test_row_is_encoded_once_for_all_books_and_experts_and_nothing_ahead(
    networks: tuple[Graph, Graph, Graph],
) -> None:
    world = make_world(n_features=F, n_assets=5, window=W)
    graph, calls = counting(networks[0])
    encoder = WindowEncoder(graph, W)
    experts = [OnnxWeightPolicy(encoder, networks[2], f"expert {k}") for k in range(3)]
    for expert in experts:
        expert.start(world, range(20, 50))
    assert calls == []
    for expert in experts:
        expert.decide(at(30, 30, 31), some_books(3, 5))
    assert calls == [(1, W, 5, F)] * 2


def test_world_that_grows_is_read_at_each_decision(networks: tuple[Graph, Graph, Graph]) -> None:
    world, held = make_world(n_features=F, n_assets=5, window=W), some_books(1, 5)
    whole = OnnxWeightPolicy(WindowEncoder(networks[0], W), networks[2])
    whole.start(world, range(20, 50))
    growing = SimpleNamespace(x=world.x[:W], present=world.present[:W])
    policy = OnnxWeightPolicy(WindowEncoder(networks[0], W), networks[2])
    policy.start(growing, range(0))  # type: ignore[arg-type]  # of a world only what it reads
    for row in range(20, 25):
        growing.x, growing.present = world.x[: row + 1], world.present[: row + 1]
        expected = whole.decide(at(row), held)
        np.testing.assert_array_equal(policy.decide(at(row), held), expected)


def test_graph_policy_looks_back_one_window_and_remembers_nothing(
    networks: tuple[Graph, Graph, Graph],
) -> None:
    policy = OnnxWeightPolicy(WindowEncoder(networks[0], W), networks[2])
    assert policy.lookback == W - 1
    policy.restore(policy.state())
    with pytest.raises(StoreError, match="remembers nothing, and the saved state has trust"):
        policy.restore({"trust": np.zeros(1)})


def test_features_that_are_no_numbers_are_refused_and_not_traded(
    networks: tuple[Graph, Graph, Graph],
) -> None:
    world = make_world(n_features=F, n_assets=5, window=W)
    x = world.x.copy()
    x[30, 2, 1] = np.nan
    policy = OnnxWeightPolicy(WindowEncoder(networks[0], W), networks[2], "agent")
    policy.start(make_world(n_features=F, n_assets=5, window=W, x=x), range(20, 50))
    with pytest.raises(
        DataError, match=r"agent: the network gives no finite numbers at row \[30\]"
    ):
        policy.decide(at(30), some_books(1, 5))


def test_graph_policy_is_backtested_as_any_other(networks: tuple[Graph, Graph, Graph]) -> None:
    world = make_world(n_features=F, n_assets=5, window=W)
    policy = OnnxActorPolicy(WindowEncoder(networks[0], W), networks[1])
    backtest = run_backtest(policy, world, range(20, 50), small())
    assert backtest.kind == "discrete"
    assert len(backtest.value) == 30


def test_router_chooses_the_most_probable_who_may() -> None:
    def logits(obs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        return np.where(allowed, obs, -1e9).astype(np.float32)

    router = OnnxRouter(logits)
    obs = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]], dtype=np.float32)
    allowed = np.array([[True, True, True], [False, True, True]])
    np.testing.assert_array_equal(router.choose(obs, allowed), [0, 1])
    odds = router.probabilities(obs, allowed)
    np.testing.assert_allclose(odds.sum(axis=1), 1.0)
    assert odds[1, 0] == 0.0


def test_choice_that_differs_is_wrong_only_where_the_first_leads() -> None:
    expected = np.array([[0.5, 0.3, 0.2], [0.40004, 0.4, 0.19996], [0.4, 0.3, 0.3]])
    other = expected[:, [1, 0, 2]]
    assert Choices().add(expected, expected) == (3, 0, 0)
    assert Choices().add(expected, other) == (3, 3, 2)


def test_gap_counts_a_weight_that_only_one_side_leaves_alone() -> None:
    target = np.array([[0.5, np.nan]])
    assert gap(target, target) == 0.0
    assert gap(target, np.array([[0.25, np.nan]])) == 0.25
    assert gap(target, np.array([[0.5, 0.1]])) == float("inf")


def model_of(*nodes: Any, initializer: Sequence[Any] = ()) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [1])
    graph = helper.make_graph(list(nodes), "graph", [x], [z], initializer=list(initializer))
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def one_node(operator: str, **parts: Any) -> Any:
    return helper.make_node(operator, ["x"], ["z"], **parts)


def external_weights() -> onnx.ModelProto:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../../etc/passwd")
    return model_of(helper.make_node("Add", ["x", "w"], ["z"]), initializer=[weight])


def graph_inside() -> onnx.ModelProto:
    inner = helper.make_graph([], "inner", [], [])
    return model_of(helper.make_node("Loop", ["x"], ["z"], body=inner))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (external_weights, "the weights 'w' are in another file"),
        (graph_inside, "a graph inside of Loop"),
        (lambda: model_of(one_node("Run", domain="evil")), "operators of evil"),
        (lambda: model_of(one_node("NoSuch")), "no graph that runs here"),
        (lambda: model_of(one_node("Neg")), "expected the inputs obs, allowed"),
    ],
    ids=["external", "loop", "domain", "operator", "inputs"],
)
def test_graph_that_could_do_more_than_compute_is_refused(
    model: Callable[[], onnx.ModelProto], what: str
) -> None:
    with pytest.raises(DamagedError, match=what):
        open_graph(model().SerializeToString(), "router")
    with pytest.raises(DamagedError, match="no ONNX graph"):
        open_graph(b"\xff\xff not a graph", "router")


def test_policies_and_bundles_are_opened_without_torch() -> None:
    code = (
        "import sys; import echelon.serving.policies, echelon.serving.bundle, "
        "echelon.serving.parity; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
