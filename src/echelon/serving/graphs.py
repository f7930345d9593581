"""From a trained policy to graphs: the modules it consists of, and these as ONNX.

1. `PolicySplit` walks a policy and gives its spec and the modules it needs, by name. Encoders
   with equal weights are one module, whoever stands on them.
2. An `Exporter` makes a model of a module, with the axes of rows (B) and assets (N) left open. What
   a graph says about where it was traced is removed: it would name files of this machine.
3. `as_graph` runs a module in torch, where ONNX Runtime is not installed.

A policy of another kind is a function registered here with its class. Axes as in `policies`.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import singledispatchmethod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from echelon.agents.a2c import ActorPolicy
from echelon.agents.expert_core import WeightPolicy
from echelon.backtest.ensemble import EnsemblePolicy
from echelon.backtest.forecaster import Model
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.errors import UsageError
from echelon.models.actor_critic import MASKED, N_ACTIONS, ActorCritic
from echelon.models.encoders import Encoder, served_width
from echelon.models.expert import ExpertActor, ExpertObs, TopKActor
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HedgeRouter, RouterPolicy
from echelon.population.router import Router
from echelon.population.router_task import observation_size
from echelon.population.rule_expert import ForecastExpert, RuleExpert
from echelon.serving.policies import (
    GRAPH_INPUTS,
    ActorSpec,
    EnsembleSpec,
    ForecastSpec,
    Graph,
    HierarchySpec,
    PolicySpec,
    RouterSpec,
    RuleSpec,
)

_EXAMPLE = {"B": 2, "N": 3}
"""Sizes that a graph is traced with; none is 1, which would be taken for a constant."""


class FlatActorGraph(nn.Module):
    """The actor of a flat agent behind its encoder: logits[B,N,3]."""

    def __init__(self, net: ActorCritic, config: Config) -> None:
        super().__init__()
        self.body, self.actor, self.state = net.body, net.actor, config.state
        self.mask_logits = net.mask_logits

    def forward(
        self, z: Tensor, weights: Tensor, cash: Tensor, present: Tensor, allowed: Tensor
    ) -> Tensor:
        """Shapes as in `GRAPH_INPUTS`."""
        shown = [weights] if self.state.include_pos else []
        if self.state.include_cash:
            shown.append(cash.unsqueeze(-1).expand_as(weights))
        portfolio = torch.stack(shown, dim=-1) if shown else weights.unsqueeze(-1)[..., :0]
        mixed = self.body(self.body.join.market(z), portfolio, present)
        return self.mask_logits(self.actor.as_function()(mixed), present, allowed)


class ExpertActorGraph(nn.Module):
    """The actor of an expert: its actions[B,N] in (−1, 1), without draws."""

    def __init__(self, actor: ExpertActor) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, z: Tensor, weights: Tensor, cash: Tensor, present: Tensor) -> Tensor:
        mean, _ = self.actor(ExpertObs(z, weights, cash, present, present))
        return torch.tanh(mean)


class TargetGraph(nn.Module):
    """An actor that gives target weights[B,N] at once."""

    def __init__(self, actor: TopKActor) -> None:
        super().__init__()
        self.actor = actor

    def forward(
        self, z: Tensor, weights: Tensor, cash: Tensor, present: Tensor, free: Tensor
    ) -> Tensor:
        target: Tensor = self.actor(ExpertObs(z, weights, cash, present, free))
        return target


class RouterGraph(nn.Module):
    """The router's network: logits[B,K+1]."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.net = router.net

    def forward(self, obs: Tensor, allowed: Tensor) -> Tensor:
        return torch.where(allowed, self.net.logits(obs), MASKED)


class PolicySplit:
    def __init__(self, policy: Policy, config: Config, n_features: int) -> None:
        """Raises UsageError where there is no way to export the policy."""
        self.config, self.n_features = config, n_features
        self.modules: dict[str, nn.Module] = {}
        self.models: dict[str, Model] = {}
        """Of forecasters."""
        self._names: dict[str, str] = {}
        self._count: dict[str, int] = {}
        self.spec: PolicySpec = self.describe(policy)

    @singledispatchmethod
    def describe(self, policy: object) -> Any:  # noqa: ANN401 (a spec, by the policy's class)
        """The spec of a policy; its modules are added."""
        raise UsageError(
            f"train.algo = {self.config.train.algo}: its policy ({type(policy).__name__}) cannot "
            "be exported. A2C, SAC, TD3, APG and HIERARCHY can; export one of these."
        )

    @describe.register
    def _describe_flat(self, policy: ActorPolicy) -> ActorSpec:
        net = policy.net.eval()
        encoder = self._add_encoder(net.encoder)
        actor = self._add("actor", FlatActorGraph(net, policy.config))
        return {"kind": "discrete", "name": policy.name, "encoder": encoder, "actor": actor}

    @describe.register
    def _describe_expert(self, policy: WeightPolicy) -> ActorSpec:
        encoder, actor = self._add_encoder(policy.encoder), policy.actor
        if isinstance(actor, TopKActor):
            name = self._add("actor", TargetGraph(actor))
            return {"kind": "targets", "name": policy.name, "encoder": encoder, "actor": name}
        name = self._add("actor", ExpertActorGraph(actor))
        return {"kind": "weights", "name": policy.name, "encoder": encoder, "actor": name}

    @describe.register
    def _describe_rule(self, policy: RuleExpert) -> RuleSpec:
        return {"kind": "rule", "name": policy.name}

    @describe.register
    def _describe_forecast(self, policy: ForecastExpert) -> ForecastSpec:
        number = self._count["forecast"] = self._count.get("forecast", -1) + 1
        self.models[f"forecast-{number}"] = policy.model
        model = f"forecast-{number}"
        return {"kind": "forecast", "name": policy.name, "model": model, "rule": policy.rule}

    @describe.register
    def _describe_hierarchy(self, policy: HierarchyPolicy) -> HierarchySpec:
        experts = [self.describe(expert) for expert in policy.experts]
        return {
            "kind": "hierarchy",
            "name": policy.name,
            "seed": policy.seed,
            "experts": experts,
            "router": self._describe_router(policy.router),
        }

    @describe.register
    def _describe_ensemble(self, policy: EnsemblePolicy) -> EnsembleSpec:
        members = [self.describe(member) for member in policy.members]
        return {"kind": "ensemble", "name": policy.name, "members": members}

    def _describe_router(self, router: RouterPolicy) -> RouterSpec:
        if isinstance(router, HedgeRouter):
            return {"graph": None}
        if not isinstance(router, Router):
            raise UsageError(f"a router of the class {type(router).__name__} cannot be exported.")
        return {"graph": self._add("router", RouterGraph(router))}

    def _add_encoder(self, encoder: Encoder) -> str:
        """The name of the encoder's module, which is shared by all with the same weights."""
        digest = _digest(encoder)
        if digest not in self._names:
            self._names[digest] = self._add("encoder", encoder.eval().for_export())
        return self._names[digest]

    def _add(self, kind: str, module: nn.Module) -> str:
        number = self._count[kind] = self._count.get(kind, -1) + 1
        self.modules[f"{kind}-{number}"] = module.eval()
        return f"{kind}-{number}"

    def graphs(self) -> dict[str, Graph]:
        return {name: as_graph(module) for name, module in self.modules.items()}


def _digest(encoder: Encoder) -> str:
    digest = hashlib.sha256(type(encoder).__name__.encode())
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def as_graph(module: nn.Module) -> Graph:
    def run(*arrays: NDArray[Any]) -> NDArray[Any]:
        with torch.no_grad():
            # Copies: a world's features may be read-only, which torch warns about.
            output: Tensor = module(*(torch.from_numpy(np.array(array)) for array in arrays))
        return output.numpy()

    return run


class Exporter:
    """Makes ONNX models of modules. Those of one structure are traced once: it takes seconds."""

    _traced: ClassVar[dict[object, Any]] = {}

    def __init__(self, config: Config, n_features: int) -> None:
        self._examples = _examples(config, n_features)
        sections = {"window", "model", "state", "expert", "experts", "meta_router"}
        self._built_by = config.model_dump_json(include=sections)

    def to_onnx(self, module: nn.Module, kind: str) -> bytes:
        """The module, of a kind in `GRAPH_INPUTS`, as a model with open axes B and N."""
        from onnx import numpy_helper
        from onnxscript import optimizer

        state = module.state_dict()
        shapes = tuple((name, tensor.dtype, tensor.shape) for name, tensor in state.items())
        inputs = (self._examples[kind, name].shape for name in GRAPH_INPUTS[kind])
        structure = (self._built_by, kind, type(module), shapes, *inputs)
        if structure not in self._traced:
            self._traced[structure] = self._trace(module, kind)
        model = type(self._traced[structure])()
        model.CopyFrom(self._traced[structure])
        weights = {tensor.name: tensor for tensor in model.graph.initializer}
        for name, tensor in state.items():
            if name in weights:  # not optimized yet, each weight that is used has its own place
                array = np.ascontiguousarray(tensor.detach().cpu().numpy())
                weights[name].CopyFrom(numpy_helper.from_array(array, name))
        with _quietly():
            model = optimizer.optimize(model)
        _remove_traces(model)
        return bytes(model.SerializeToString(deterministic=True))

    def _trace(self, module: nn.Module, kind: str) -> Any:  # noqa: ANN401 (a message of protobuf)
        inputs = {name: self._examples[kind, name] for name in GRAPH_INPUTS[kind]}
        axes = {name: _open_axes(tensor, kind) for name, tensor in inputs.items()}
        with _quietly():
            program = torch.onnx.export(
                module,
                tuple(inputs.values()),
                dynamo=True,
                input_names=list(inputs),
                output_names=["output"],
                dynamic_shapes=tuple(axes.values()),
                optimize=False,
                verbose=False,
            )
        assert program is not None
        return program.model_proto


@contextmanager
def _quietly() -> Iterator[None]:
    """Inside, the exporter says nothing: what it knows of other libraries concerns nobody here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _examples(config: Config, n_features: int) -> Mapping[tuple[str, str], Tensor]:
    """(kind, input) → an example of it."""
    b, n = _EXAMPLE["B"], _EXAMPLE["N"]
    n_experts, yes = config.experts.count, torch.ones(b, n, dtype=torch.bool)
    book = {"weights": torch.rand(b, n) / n, "cash": torch.rand(b), "present": yes}
    n_obs = observation_size(n_experts, config.meta_router)
    z = {"flat": config.model.d_model, "expert": served_width(config)}
    actors = {kind: {"z": torch.randn(b, n, width), **book} for kind, width in z.items()}
    trees: Mapping[str, Mapping[str, Tensor]] = {
        "encoder": {"x": torch.randn(b, config.window, n, n_features)},
        "flat": {**actors["flat"], "allowed": torch.ones(b, n, N_ACTIONS, dtype=torch.bool)},
        "expert": actors["expert"],
        "targets": {**actors["expert"], "free": yes.clone()},  # one tensor twice is one input
        "router": {
            "obs": torch.randn(b, n_obs),
            "allowed": torch.ones(b, n_experts + 1, dtype=torch.bool),
        },
    }
    return {(kind, name): tensor for kind, tree in trees.items() for name, tensor in tree.items()}


def _open_axes(tensor: Tensor, kind: str) -> dict[int, Any]:
    axes: dict[int, Any] = {0: torch.export.Dim("B")}
    if kind == "encoder":
        axes[2] = torch.export.Dim("N")
    elif kind != "router" and tensor.dim() > 1:
        axes[1] = torch.export.Dim("N")
    return axes


def _remove_traces(model: Any) -> None:  # noqa: ANN401 (a message of protobuf)
    """Leave out what a graph says about where it was traced."""
    model.doc_string = ""
    del model.metadata_props[:]
    graph = model.graph
    graph.doc_string = ""
    del graph.metadata_props[:]
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
