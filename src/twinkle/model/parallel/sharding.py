"""A frozen base model whose layers are spread over the ranks: each is gathered while it computes (FSDP2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.fsdp import fully_shard

from twinkle.core.errors import ConfigError
from twinkle.model.parallel.spread import spread_parameters_kept


def shard_decoder(decoder: torch.nn.Module, tables: Sequence[torch.nn.Module], mesh: TorchDeviceMesh) -> None:
    """Leave each rank its share of every layer's weights. All ranks must call it, then make the same passes.

    Adapters stay whole on every rank; so do the embedding and the output head, which are used outside the decoder.

    Args:
        decoder: The stack of layers; from now on to be called itself, never one of its layers.
        tables: The parts of it that stay whole: embeddings, in which tokens are looked up before it is called.
        mesh: The ranks, on one axis.

    Raises:
        ConfigError: The decoder has no list of layers.
    """
    with spread_parameters_kept(decoder):
        for layer in layers_of(decoder):
            fully_shard(layer, mesh=mesh)
        ignored = {parameter for table in tables for parameter in table.parameters()}
        fully_shard(decoder, mesh=mesh, ignored_params=ignored)


def layers_of(decoder: torch.nn.Module) -> torch.nn.ModuleList:
    """The list of a decoder's layers.

    Raises:
        ConfigError: It has none.
    """
    layers = next((module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList)), None)
    if layers is None:
        raise ConfigError(f"{type(decoder).__name__} has no list of layers to shard; use TWINKLE_SHARD=replicate")
    return layers
