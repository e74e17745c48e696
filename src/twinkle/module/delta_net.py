"""Gated delta-net layers (Qwen3-Next, Qwen3.5 and their mixtures of experts) over packed sequences.

transformers' own forward takes a packed row for one sequence: its convolution and its state would carry over from each
tenant's tokens into the next one's. What stands in for it here has the same parameters under the same names, so that
adapters, weights and sharding find them where they were.

Shapes: T packed tokens, S spans, D hidden size, C channels of the convolution, H value heads, G key heads, K key size,
V value size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from twinkle.core.errors import ConfigError
from twinkle.module.delta_kernels import delta_rule
from twinkle.module.delta_rule import DeltaInputs
from twinkle.module.packed_attention import PackedAttention
from twinkle.module.packed_states import LayerState, Taps
from twinkle.module.recurrence import LayerFunctions, mix, pack_layers, state_bytes

DELTA_NETS = (Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet, Qwen3_5MoeGatedDeltaNet)


def pack_delta_nets(model: torch.nn.Module, functions: LayerFunctions) -> int:
    """Let the gated delta-net layers of ``model`` run on packed rows; the bytes that they remember of a sequence."""
    return pack_layers(model, DELTA_NETS, lambda layer: PackedDeltaNet(layer, functions))


class PackedDeltaNet(torch.nn.Module):
    """Stands in for one gated delta-net layer of transformers."""

    in_proj_qkvz: torch.nn.Module
    in_proj_ba: torch.nn.Module
    in_proj_qkv: torch.nn.Module
    in_proj_z: torch.nn.Module
    in_proj_b: torch.nn.Module
    in_proj_a: torch.nn.Module

    def __init__(self, base: Any, functions: LayerFunctions) -> None:
        super().__init__()
        if base.activation not in ("silu", "swish"):
            raise ConfigError(f"its linear attention uses {base.activation}, and only silu is served")
        self.layer_idx: int = base.layer_idx
        self.num_key_heads: int = base.num_k_heads
        self.num_value_heads: int = base.num_v_heads
        self.key_size: int = base.head_k_dim
        self.value_size: int = base.head_v_dim
        self.epsilon: float = base.norm.variance_epsilon
        self.conv1d, self.norm, self.out_proj = base.conv1d, base.norm, base.out_proj
        self.A_log, self.dt_bias = base.A_log, base.dt_bias
        self.is_grouped = isinstance(base, Qwen3NextGatedDeltaNet)
        for name in ("in_proj_qkvz", "in_proj_ba") if self.is_grouped else _SPLIT_PROJECTIONS:
            setattr(self, name, getattr(base, name))
        self._functions = functions
        self._rule = delta_rule(self.A_log.device, functions.exp)

    @property
    def state_bytes(self) -> int:
        """What a ``LayerState`` of this layer takes."""
        return state_bytes(self.num_value_heads * self.key_size * self.value_size, self.conv1d)

    def forward(self, hidden_states: torch.Tensor, *, packed_attention: PackedAttention, **unused: Any) -> torch.Tensor:
        """Mix the tokens of each packed sequence [1, T, D]."""
        states = packed_attention.states
        past = states.before(self.layer_idx)
        mixed_TC, gate_THV, beta_TH, step_TH = (part.squeeze(0) for part in self._project(hidden_states))
        taps = Taps(self.conv1d.weight.squeeze(1), states, past)
        convolved_TC = self._functions.silu(taps(mixed_TC))
        inputs = self._inputs(convolved_TC, beta_TH, step_TH)
        out_THV, after = mix(self._rule, inputs, states, past)
        if after is not None:
            pasts = taps.after(mixed_TC)
            states.keep(self.layer_idx, [LayerState(*state) for state in zip(pasts, after, strict=True)])
        gated_THV = self._gated_norm(out_THV, gate_THV)
        output: torch.Tensor = self.out_proj(gated_THV.flatten(1)[None])
        return output

    def _project(self, hidden_1TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What goes into the convolution [1, T, C], the gate [1, T, H, V], beta and the step [1, T, H]."""
        heads = (self.num_value_heads, self.value_size)
        if not self.is_grouped:
            gate = self.in_proj_z(hidden_1TD).unflatten(-1, heads)
            return self.in_proj_qkv(hidden_1TD), gate, self.in_proj_b(hidden_1TD), self.in_proj_a(hidden_1TD)
        # Interleaved: each key head with the value heads that it serves.
        served = self.num_value_heads // self.num_key_heads
        sizes = (self.key_size, self.key_size, served * self.value_size, served * self.value_size)
        grouped = self.in_proj_qkvz(hidden_1TD).unflatten(-1, (self.num_key_heads, -1)).split(sizes, dim=-1)
        query, key, value, gate = (part.flatten(2) for part in grouped)
        pairs = self.in_proj_ba(hidden_1TD).unflatten(-1, (self.num_key_heads, -1)).split((served, served), dim=-1)
        beta, step = (part.flatten(2) for part in pairs)
        return torch.cat((query, key, value), dim=-1), gate.unflatten(-1, heads), beta, step

    def _inputs(self, convolved_TC: torch.Tensor, beta_TH: torch.Tensor, step_TH: torch.Tensor) -> DeltaInputs:
        key_dim = self.num_key_heads * self.key_size
        value_dim = self.num_value_heads * self.value_size
        query, key, value = convolved_TC.split((key_dim, key_dim, value_dim), dim=-1)
        served = self.num_value_heads // self.num_key_heads
        query_THK, key_THK = (
            part.unflatten(-1, (self.num_key_heads, self.key_size)).repeat_interleave(served, dim=1)
            for part in (query, key)
        )
        speed_H = self.A_log.float().exp()
        return DeltaInputs(
            query_THK,
            key_THK,
            value.unflatten(-1, (self.num_value_heads, self.value_size)),
            -speed_H * self._functions.softplus(step_TH.float() + self.dt_bias),
            self._functions.sigmoid(beta_TH),
        )

    def _gated_norm(self, x_THV: torch.Tensor, gate_THV: torch.Tensor) -> torch.Tensor:
        """The norm over each head and its gate, rounded where transformers' is."""
        scaled = x_THV.float()
        scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + self.epsilon)
        weighted = self.norm.weight * scaled.to(x_THV.dtype)
        return (weighted * self._functions.silu(gate_THV.float())).to(x_THV.dtype)


_SPLIT_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
