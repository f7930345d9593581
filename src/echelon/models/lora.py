"""Low-rank adapters on an encoder: small matrices that learn while the base stays as it was.

An adapted layer computes base(x) + α/r · B(A(x)), with A drawn and B zero, so that an adapter
changes nothing until it is trained (Hu et al., 2022). Every linear and convolution layer of the
encoder gets one through PEFT; the rest (norms, embeddings of place) is frozen with the base.

    adapt(encoder, config.lora, ("trend", "reversion"))   once; draws A from torch's generator
    use_adapter(encoder, "trend")                         its output and its gradients from now on
    with merging(encoder, "trend"): …                      the same output, at the base's speed

One encoder can carry several adapters, of which one is in use; None: the base alone. PEFT is
imported on use, as that takes seconds and is an extra of the installation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.config.agents import LoraConfig
from echelon.errors import ConfigError, StoreError
from echelon.models.encoders import Encoder

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_ADAPTED = (nn.Linear, nn.Conv1d, nn.Conv2d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_MATRICES = ("lora_A", "lora_B")
_KEPT = "_base_before_merging"
"""Where a merged encoder keeps the base's weights: subtracting again would round them."""


def adapt(encoder: Encoder, lora: LoraConfig, names: Sequence[str] = ("expert",)) -> None:
    """Give every linear and convolution layer an adapter under each name; the first is in use.

    In place: layers are wrapped, the base is frozen, outputs stay as they were. The draws come
    from torch's global generator, which the caller seeds. More names can be added later.
    """
    peft = _peft()
    there = adapter_names(encoder)
    for k, name in enumerate(names):
        if not re.fullmatch(r"\w+", name) or name in there or name in names[:k]:
            raise ValueError(f"adapter name {name!r}: expected letters and digits, used once")
    _refuse_merged(encoder, "adapters cannot be added")
    wrapped = dict(_layers(encoder)) if there else {}
    targets = list(wrapped) or _targets(encoder)
    pattern = "|".join(re.escape(target) for target in targets)
    # PEFT warns of a second adapter where it finds the first one's settings on the model.
    settings = vars(encoder).pop("peft_config", {})
    for name in names:
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=pattern),
            encoder,
            adapter_name=name,
        )
        settings |= vars(encoder).pop("peft_config")
    vars(encoder)["peft_config"] = settings
    use_adapter(encoder, names[0])


def adapter_names(encoder: Encoder) -> tuple[str, ...]:
    """Names of the adapters an encoder carries, in the order they were added."""
    return tuple(vars(encoder).get("peft_config", {}))


def use_adapter(encoder: Encoder, name: str | None) -> None:
    """Let one adapter act and be trained, and no other; None: the base alone."""
    if name is not None:
        _require(encoder, name)
    _refuse_merged(encoder, "the adapter cannot be changed")
    for _, layer in _layers(encoder):
        if name is not None:
            layer.set_adapter(name)
        layer.enable_adapters(name is not None)


def adapter_parameters(encoder: Encoder, name: str) -> list[nn.Parameter]:
    """All parameters of one adapter, in the order of the encoder's layers."""
    return list(_parameters(encoder, name).values())


def adapter_state(encoder: Encoder, name: str) -> dict[str, Tensor]:
    """Copies of one adapter's matrices: `layer.lora_A` and `layer.lora_B`, whatever its name."""
    return {key: value.detach().clone() for key, value in _parameters(encoder, name).items()}


def load_adapter_state(encoder: Encoder, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Set one adapter to what `adapter_state` gave, of this or of another name."""
    _refuse_merged(encoder, "no adapter can be loaded")
    own = _parameters(encoder, name)
    strange = sorted(set(own) ^ set(tensors))
    strange += [key for key in own if key in tensors and own[key].shape != tensors[key].shape]
    if strange:
        raise StoreError(
            f"the adapter saved for {name!r} does not fit this encoder: {', '.join(strange[:3])} "
            f"and {max(0, len(strange) - 3)} more differ in name or shape. Use the encoder and "
            "lora.rank it was trained with, or train it again."
        )
    with torch.no_grad():
        for key, value in tensors.items():
            own[key].copy_(value)


def merge(encoder: Encoder, name: str) -> None:
    """Add one adapter to the base's weights: the same output without the extra products."""
    _require(encoder, name)
    _refuse_merged(encoder, "a second adapter cannot be merged")
    use_adapter(encoder, name)
    layers = list(_layers(encoder))
    vars(encoder)[_KEPT] = {key: _weight(layer).detach().clone() for key, layer in layers}
    for _, layer in layers:
        layer.merge(safe_merge=True, adapter_names=[name])


def unmerge(encoder: Encoder) -> None:
    """Take the merged adapter out again; the base is as before, bit for bit."""
    kept: dict[str, Tensor] | None = vars(encoder).pop(_KEPT, None)
    if kept is None:
        raise ValueError("no adapter of this encoder is merged")
    for key, layer in _layers(encoder):
        layer.unmerge()
        with torch.no_grad():
            _weight(layer).copy_(kept[key])


@contextmanager
def merging(encoder: Encoder, name: str) -> Iterator[None]:
    """Have one adapter merged for a while; afterwards it is in use, unmerged."""
    merge(encoder, name)
    try:
        yield
    finally:
        unmerge(encoder)


class Trainable(NamedTuple):
    """Numbers of weights: those that would be trained now, and all of base and adapter in use."""

    trained: int
    whole: int

    @property
    def share(self) -> float:
        """0.12: an expert trains 12 % of what it computes with."""
        return self.trained / self.whole


def trainable(encoder: Encoder) -> Trainable:
    """How much of an encoder would be trained now; adapters that are not in use do not count."""
    idle = {
        id(parameter)
        for name in adapter_names(encoder)
        for parameter in adapter_parameters(encoder, name)
        if not parameter.requires_grad
    }
    counted = [p for p in encoder.parameters() if id(p) not in idle]
    trained = sum(p.numel() for p in counted if p.requires_grad)
    return Trainable(trained, sum(p.numel() for p in counted))


def _peft() -> Any:  # noqa: ANN401 (a module)
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"lora.enabled needs PEFT, which cannot be imported ({error}). Install it with "
            "`pip install 'echelon[lora]'`, or set lora.enabled=false."
        ) from None
    return peft


def _targets(encoder: Encoder) -> list[str]:
    """Names of the layers to adapt. Refuses those that PEFT would adapt to something else."""
    names = []
    for name, layer in encoder.named_modules():
        if not isinstance(layer, _ADAPTED):
            continue
        # PEFT gives A the kernel, stride and padding of the layer, but none of these.
        if isinstance(layer, _CONVOLUTIONS) and (
            layer.groups != 1 or set(layer.dilation) != {1} or layer.padding_mode != "zeros"
        ):
            raise ConfigError(
                f"lora.enabled: {name} of {type(encoder).__name__} is a convolution with groups, "
                "dilation or padding that PEFT does not adapt. Set lora.enabled=false."
            )
        names.append(name)
    return names


def _layers(encoder: Encoder) -> Iterator[tuple[str, LoraLayer]]:
    """The adapted layers by name."""
    from peft.tuners.lora import LoraLayer

    for name, module in encoder.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _parameters(encoder: Encoder, name: str) -> dict[str, nn.Parameter]:
    _require(encoder, name)
    return {
        f"{key}.{matrix}": getattr(layer, matrix)[name].weight
        for key, layer in _layers(encoder)
        for matrix in _MATRICES
    }


def _weight(layer: LoraLayer) -> Tensor:
    weight = layer.get_base_layer().weight
    assert isinstance(weight, Tensor), "an adapted layer has one weight"
    return weight


def _require(encoder: Encoder, name: str) -> None:
    names = adapter_names(encoder)
    if name not in names:
        there = ", ".join(names) or "none"
        raise ValueError(f"this encoder has no adapter {name!r}; it has: {there}")


def _refuse_merged(encoder: Encoder, what: str) -> None:
    if _KEPT in vars(encoder):
        raise ValueError(f"while an adapter is merged, {what}: unmerge first")
