"""The stages of a model that this rank holds, as Megatron's modules."""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import distributed
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from twinkle.core.errors import ConfigError
from twinkle.model.megatron.families import Family
from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.modules.norm import RootMeanSquareNorm

LAYER_INDEX = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
EXPERT_INDEX = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")
PLAIN_ROPE = "default"


class StageModel(GPTModel):
    """Megatron's model, whose copies of a tied embedding are brought together by ``tie`` once they are filled."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark them; Megatron would sum them here, on CUDA's device, before they have values."""
        if not self.share_embeddings_and_output_weights or (self.pre_process and self.post_process):
            return
        weight: Any = self.shared_embedding_or_output_weight()
        weight.shared_embedding = True
        if not self.pre_process:
            weight.shared = True
            with torch.no_grad():
                weight.zero_()


def build_stages(settings: TransformerConfig, config: PretrainedConfig, family: Family, layout: Layout) -> list[Any]:
    """One model for each of this rank's stages, from the first on, on the CPU."""
    return [
        _stage(settings, config, family, layout, stage if layout.vpp_size > 1 else None)
        for stage in range(layout.vpp_size)
    ]


def _stage(
    settings: TransformerConfig, config: PretrainedConfig, family: Family, layout: Layout, stage: int | None
) -> Any:
    pp_rank = layout.groups.pp.rank()
    first = get_transformer_layer_offset(settings, stage, pp_rank)
    count = get_num_layers_to_build(settings, stage, pp_rank)
    block = TransformerBlockSubmodules(
        layer_specs=[family.layer(settings, config, index) for index in range(first, first + count)],
        layer_norm=RootMeanSquareNorm,
    )
    is_first, is_last = stage in (None, 0), stage in (None, layout.vpp_size - 1)
    rope = config.rope_parameters
    model = StageModel(
        config=settings,
        transformer_layer_spec=block,
        vocab_size=-(-config.vocab_size // layout.tp_size) * layout.tp_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=pp_rank == 0 and is_first,
        post_process=layout.is_last_stage and is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        rotary_base=rope["rope_theta"],
        pg_collection=layout.groups,
        vp_stage=stage,
    )
    if rope["rope_type"] != PLAIN_ROPE and not settings.multi_latent_attention:
        model.rotary_pos_emb.inv_freq = _scaled_frequencies(config, str(rope["rope_type"]))
    return model


def _scaled_frequencies(config: PretrainedConfig, kind: str) -> torch.Tensor:
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if factor != 1.0 or kind in ("dynamic", "longrope"):
        raise ConfigError(
            f"model_id: its rope_type is {kind!r}, which Megatron's attention does not compute; use TransformersModel"
        )
    return frequencies


def mark_partial_gradients(stages: list[Any]) -> None:
    """Mark the norms of heads: each tensor rank has the gradient from its own heads alone."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, SelfAttention):
                for norm in (module.q_layernorm, module.k_layernorm):
                    for parameter in norm.parameters():
                        parameter.sums_over_heads = True


@torch.no_grad()
def tie(stages: list[Any], layout: Layout) -> None:
    """Give the last stage's head the values of the first's embedding, where they are one weight."""
    for model in stages:
        shares = model.share_embeddings_and_output_weights and (model.pre_process or model.post_process)
        if shares and not (model.pre_process and model.post_process):
            weight = model.shared_embedding_or_output_weight()
            if not model.pre_process:
                weight.zero_()
            distributed.all_reduce(weight, group=layout.groups.embd)


def named_parameters(stages: list[Any], layout: Layout) -> dict[str, torch.nn.Parameter]:
    """The rank's parameters by Megatron's names, layers and experts by their numbers in the whole model."""
    found: dict[str, torch.nn.Parameter] = {}
    for model in stages:
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            found[whole_name(name, numbers, layout, model.config)] = parameter
    return found


def named_buffers(stages: list[Any], layout: Layout) -> dict[str, torch.Tensor]:
    """What the rank's modules keep in checkpoints beside parameters: the biases of routers that balance experts."""
    found: dict[str, torch.Tensor] = {}
    for model in stages:
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        stored = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in stored:
                found[whole_name(name, numbers, layout, model.config)] = buffer
    return found


def whole_name(name: str, numbers: list[int], layout: Layout, settings: TransformerConfig) -> str:
    """A parameter's name in the whole model, from its name in a stage whose layers have these numbers."""
    layer = LAYER_INDEX.fullmatch(name)
    if layer is not None:
        name = f"{layer[1]}{numbers[int(layer[2])]}{layer[3]}"
    expert = EXPERT_INDEX.fullmatch(name)
    if expert is not None:
        assert settings.num_moe_experts is not None
        each = settings.num_moe_experts // layout.groups.ep.size()
        name = f"{expert[1]}{layout.groups.ep.rank() * each + int(expert[2])}{expert[3]}"
    return name
