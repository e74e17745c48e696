"""Where adapters can be on a rank's stages: each of Megatron's linear layers is made of published ones, its parts.

Experts are left alone, as PEFT leaves what is no Linear; so are embedding and head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import distributed

from twinkle.model.megatron.build import whole_name
from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.weights.convert import EXPERTS
from twinkle.model.megatron.weights.rules import Named, WeightTable
from twinkle.module.targets import Target, kind_of

WEIGHT = ".weight"
LAYERS = "decoder.layers."


@dataclass(frozen=True)
class Part:
    """One published Linear.

    Args:
        path: What PEFT calls it.
        num_inputs: Of the whole.
        num_outputs: Of the whole.
    """

    path: str
    num_inputs: int
    num_outputs: int


@dataclass(frozen=True)
class Site:
    """One linear layer of Megatron's.

    Args:
        name: Its name in the whole model.
        named: The rule of its weight.
        parts: The published Linears that it is made of.
        splits_inputs: Whether tensor ranks have different inputs, not different outputs.
        expert: Of whose layers it is, by its number in the whole model; None: every token goes through it.
    """

    name: str
    named: Named
    parts: tuple[Part, ...]
    splits_inputs: bool
    expert: int | None = None


def picked_rows(
    named: Named, parts: Sequence[Part], rank: int, size: int
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Of each part its outputs that a rank has, and how the rank's layer puts them in order."""
    starts = [sum(part.num_outputs for part in parts[:index]) for index in range(len(parts) + 1)]
    numbers = [torch.arange(start, end)[:, None] for start, end in pairwise(starts)]
    local = named.rule.local(numbers, rank, size)[:, 0]
    rows: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    for start, end in pairwise(starts):
        is_of_part = (local >= start) & (local < end)
        rows.append(local[is_of_part] - start)
        places.append(is_of_part.nonzero()[:, 0])
    return tuple(rows), torch.cat(places).argsort()


def linear_layers(stages: Sequence[Any], layout: Layout) -> dict[str, torch.nn.Module]:
    """The linear layers of this rank's stages that may have adapters, by their names in the whole model."""
    return {name: module for name, module in _linear_layers(stages, layout) if EXPERTS not in name}


def expert_layers(stages: Sequence[Any], layout: Layout) -> dict[str, torch.nn.Module]:
    """Those of the experts that this rank has."""
    return {name: module for name, module in _linear_layers(stages, layout) if EXPERTS in name}


def _linear_layers(stages: Sequence[Any], layout: Layout) -> Iterator[tuple[str, torch.nn.Module]]:
    for model in stages:
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for path, module in model.named_modules():
            name = whole_name(path, numbers, layout, model.config)
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and name.startswith(LAYERS):
                yield name, module


def sites_of(modules: Mapping[str, torch.nn.Module], table: WeightTable, layout: Layout) -> dict[str, Site]:
    """The same of the whole model, in its order; every rank of the pipeline must ask."""
    own = {name: _site(name, module, table, layout.groups.tp.size()) for name, module in modules.items()}
    group = layout.groups.pp
    stages: list[dict[str, Site]] = [own] * group.size()
    if group.size() > 1:
        distributed.all_gather_object(stages, own, group=group)
    every = {name: site for stage in stages for name, site in stage.items()}
    places = {rule.megatron: place for place, rule in enumerate(table.rules)}
    ordered = sorted(every.values(), key=lambda site: (_layer_number(site.name), places[site.named.rule.megatron]))
    return {site.name: site for site in ordered}


def _site(name: str, module: Any, table: WeightTable, size: int) -> Site:
    named = table.find(f"{name}{WEIGHT}")
    held = torch.empty(module.weight.shape, device="meta")
    parts = tuple(
        Part(each.removesuffix(WEIGHT), tensor.shape[1], tensor.shape[0])
        for each, tensor in zip(named.published, named.rule.whole([held] * size), strict=True)
    )
    return Site(name, named, parts, isinstance(module, RowParallelLinear))


def _layer_number(name: str) -> int:
    return int(name.split(".")[2])


def targets_of(sites: Iterable[Site]) -> tuple[Target, ...]:
    """The published Linears that adapters can train."""
    found: list[Target] = []
    for site in sites:
        for part in site.parts:
            kind = kind_of(part.path)
            if kind is not None:
                weight = torch.empty(part.num_outputs, part.num_inputs, device="meta")
                found.append(Target(part.path, kind, torch.nn.Module(), weight))
    return tuple(found)
