"""How the memory of a device is divided between what is on it, before anything is served."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.infra.device_memory import GB, DeviceMemory, default_limit
from twinkle.infra.rank_group import RankGroup
from twinkle.model.fused.core import LoraCore
from twinkle.model.fused.model import FusedLoraModel
from twinkle.sampler.cache_kinds import caches_for
from twinkle.sampler.caches import blocks_for
from twinkle.sampler.kv_cache import BLOCK_TOKENS
from twinkle.sampler.places import with_guests
from twinkle.sampler.planning import STATES_PER_SLOT, block_bytes

ADAPTERS_PART = 0.5
"""Of what the base model and what is sampled leave; the rest is for activations."""
SAMPLED_PART = 0.25
"""Of what the base model leaves, for sequences that are sampled, at most."""
BASE, ADAPTERS, SEQUENCES = "base model", "adapters", "sampled sequences"


@dataclass(frozen=True, kw_only=True)
class SequenceRoom:
    """What the sampler may hold of the sequences under way."""

    kv_tokens: int
    max_length: int
    state_bytes: int


def limit_of(settings: Settings, device: torch.device, ranks: RankGroup) -> int:
    """What this rank may take of its device, asked before anything is there; the same on all ranks."""
    return min(ranks.gather(settings.device_bytes or default_limit(device, ranks.size)))


def bound_by_base(memory: DeviceMemory, limit_bytes: int, model: LoraCore) -> int:
    """Count the base model, and keep to the limit from now on; what it leaves.

    Raises:
        ConfigError: It leaves nothing of what the settings allow.
    """
    memory.limit_bytes = limit_bytes
    memory.fix(BASE, model.base_bytes)
    left = limit_bytes - model.base_bytes
    if left <= 0:
        raise ConfigError(
            f"TWINKLE_DEVICE_BYTES: the base model takes {model.base_bytes / GB:.3g} GB of"
            f" {limit_bytes / GB:.3g} GB; raise it, or serve a smaller model"
        )
    return left


def reserve_sequences(memory: DeviceMemory, settings: Settings, model: FusedLoraModel, left: int) -> SequenceRoom:
    """Keep room for what is sampled: for all places with whole contexts, or as much of that as its part allows.

    Raises:
        ConfigError: There is no room for one block.
    """
    context = model.info.max_context_length
    places = with_guests(settings.sample_slots)
    of_state = STATES_PER_SLOT * model.state_bytes
    state_bytes = min(settings.sampler_state_bytes, int(left * SAMPLED_PART) // 2, places * of_state)
    block_tokens = caches_for(model).block_tokens
    of_block = (block_bytes(model) - model.state_bytes) * block_tokens // BLOCK_TOKENS
    most = (int(left * SAMPLED_PART) - state_bytes) // of_block
    if most < 1:
        raise ConfigError(
            f"TWINKLE_DEVICE_BYTES: a quarter of the {left / GB:.3g} GB that the base model leaves is not enough for"
            f" {block_tokens} tokens of a sequence that is sampled, which take {of_block} bytes; raise it"
        )
    blocks = min(most, places * blocks_for(context, block_tokens))
    memory.reserve(SEQUENCES, blocks * of_block + state_bytes)
    tokens = blocks * block_tokens
    return SequenceRoom(
        kv_tokens=tokens, max_length=min(context, tokens), state_bytes=max(state_bytes, int(of_state > 0))
    )


def reserve_adapters(memory: DeviceMemory, settings: Settings) -> int:
    """Keep room for adapters: as much as is asked for, or half of what is not promised; how much that is.

    Raises:
        ConfigError: What is asked for is not there.
    """
    left = memory.unpromised_bytes
    assert left is not None
    wanted = settings.adapter_bytes or int(left * ADAPTERS_PART)
    if wanted > left:
        raise ConfigError(
            f"TWINKLE_ADAPTER_BYTES: {wanted / GB:.3g} GB do not fit into the {max(left, 0) / GB:.3g} GB that the base"
            f" model and what is sampled leave of {memory.told()}; lower it, or raise TWINKLE_DEVICE_BYTES"
        )
    memory.reserve(ADAPTERS, wanted)
    return wanted
