"""Mixtures of experts: softmax routing with and without shared experts, and DeepSeek's groups."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed
from torch.nn import functional
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from harness.megatron_layers.ranks import HIDDEN, Found, Layout, Ranks, apart, config_of, drawn, gradient_of
from twinkle.model.megatron.modules.experts import ExpertLayer

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
OURS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}


def check_qwen2_experts(layout: Layout) -> Found:
    config = _published("qwen2_moe", num_experts=8, shared_expert_intermediate_size=16, norm_topk_prob=False)
    settings = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}
    return experts(layout, Qwen2MoeSparseMoeBlock(config), {**settings, "moe_router_pre_softmax": True})


def check_qwen3_experts(layout: Layout) -> Found:
    return experts(layout, Qwen3MoeSparseMoeBlock(_published("qwen3_moe", num_experts=8, norm_topk_prob=True)), {})


def check_deepseek_experts(layout: Layout) -> Found:
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
    settings = {
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
    }
    third = DeepseekV3MoE(_published("deepseek_v3", **groups))
    torch.nn.init.uniform_(third.gate.e_score_correction_bias, -0.5, 0.5)
    second = DeepseekV2Moe(_published("deepseek_v2", topk_method="group_limited_greedy", **groups))
    by_sigmoid = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return {
        f"{name} {version}": value
        for version, plain, added in (("V3", third, by_sigmoid), ("V2", second, {"moe_router_pre_softmax": True}))
        for name, value in experts(layout, plain, {**settings, **added}).items()
    }


def _published(model_type: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, hidden_size=HIDDEN, **EXPERTS, **settings)


def experts(layout: Layout, plain: torch.nn.Module, settings: dict[str, Any]) -> Found:
    torch.manual_seed(7)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = config_of(
        layout,
        activation_func=functional.silu,
        gated_linear_unit=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        **OURS,
        **settings,
    )
    ranks = Ranks(layout)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer: Any = ExpertLayer(config, pg_collection=groups)
    layer.train()
    counterparts = _Counterparts(plain, ranks, groups)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(counterparts.own(name, lambda weight: weight.data))
    if config.moe_router_enable_expert_bias:
        layer.router.expert_bias.copy_(plain.get_buffer("gate.e_score_correction_bias"))
    # Ranks with the same experts see other tokens.
    torch.manual_seed(groups.dp.rank())
    hidden, slope = drawn(HIDDEN), drawn(HIDDEN)
    for tensor in hidden:
        tensor.requires_grad_()
    expected = torch.cat([plain(one[None])[0] for one in hidden])
    (expected * torch.cat(slope)).sum().backward()
    own_hidden = ranks.own([one.detach() for one in hidden]).requires_grad_()
    found, _ = layer(own_hidden[:, None])
    (found[:, 0] * ranks.own(slope)).sum().backward()
    result = {
        "output": apart(ranks.together(found[:, 0]), expected.detach()),
        "gradient of hidden": apart(
            ranks.together(gradient_of(own_hidden)), torch.cat([gradient_of(one) for one in hidden])
        ),
    }
    for parameter in plain.parameters():
        distributed.all_reduce(gradient_of(parameter), group=groups.dp)
    for name, parameter in layer.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        is_expert = ".local_experts." in name
        distributed.all_reduce(gradient, group=groups.expt_dp if is_expert else groups.dp_cp)
        if ranks.is_sequence_parallel and getattr(parameter, "sequence_parallel", False):
            distributed.all_reduce(gradient, group=groups.tp)
        result[f"gradient of {name}"] = apart(gradient, counterparts.own(name, gradient_of))
    return result


class _Counterparts:
    """The published weights' part that each parameter of a rank holds."""

    def __init__(self, plain: torch.nn.Module, ranks: Ranks, groups: ProcessGroupCollection) -> None:
        self._plain, self._ranks, self._groups = plain, ranks, groups

    def own(self, name: str, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        get = self._plain.get_parameter
        if name == "router.weight":
            return of(get("gate.weight"))
        if name == "shared_experts.gate_weight":
            return of(get("shared_expert_gate.weight"))
        if name.startswith("shared_experts."):
            return self._shared(name, of)
        _, _, number, part, _ = name.split(".")
        each = 8 // self._groups.ep.size()
        expert = self._groups.ep.rank() * each + int(number)
        size, rank = self._groups.expt_tp.size(), self._groups.expt_tp.rank()
        if part == "linear_fc2":
            return of(get("experts.down_proj"))[expert].chunk(size, dim=1)[rank]
        halves = of(get("experts.gate_up_proj"))[expert].chunk(2)
        return torch.cat([half.chunk(size)[rank] for half in halves])

    def _shared(self, name: str, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        children = dict(self._plain.named_children())
        shared = children.get("shared_expert") or children["shared_experts"]
        if "linear_fc2" in name:
            return self._ranks.shard(of(shared.get_parameter("down_proj.weight")), axis=1)
        halves = [of(shared.get_parameter(f"{half}_proj.weight")) for half in ("gate", "up")]
        return torch.cat([self._ranks.shard(half) for half in halves])
