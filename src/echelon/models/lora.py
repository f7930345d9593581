"""Low-rank adapters on an encoder: small matrices that learn while the base stays as it was.

An adapted layer computes base(x) + α/r · B(A(x)), with A drawn and B zero, so that an adapter
changes nothing until it is trained (Hu et al., 2022). Every linear layer of the encoder gets one
through PEFT; the rest (norms, embeddings of place) is frozen with the base. PEFT is imported on
use, as that takes seconds and is an extra of the installation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from echelon.config.agents import LoraConfig
from echelon.errors import ConfigError, StoreError
from echelon.models.encoders import Encoder

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear


def adapt(encoder: Encoder, lora: LoraConfig, names: Sequence[str]) -> None:
    """Give every linear layer an adapter under each name; the first acts and is trained.

    In place: layers are wrapped, the base is frozen, outputs stay as they were. The draws come
    from torch's global generator, which the caller seeds.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"lora.enabled needs PEFT, which cannot be imported ({error}). Install it with "
            "`pip install 'echelon[lora]'`, or set lora.enabled=false."
        ) from None
    linear = [name for name, layer in encoder.named_modules() if isinstance(layer, nn.Linear)]
    pattern = "|".join(re.escape(name) for name in linear)
    for name in names:
        peft.inject_adapter_in_model(
            peft.LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number will do
                target_modules=pattern,
            ),
            encoder,
            adapter_name=name,
        )
        # PEFT warns of a second adapter where it finds the first one's settings on the model.
        del vars(encoder)["peft_config"]
    for _, layer in adapted_layers(encoder):
        layer.set_adapter(names[0])


def adapter_parameters(encoder: Encoder, name: str) -> dict[str, nn.Parameter]:
    """One adapter's matrices by layer: `layer.lora_A` and `layer.lora_B`, whatever its name."""
    return {
        f"{key}.{matrix}": getattr(layer, matrix)[name].weight
        for key, layer in adapted_layers(encoder)
        for matrix in ("lora_A", "lora_B")
    }


def adapter_state(encoder: Encoder, name: str) -> dict[str, Tensor]:
    """Copies of one adapter's matrices."""
    parameters = adapter_parameters(encoder, name)
    return {key: value.detach().clone() for key, value in parameters.items()}


def load_adapter_state(encoder: Encoder, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Set one adapter to what `adapter_state` gave, of this or of another name."""
    own = adapter_parameters(encoder, name)
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


@torch.no_grad()
def merged_weights(encoder: Encoder, name: str) -> dict[str, Tensor]:
    """Weights of the encoder without adapters that computes what this one does with `name`."""
    weights = {
        key.replace(".base_layer.", "."): value.clone()
        for key, value in encoder.state_dict().items()
        if ".lora_" not in key
    }
    for key, layer in adapted_layers(encoder):
        weights[f"{key}.weight"] += layer.get_delta_weight(name)
    return weights


class AdapterSize(NamedTuple):
    """Weights of an encoder with an adapter: those that train, and all it computes with."""

    trained: int
    whole: int

    @property
    def share(self) -> float:
        """0.12: an expert trains 12 % of what it computes with."""
        return self.trained / self.whole


def adapter_size(encoder: Encoder) -> AdapterSize:
    """How much of an encoder would be trained now; adapters that are not in use do not count."""
    trained = sum(p.numel() for p in encoder.parameters() if p.requires_grad)
    named = encoder.named_parameters()
    frozen = sum(p.numel() for name, p in named if not p.requires_grad and ".lora_" not in name)
    return AdapterSize(trained, frozen + trained)


def adapted_layers(encoder: Encoder) -> Iterator[tuple[str, LoraLinear]]:
    """The adapted layers by name."""
    from peft.tuners.lora import Linear as LoraLinear

    for name, module in encoder.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module
