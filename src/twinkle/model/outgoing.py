"""A model's weights on their way to a sampler: by transformers' names, an adapter's update in them or left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor

from twinkle.checkpoint_engine.sharded import whole
from twinkle.core.errors import InvalidInput
from twinkle.model.weight_files import PEFT_CONTAINERS
from twinkle.module.lora import LoraAdapter

WRAPPED = ".base_layer"
SAVED, ORIGINAL = "modules_to_save", "original_module"
NamedWeights = Iterator[tuple[str, torch.Tensor]]


@torch.no_grad()
def outgoing_weights(model: Any, adapter_name: str, *, merge: bool) -> NamedWeights:
    """The weights of a transformers model or of what PEFT made of it, each whole. On a mesh every rank must iterate.

    Nothing of the model changes: a merged weight is computed as it is asked for.

    Raises:
        InvalidInput: The adapter's update cannot be added to a weight.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    trained = f".{SAVED}.{adapter_name}." if merge and adapter_name else None
    replaced = {name.partition(trained)[0] for name, _ in base.named_parameters() if trained and trained in name}
    for name, parameter in base.named_parameters():
        parts = name.split(".")
        if SAVED in parts:
            if trained and trained in name:
                yield name.replace(trained, "."), whole(parameter.detach())
        elif ORIGINAL in parts:
            if name.partition(f".{ORIGINAL}.")[0] not in replaced:
                yield name.replace(f".{ORIGINAL}.", "."), whole(parameter.detach())
        elif not any(part.startswith(PEFT_CONTAINERS) for part in parts):
            weight = whole(parameter.detach())
            path, _, kind = name.rpartition(".")
            if merge and WRAPPED in path:
                weight = _merged(base, path, kind, weight, adapter_name)
            yield f"{path.replace(WRAPPED, '')}.{kind}", weight


def _merged(base: torch.nn.Module, path: str, kind: str, weight: torch.Tensor, adapter_name: str) -> torch.Tensor:
    """The weight with the update of every layer that wraps it: experts are wrapped once for each of their weights."""
    while path.endswith(WRAPPED):
        path = path.removesuffix(WRAPPED)
        layer: Any = base.get_submodule(path)
        if adapter_name not in layer.scaling or kind != getattr(layer, "parameter_name", "weight"):
            continue
        weight = weight + _update(layer, path, adapter_name).to(weight.dtype)
    return weight


def _update(layer: Any, path: str, adapter_name: str) -> torch.Tensor:
    if layer.use_dora.get(adapter_name):
        raise InvalidInput("merge_and_sync", f"{path} is trained by DoRA, whose update is no sum; send False")
    a = layer.lora_A[adapter_name].weight if adapter_name in layer.lora_A else None
    if not isinstance(a, DTensor):
        update: torch.Tensor = layer.get_delta_weight(adapter_name)
        return update
    if hasattr(layer, "parameter_name"):
        raise InvalidInput("merge_and_sync", f"{path} holds sharded experts; send False")
    return layer.scaling[adapter_name] * (whole(layer.lora_B[adapter_name].weight) @ whole(a))


@torch.no_grad()
def outgoing_fused(weights: Mapping[str, torch.Tensor], adapter: LoraAdapter | None) -> NamedWeights:
    """The frozen weights of the fused engine, with an adapter's update in them unless there is none."""
    shapes = {} if adapter is None else {shape.path: shape for shape in adapter.layout.shapes}
    for name, weight in weights.items():
        # A Linear is trained by its path, a weight of experts by its own name.
        path = name if name in shapes else name.removesuffix(".weight")
        if adapter is None or path not in shapes:
            yield name, weight
            continue
        shape, pair = shapes[path], adapter.views[path]
        update = shape.scale * (pair.b.float() @ pair.a.float())
        update = update.mT if shape.is_swapped else update
        yield name, weight + update.to(weight)
