"""Adapters of one model spread over ranks: made, made active one at a time, merged."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import peft
import torch

from twinkle.core.errors import InvalidInput
from twinkle.hub.caches import published_id
from twinkle.model.megatron.gradients import Spread
from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.lora.layers import Active, Pair, UpdatedLayer
from twinkle.model.megatron.lora.rules import lora_table, parameter_names, spreads_of
from twinkle.model.megatron.lora.sites import WEIGHT, Site, linear_layers, picked_rows, sites_of, targets_of
from twinkle.model.megatron.weights.convert import Change
from twinkle.model.megatron.weights.rules import WeightTable
from twinkle.model.peft_config import ALL_LINEAR, lora_config_of
from twinkle.module.adapter import LoraShape
from twinkle.module.lora import shapes_of


@dataclass(frozen=True)
class MegatronAdapter:
    """One adapter, as this rank holds it.

    Args:
        config: PEFT's, with the names of what it trains.
        parameters: By their names in the whole model.
        spreads: How each lies over ranks.
        pairs: By layers' names, a pair or None for each part.
    """

    config: peft.LoraConfig
    parameters: Mapping[str, torch.nn.Parameter]
    spreads: Mapping[str, Spread]
    pairs: Mapping[str, Sequence[Pair | None]]

    def settings(self, base_model: str) -> dict[str, Any]:
        """``adapter_config.json``."""
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        config.base_model_name_or_path = published_id(base_model)
        written: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=_jsonable))
        return written


def _jsonable(value: object) -> object:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


class MegatronAdapters:
    """Where adapters can be on a model, and which of them is active. All ranks must make it together.

    Args:
        stages: This rank's.
        table: The rules of their weights.
        layout: The ranks.
        is_sequence_parallel: Whether each tensor rank has some of the tokens between layers.
    """

    def __init__(
        self, stages: Sequence[Any], table: WeightTable, layout: Layout, *, is_sequence_parallel: bool
    ) -> None:
        self._layout = layout
        self._is_sequence_parallel = is_sequence_parallel
        self._active = Active()
        self._modules = linear_layers(stages, layout)
        self.sites = sites_of(self._modules, table, layout)
        self.targets = targets_of(self.sites.values())
        self.table = lora_table(self.sites.values())
        for name, module in self._modules.items():
            self._update_layer(self.sites[name], module)
        for stage in stages:
            if stage.pre_process:
                stage.embedding.register_forward_hook(self._let_gradients_through)

    @property
    def own_names(self) -> Sequence[str]:
        """The names of the sites whose layers are on this rank's stages."""
        return tuple(self._modules)

    def add_site(self, site: Site, module: torch.nn.Module) -> None:
        """Let adapters be on one more of this rank's layers, which no rule of the table names."""
        self.sites[site.name] = site
        self._modules[site.name] = module
        self._update_layer(site, module)

    def _update_layer(self, site: Site, module: torch.nn.Module) -> None:
        module.register_forward_hook(
            UpdatedLayer(site, self._active, self._layout, is_sequence_parallel=self._is_sequence_parallel)
        )

    def _let_gradients_through(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        # Layers that are computed again pass gradients on for marked inputs only, and the embedding is frozen.
        is_wanted = self._active.pairs and torch.is_grad_enabled() and not output.requires_grad
        return output.requires_grad_() if is_wanted else output

    def create(self, config: Any, default_modules: str | Sequence[str] = ALL_LINEAR) -> MegatronAdapter:
        """An adapter by its ``peft.LoraConfig``, drawn in PEFT's order from torch's generator.

        Raises:
            InvalidInput: The config names no layer of the model, or asks for what is not computed.
        """
        if isinstance(config, peft.LoraConfig) and config.target_parameters:
            raise InvalidInput(
                "target_parameters", "names experts' weights, which have no adapters under Megatron; leave it out"
            )
        with torch.random.fork_rng(devices=[]):
            lora = lora_config_of(config, self.targets, default_modules, applies_dropout=True)
        shapes = {shape.path: shape for shape in shapes_of(self.targets, lora)}
        config = copy.deepcopy(config)
        config.target_modules = _shortest(shapes, self.targets)
        return self._made(config, shapes)

    def _made(self, config: peft.LoraConfig, shapes: Mapping[str, LoraShape]) -> MegatronAdapter:
        parameters: dict[str, torch.nn.Parameter] = {}
        spreads: dict[str, Spread] = {}
        pairs: dict[str, list[Pair | None]] = {}
        for site in self.sites.values():
            for index, part in enumerate(site.parts):
                shape = shapes.get(part.path)
                drawn = None if shape is None else _drawn(shape)
                if site.name not in self._modules:
                    continue
                pair: Pair | None = None
                if shape is not None and drawn is not None:
                    names = parameter_names(site, index)
                    a, b = (self._local(name, tensor) for name, tensor in zip(names, drawn, strict=True))
                    pair = Pair(a, b, shape.scale)
                    parameters |= dict(zip(names, (a, b), strict=True))
                    spreads |= spreads_of(site, index, is_sequence_parallel=self._is_sequence_parallel)
                pairs.setdefault(site.name, []).append(pair)
        trained = {name: found for name, found in pairs.items() if any(pair is not None for pair in found)}
        return MegatronAdapter(config, parameters, spreads, trained)

    def _local(self, name: str, tensor: torch.Tensor) -> torch.nn.Parameter:
        group = self._layout.groups.tp
        local = self.table.find(name).rule.local([tensor], group.rank(), group.size())
        return torch.nn.Parameter(local.contiguous().to(self._layout.device))

    @contextmanager
    def active(self, adapter: MegatronAdapter | None) -> Iterator[None]:
        """Let one adapter take part in passes, or none; with its dropout in those of training."""
        self._active.pairs = {} if adapter is None else adapter.pairs
        self._active.dropout = 0.0 if adapter is None else adapter.config.lora_dropout
        try:
            yield
        finally:
            self._active.pairs = {}

    def merging(self, adapter: MegatronAdapter) -> Change:
        """What makes of each weight, by its name, the weight with the adapter's update in it."""

        def merged(name: str, weight: torch.Tensor) -> torch.Tensor:
            pairs = adapter.pairs.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
            if pairs is None:
                return weight
            update = self._update(self.sites[name.removesuffix(WEIGHT)], pairs, weight)
            return (weight.float() + update).to(weight.dtype)

        return merged

    def _update(self, site: Site, pairs: Sequence[Pair | None], weight: torch.Tensor) -> torch.Tensor:
        products = [None if pair is None else (pair.b @ pair.a).detach() * pair.scale for pair in pairs]
        if site.splits_inputs:
            [product] = products
            assert product is not None
            return product
        group = self._layout.groups.tp
        rows, order = picked_rows(site.named, site.parts, group.rank(), group.size())
        updates = [
            torch.zeros(len(own), weight.shape[1], device=weight.device) if product is None else product
            for product, own in zip(products, rows, strict=True)
        ]
        return torch.cat(updates)[order.to(weight.device)]


def _shortest(shapes: Mapping[str, LoraShape], targets: Sequence[Any]) -> set[str]:
    """The last names of what is trained, or whole paths where something of such a name is not."""
    ends = {path.rpartition(".")[2] for path in shapes}
    is_whole = all(target.path in shapes for target in targets if target.path.rpartition(".")[2] in ends)
    return ends if is_whole else set(shapes)


def _drawn(shape: LoraShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Both matrices, whole, by the same draws as PEFT's."""
    a = torch.nn.Linear(shape.in_features, shape.rank, bias=False).weight.data
    b = torch.nn.Linear(shape.rank, shape.out_features, bias=False).weight.data
    torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    return a, b.zero_()
