"""Gated delta-net layers (Qwen3.5) under Megatron: over packed rows, with tensor and context parallelism.

Megatron's own needs ``flash-linear-attention``, and knows neither packed rows nor context parallelism. Parameters have
its names and its layout (queries, keys, values, gate, beta, step of this rank's heads in one projection); the
recurrence is the one of the fused engine. With context parallelism every rank takes the whole sequences of its share of
the heads, and gives back what each of the others has of them.

Shapes: N tokens of this rank, T of the whole row, X outputs of the projection, C channels of the convolution, H value
heads, G key heads, K key size, V value size; heads and channels are those of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from twinkle.core.errors import ConfigError
from twinkle.model.megatron.modules.packed import Bounds, bounds_of, gathered_order
from twinkle.module.delta_kernels import delta_rule
from twinkle.module.delta_rule import DeltaInputs
from twinkle.module.packed_states import PackedStates
from twinkle.module.recurrence import mix


@dataclass
class DeltaNetSubmodules:
    """The projections of a layer."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class GatedNorm(torch.nn.Module):
    """The norm over each value head, times SiLU of its gate; the weight is the same on all tensor ranks."""

    def __init__(self, size: int, eps: float, *, group: Any, dtype: torch.dtype, device: torch.device | int) -> None:
        super().__init__()
        self.eps = eps
        self._group = group
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device))

    def forward(self, x_THV: torch.Tensor, gate_THV: torch.Tensor) -> torch.Tensor:
        """Rounded where transformers' is."""
        scaled = x_THV.float()
        scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + self.eps)
        # Each tensor rank sees the gradient of its own heads.
        weight_V = copy_to_tensor_model_parallel_region(self.weight, group=self._group)
        gated: torch.Tensor = weight_V * scaled.to(x_THV.dtype) * functional.silu(gate_THV.float())
        return gated.to(x_THV.dtype)


class GatedDeltaNet(MegatronModule):
    """One gated delta-net layer.

    Args:
        config: Its ``linear_*`` settings say how many heads of which size.
        submodules: The projections.
        layer_number: Counted from one.
        pg_collection: The groups of this model.

    Raises:
        ConfigError: The heads cannot be shared among so many ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = layer_number
        self.tensor_group: Any = groups.tp
        self.context_group: Any = groups.cp
        self._heads = _Heads.of(config, groups.tp.size(), groups.cp.size())
        whole = self._heads.times(groups.tp.size())
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(whole.projected),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=groups.tp,
        )
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        made = {"dtype": config.params_dtype, "device": device}
        channels = sum(self._heads.convolved)
        num_taps = config.linear_conv_kernel_dim
        self.conv1d = torch.nn.Conv1d(channels, channels, num_taps, groups=channels, bias=False, **made)
        self.dt_bias = torch.nn.Parameter(torch.ones(self._heads.num_values, **made))
        self.A_log = torch.nn.Parameter(torch.zeros(self._heads.num_values, **made))
        for sharded in (self.conv1d.weight, self.dt_bias, self.A_log):
            sharded.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.out_norm = GatedNorm(self._heads.value_size, config.layernorm_epsilon, group=groups.tp, **made)
        self.out_proj = build_module(
            submodules.out_proj,
            whole.num_values * whole.value_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=groups.tp,
        )
        self._rule = delta_rule(self.A_log.device, torch.exp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the tokens of each packed sequence [N, 1, D], or of each of a batch [S, B, D]; Megatron's pair."""
        projected, _ = self.in_proj(hidden_states)
        length, batch = projected.shape[:2]
        if packed_seq_params is None:
            whole = length * self.context_group.size()
            bounds: Bounds = tuple(range(0, whole * batch + 1, whole))
        else:
            bounds = bounds_of(packed_seq_params)
        rows_NX = projected.transpose(0, 1).flatten(0, 1)
        mixed = self._mix(rows_NX, bounds).unflatten(0, (batch, length)).transpose(0, 1)
        output: tuple[torch.Tensor, torch.Tensor | None] = self.out_proj(mixed)
        return output

    def _mix(self, rows_NX: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """The gated values [N, H * V] of this rank's tokens."""
        if self.context_group.size() == 1:
            return self._mix_whole(rows_NX, self._heads, bounds, share=None)
        share = _Share(self.context_group, bounds)
        heads = self._heads.over(share.size)
        values_TC = self._mix_whole(share.whole_of_heads(rows_NX, self._heads.projected), heads, bounds, share=share)
        return share.tokens_of_all_heads(values_TC)

    def _mix_whole(self, rows_TX: torch.Tensor, heads: _Heads, bounds: Bounds, share: _Share | None) -> torch.Tensor:
        """The gated values [T, H * V] of some heads over whole sequences."""
        convolved = self._heads.convolved
        weight_CK, speed_H, bias_H = (
            weight if share is None else share.own_part(weight, sizes)
            for weight, sizes in (
                (self.conv1d.weight.squeeze(1), convolved),
                (self.A_log, (self._heads.num_values,)),
                (self.dt_bias, (self._heads.num_values,)),
            )
        )
        mixed_TC, gate, beta_TH, step_TH = rows_TX.split(heads.split, dim=-1)
        states = PackedStates(list(pairwise(bounds)))
        taken_TC = functional.silu(causal_taps(mixed_TC, weight_CK, states.places(rows_TX.device)))
        query, key, value = taken_TC.split(heads.convolved, dim=-1)
        query_THK, key_THK = (
            part.unflatten(-1, (heads.num_keys, heads.key_size)).repeat_interleave(heads.served, dim=1)
            for part in (query, key)
        )
        inputs = DeltaInputs(
            query_THK,
            key_THK,
            value.unflatten(-1, (heads.num_values, heads.value_size)),
            -speed_H.float().exp() * functional.softplus(step_TH.float() + bias_H),
            beta_TH.sigmoid(),
        )
        out_THV, _ = mix(self._rule, inputs, states, [None] * (len(bounds) - 1))
        gate_THV = gate.unflatten(-1, (heads.num_values, heads.value_size))
        normed: torch.Tensor = self.out_norm(out_THV, gate_THV)
        return normed.flatten(1)


def causal_taps(x_TC: torch.Tensor, weight_CK: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
    """A causal convolution of each channel that starts anew with every sequence; its weights may be trained."""
    y_TC = x_TC * weight_CK[:, -1]
    for shift in range(1, weight_CK.shape[1]):
        length = x_TC.shape[0]
        before_TC = functional.pad(x_TC[: max(length - shift, 0)], (0, 0, min(shift, length), 0))
        before_TC = torch.where((places_T >= shift)[:, None], before_TC, 0.0)
        y_TC = y_TC + before_TC * weight_CK[:, -1 - shift]
    return y_TC


@dataclass(frozen=True)
class _Heads:
    """Some heads of a layer."""

    num_keys: int
    num_values: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, config: TransformerConfig, tp_size: int, cp_size: int) -> _Heads:
        """Those of one tensor rank."""
        num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
        assert num_keys and num_values and config.linear_key_head_dim and config.linear_value_head_dim, "a delta net"
        if num_keys % (tp_size * cp_size):
            raise ConfigError(
                f"linear_num_key_heads: {num_keys} heads cannot be shared by tp_size {tp_size} * cp_size {cp_size}"
                " ranks; lower one of them"
            )
        heads = cls(num_keys, num_values, config.linear_key_head_dim, config.linear_value_head_dim)
        return heads.over(tp_size)

    def over(self, count: int) -> _Heads:
        """One of ``count`` equal shares."""
        return _Heads(self.num_keys // count, self.num_values // count, self.key_size, self.value_size)

    def times(self, count: int) -> _Heads:
        """So many of such shares."""
        return _Heads(self.num_keys * count, self.num_values * count, self.key_size, self.value_size)

    @property
    def served(self) -> int:
        """Value heads that share a key head."""
        return self.num_values // self.num_keys

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.num_keys * self.key_size
        return keys, keys, self.num_values * self.value_size

    @property
    def split(self) -> tuple[int, int, int, int]:
        """What the projection gives: what is convolved, the gate, beta and the step."""
        return sum(self.convolved), self.num_values * self.value_size, self.num_values, self.num_values

    @property
    def projected(self) -> tuple[int, ...]:
        """The same with queries, keys and values apart: each lies head by head."""
        return (*self.convolved, *self.split[1:])


class _Share:
    """What a rank of context parallelism takes of the heads, and gives back of the tokens."""

    def __init__(self, group: Any, bounds: Bounds) -> None:
        self.size: int = group.size()
        self._group, self._rank = group, group.rank()
        self._order = gathered_order(bounds, self.size)

    def own_part(self, weight: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """This rank's share of each of the parts that a weight consists of."""
        return torch.cat([part.chunk(self.size)[self._rank] for part in weight.split(list(sizes))])

    def whole_of_heads(self, rows_NX: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The whole row [T, X / size] of this rank's heads, from its tokens of all heads."""
        parts = [part.chunk(self.size, dim=-1) for part in rows_NX.split(list(sizes), dim=-1)]
        to_each = torch.cat([torch.cat(shares, dim=-1) for shares in zip(*parts, strict=True)])
        gathered: torch.Tensor = all_to_all(self._group, to_each)
        return gathered.index_select(0, self._order.to(rows_NX.device))

    def tokens_of_all_heads(self, values_TC: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of all heads [N, C * size], from the whole row of its own."""
        to_each = values_TC.index_select(0, self._order.argsort().to(values_TC.device))
        gathered: torch.Tensor = all_to_all(self._group, to_each)
        return torch.cat(gathered.chunk(self.size), dim=-1)
