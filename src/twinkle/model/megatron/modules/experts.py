"""Mixtures of experts: Megatron's layer with experts as they are published, and DeepSeek's choice of groups.

Expert parallelism (tokens sent to whichever rank has the expert, by all-to-all) is Megatron's own; every rank of it
must run as many passes as the others.

Shapes: T tokens, E experts, G groups of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
Chosen = tuple[torch.Tensor, torch.Tensor]


class GroupChoice:
    """The best experts of the best groups, where a group is as good as its ``num_best`` best experts together.

    Megatron itself derives that number from others, which for DeepSeek-V2 is not what the model was trained with.
    """

    def __init__(self, num_best: int) -> None:
        self.num_best = num_best

    def get_replay_topk(
        self,
        scores_TE: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., Any],
    ) -> Chosen:
        """Scores and numbers of the chosen experts; Megatron asks for them under this name."""
        assert num_groups is not None and group_topk is not None, "the config has groups"
        grouped_TGE = scores_TE.unflatten(1, (num_groups, -1))
        worth_TG = grouped_TGE.topk(self.num_best, dim=-1)[0].sum(dim=-1)
        groups = worth_TG.topk(group_topk, dim=-1, sorted=False)[1]
        is_out_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter(1, groups, False)
        limited_TE = grouped_TGE.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1)
        found: Chosen = limited_TE.topk(topk, dim=-1)
        return found


class GroupLimitedRouter(TopKRouter):
    """DeepSeek's router: V3 adds up the two best experts of a group, V2 takes the best one."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        if config.moe_router_group_topk:
            self.router_replay: Any = GroupChoice(2 if config.moe_router_score_function == "sigmoid" else 1)

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """The logits; Megatron's own product asks Transformer Engine for one even where there is none."""
        dtype = ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(input.to(dtype), self.weight.to(dtype), bias)


class SplitsAsNumbers(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all, which takes how many tokens go where for numbers only after a copy from CUDA."""

    input_splits: Any
    output_splits: Any

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """How many tokens each local expert gets."""
        counts: torch.Tensor = super().preprocess(routing_map)
        splits: list[Any] = [self.input_splits, self.output_splits]
        if not routing_map.is_cuda and splits[0] is not None:
            self.input_splits, self.output_splits = (split.tolist() for split in splits)
        return counts


class ExpertLayer(MoELayer):
    """A mixture of experts in plain products, with shared experts where the config has them."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        products = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        parts = MoESubmodules(
            router=GroupLimitedRouter,
            experts=ModuleSpec(module=SequentialMLP, submodules=products),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=products),
        )
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, parts, layer_number, groups)
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = SplitsAsNumbers(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
            )
