"""A base model for one rank: whole, or with this rank's share of the layers alone, which no rank ever holds whole.

What it computes untouched is found out before anything is changed; of shares on a twin whose layers are gathered one by
one, and which owns no memory of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from twinkle.hub.support import TOWER_LEFT_OUT, WITH_PICTURES
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.process_group import torch_mesh
from twinkle.infra.rank_group import RankGroup
from twinkle.model.fused.probe import Probe
from twinkle.model.loading import WHOLE_BELOW, decoder_of, load_base_model
from twinkle.model.parallel.sharding import layers_of, shard_decoder
from twinkle.model.parallel.spread import load_spread
from twinkle.module.token_inputs import TokenInputs

Prepare = Callable[[Any], None]


def load_with_probe(
    path: str,
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    with_tower: bool,
    prepare: Prepare,
    sharing: RankGroup | None,
    reduce: Prepare = lambda model: None,
) -> tuple[Any, Probe]:
    """The model on its device, untouched, and what it computes.

    Args:
        path: A folder or an id of a hub.
        name: What it is called.
        dtype: Of its weights.
        device: Where they lie.
        with_tower: As in ``load_base_model``.
        prepare: Gets a model that computes as this one does.
        reduce: Gets one that is whole, before it goes to its device.
        sharing: Ranks that share its layers; None: it is whole. All must call it together.
    """
    load = partial(load_base_model, path, name=name, dtype=dtype, with_tower=with_tower)
    if sharing is None:
        model = load()
        reduce(model)
        return _whole(model, device, prepare)
    mesh = torch_mesh(DeviceMesh.from_sizes(fsdp_size=sharing.size, device_type=device.type))["fsdp"]
    model = load(
        spread=lambda model_class, folder, **options: load_spread(
            model_class, folder, mesh, device, choose=_parameters_of_layers, **options
        )
    )
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return _whole(model, device, prepare)
    model.eval().requires_grad_(False)
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    decoder = decoder_of(twin)
    shard_decoder(decoder, TokenInputs(twin, decoder).tables, mesh)
    prepare(twin)
    probe = Probe(twin, device)
    probe.serve(model)
    return model, probe


def _whole(model: Any, device: torch.device, prepare: Prepare) -> tuple[Any, Probe]:
    model = model.to(device)
    prepare(model)
    return model, Probe(model.eval().requires_grad_(False), device)


def _parameters_of_layers(model: Any) -> Iterable[torch.nn.Parameter]:
    """Of a class for pictures too those of the language model."""
    model_type = model.config.model_type
    if model_type in WHOLE_BELOW:
        return layers_of(decoder_of(model.language_model)).parameters()
    holds_a_tower = model_type in WITH_PICTURES | TOWER_LEFT_OUT
    return layers_of(model.base_model.language_model if holds_a_tower else decoder_of(model)).parameters()
