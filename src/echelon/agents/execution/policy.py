"""A learned execution policy, at work and on disk: weights and the shape of their network.

    DIR/policy.safetensors    the network's tensors
    DIR/policy.json           settings, names of the public features, facts about the training

Both are whole or an error, and nothing is unpickled: see `runs.tensor_files`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypedDict

from echelon.agents.execution.network import (
    ExecutionNet,
    HiddenState,
    NetworkSettings,
    check_public,
    look_up,
    private_inputs,
    side_of,
)
from echelon.errors import DataError, StoreError, shorten
from echelon.execution.days import Days
from echelon.execution.features import Extensions, PublicArrays, Quotes, public_features
from echelon.execution.simulator import Simulator
from echelon.features.scaler import Scaler
from echelon.files import blaming, check_tree
from echelon.runs.tensor_files import TensorFiles
from echelon.types import Floats

log = logging.getLogger(__name__)

_FILES = TensorFiles(
    "policy.safetensors", "policy.json", "execution policy", 1, "train the policy again"
)
_REMEDY = "Give the directory of an execution policy, or train it again."


class LearnedPolicy:
    """Does the likeliest, or the mean; it does not explore.

    `start` encodes the days of the orders, whole; by the network's construction what it looks up
    for a step has seen only the ticks before it.
    """

    def __init__(self, net: ExecutionNet, public: PublicArrays, name: str = "learned") -> None:
        self.net, self.public, self.name = net, public, name
        self._orders: tuple[Tensor, Tensor] | None = None
        """What is known of the market [E,S,H], and the orders' sides [E]."""
        self._state: HiddenState = None
        if public.today.shape[2] != net.n_features:
            raise DataError(
                f"policy {name!r} was made for {net.n_features} public features, these days have "
                f"{public.today.shape[2]}. Use the features it was trained with."
            )

    def start(self, simulator: Simulator) -> None:
        check_public(self.public, simulator.days)
        self.net.eval()
        orders, per_step = simulator.orders, simulator.rules.ticks_per_step
        with torch.no_grad():
            known = look_up(self.net, self.public, orders, per_step)
        self._orders, self._state = (known, side_of(orders)), None

    @torch.no_grad()
    def request(self, simulator: Simulator) -> Floats:
        assert self._orders is not None, "the policy was asked before it got the orders"
        known, side = self._orders
        # Orders step side by side, so that those not done are all at the same step.
        k = int(simulator.progress.step.max())
        private = torch.from_numpy(private_inputs(simulator))
        output, self._state = self.net.step(known[:, k], private, side, self._state)
        return self.net.head.shares(self.net.head.greedy(output.params), simulator)


class _Document(TypedDict):
    network: dict[str, Any]
    features: list[str]
    facts: dict[str, Any]


class StoredPolicy(NamedTuple):
    """What was saved; features: names of the public ones; facts: whatever the writer adds."""

    net: ExecutionNet
    features: tuple[str, ...]
    facts: dict[str, Any]


def save_execution_policy(
    path: Path, net: ExecutionNet, features: Sequence[str], facts: Mapping[str, Any] | None = None
) -> None:
    """Write a network and what it takes; `path` is a directory, replaced where there is one."""
    assert len(features) == net.n_features, "names are not one a public feature"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"features": list(features), "facts": dict(facts or {})}
    _FILES.write(path, net.state_dict(), {"network": asdict(net.settings), **about})


def load_execution_policy(path: Path, features: Sequence[str] | None = None) -> StoredPolicy:
    """Read one; features: names it is to be used with, refused where they are others."""
    read, data = _FILES.read(path, _REMEDY)
    document = check_tree(read, _Document, path / _FILES.document, _REMEDY)
    tensors = _FILES.unpack(data, path, _REMEDY)
    names = tuple(document["features"])
    if features is not None and tuple(features) != names:
        own, wanted = (shorten(", ".join(which), 80) for which in (names, features))
        raise StoreError(
            f"{path} is a policy for {len(names)} public features ({own}), expected "
            f"{len(features)} ({wanted}). Use the features it was trained with, or train one for "
            "these."
        )
    with blaming(path / _FILES.document, _REMEDY):
        net = ExecutionNet(NetworkSettings.from_json(document["network"]), len(names))
    load_weights(net, tensors, str(path))
    return StoredPolicy(net, names, document["facts"])


def load_weights(net: ExecutionNet, tensors: dict[str, Tensor], where: str) -> None:
    """Put weights into a network, or say how its shape differs from theirs."""
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        raise StoreError(
            f"{where} is of another network ({shorten(' '.join(str(error).split()), 300)}). Use "
            "the network settings and the public features it was made with."
        ) from None


def policy_for_days(
    path: Path,
    stored: StoredPolicy,
    days: Days,
    extensions: Extensions,
    quotes: Quotes | None = None,
    name: str = "learned",
) -> LearnedPolicy:
    """A stored policy on days, with the public features it was trained with.

    `facts.scaler` has what they were scaled with in training (`Scaler.to_dict`), whatever the train
    window is here, or null where they were not. extensions: where its own features are
    """
    again = "Train the policy again with `echelon execution train`."
    if "scaler" not in stored.facts:
        raise StoreError(
            f"{path}: its facts have no 'scaler', expected what the features were scaled with in "
            f"training, or null. {again}"
        )
    with blaming(path, again):
        given = stored.facts["scaler"]
        scaler = None if given is None else Scaler.from_dict(given)
    names, own = extensions.split_names(stored.features)
    if own and stored.facts.get("extensions") != extensions.digest:
        log.warning(
            "%s was trained with other versions of the files in execution.extensions; its features "
            "(%s) may mean something else now",
            path,
            ", ".join(own),
        )
    public = public_features(days, own, scaler, names=names, quotes=quotes)
    return LearnedPolicy(stored.net, public, name)
