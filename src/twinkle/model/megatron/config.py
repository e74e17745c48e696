"""Megatron's config from a model's, the mesh and a script's keywords, and what a script's ``ddp_config`` means here."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.keywords import known_keywords
from twinkle.core.process.events import event_log
from twinkle.model.megatron.families import Family
from twinkle.model.megatron.layout import Layout

BY_MESH = {
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "virtual_pipeline_model_parallel_size": "vpp_size",
    "context_parallel_size": "cp_size",
    "expert_model_parallel_size": "ep_size",
    "expert_tensor_parallel_size": "etp_size",
}
"""Fields of Megatron's that the mesh says, and what it calls them."""
UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of Megatron's that say how layers lie which do not divide."""
BY_MODEL = ("perform_initialization", "use_cpu_initialization", "calculate_per_token_loss")
"""Fields that this package's passes need as they are."""
VARIABLE = "variable_seq_lengths"
DISTRIBUTED = "use_distributed_optimizer"
"""The one of Megatron's settings of data parallelism that has something to set."""

log = event_log()


def transformer_config(
    config: PretrainedConfig,
    family: Family,
    layout: Layout,
    *,
    dtype: torch.dtype,
    is_filled: bool,
    keywords: Mapping[str, Any],
    own_names: frozenset[str],
) -> TransformerConfig:
    """Megatron's config of a model.

    Args:
        config: The model's own.
        family: Its row.
        layout: The ranks.
        dtype: Of the weights.
        is_filled: Whether weights are read, and need not be drawn.
        keywords: Megatron's fields by name, over what the model's config says.
        own_names: What the caller's constructor takes itself: for the nearest name of an unknown one.

    Raises:
        InvalidInput: A keyword is unknown, or set elsewhere, or Megatron refuses the whole.
        ConfigError: The mesh does not divide the model.
    """
    _require_division(config, layout, keywords)
    settings = {
        **family.settings(config),
        **_parallel(layout),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": not is_filled,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": layout.pp_size > 1 and layout.vpp_size == 1,
        "gradient_accumulation_fusion": False,
        "batch_p2p_comm": False,
        "moe_token_dispatcher_type": "alltoall",
    }
    settings |= _checked(keywords, family.config_class, own_names)
    try:
        return family.config_class(**settings)
    except (ValueError, AssertionError, TypeError) as error:
        raise InvalidInput("config", f"Megatron refuses these settings: {error}") from error


def distributes_optimizer(config: Mapping[str, Any] | None, default: bool) -> bool:
    """Whether the optimizer's state is spread over data ranks.

    Raises:
        InvalidInput: A name is no setting of Megatron's.
    """
    taken = dict(config or {})
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    for name in taken.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        raise InvalidInput(
            f"ddp_config.{name}", f"is not known; {f'did you mean {near[0]}?' if near else 'leave it out'}"
        )
    idle = sorted(taken.keys() - {DISTRIBUTED})
    if idle:
        log.info("megatron.ddp.without_effect", names=", ".join(idle), next="gradients are summed once a window")
    return bool(taken.get(DISTRIBUTED, default))


def _parallel(layout: Layout) -> dict[str, Any]:
    mesh = layout.mesh
    return {
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "virtual_pipeline_model_parallel_size": layout.vpp_size if layout.vpp_size > 1 else None,
        "context_parallel_size": mesh.size("cp"),
        "expert_model_parallel_size": mesh.ep_size or 1,
        "expert_tensor_parallel_size": mesh.etp_size,
        "sequence_parallel": layout.tp_size > 1,
    }


def _checked(
    keywords: Mapping[str, Any], config_class: type[TransformerConfig], own_names: frozenset[str]
) -> dict[str, Any]:
    if not keywords.get(VARIABLE, True):
        raise InvalidInput(VARIABLE, "is False, but rows go through the stages as long as they are; leave it out")
    fields = {field.name for field in dataclasses.fields(config_class)}
    found: dict[str, Any] = {}
    known_keywords("MegatronModel", keywords, (*fields, *own_names))
    for name, value in keywords.items():
        if name in BY_MESH:
            raise InvalidInput(name, f"is said by the device mesh; give it {BY_MESH[name]}")
        if name in BY_MODEL:
            raise InvalidInput(name, "is set by MegatronModel itself; leave it out")
        if name in fields and name != VARIABLE:
            found[name] = _dtype(name, value) if name.endswith("dtype") and isinstance(value, str) else value
    return found


def _dtype(name: str, text: str) -> torch.dtype:
    found = vars(torch).get(text.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise InvalidInput(name, f"{text!r} is no dtype of torch's; send 'bfloat16' or 'float32'")
    return found


def experts_of(config: PretrainedConfig) -> int:
    """How many experts a layer of a model has; 0: it has none."""
    sizes = config.to_dict()
    return max(int(sizes.get(name) or 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _require_division(config: PretrainedConfig, layout: Layout, keywords: Mapping[str, Any]) -> None:
    sizes = config.to_dict()
    ep_size, etp_size = layout.mesh.ep_size or 1, layout.mesh.etp_size
    if experts_of(config) % ep_size:
        raise ConfigError(f"ep_size: {ep_size} does not divide the model's {experts_of(config)} experts")
    if experts_of(config) and sizes["moe_intermediate_size"] % etp_size:
        raise ConfigError(
            f"etp_size: {etp_size} does not divide the model's moe_intermediate_size, which is"
            f" {sizes['moe_intermediate_size']}"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if sizes.get(name) and sizes[name] % layout.tp_size:
            raise ConfigError(f"tp_size: {layout.tp_size} does not divide the model's {name}, which is {sizes[name]}")
    stages = layout.pp_size * layout.vpp_size
    if sizes["num_hidden_layers"] % stages and not keywords.keys() & set(UNEVEN):
        raise ConfigError(
            f"pp_size: {layout.pp_size} (vpp_size {layout.vpp_size}) does not divide the model's"
            f" {sizes['num_hidden_layers']} layers; say how many the ends get with {UNEVEN[0]} or {UNEVEN[1]}"
        )
