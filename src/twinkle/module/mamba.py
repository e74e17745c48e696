"""Mamba-2 layers (Nemotron-H) over packed sequences.

As with gated delta nets (``delta_net``), transformers' own forward takes a packed row for one sequence. What stands in
for it here has the same parameters under the same names.

Shapes: T packed tokens, D hidden size, C channels of the convolution, H heads, G groups of heads, K state size,
V head size, I = H * V.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from twinkle.core.errors import ConfigError
from twinkle.module.packed_attention import PackedAttention
from twinkle.module.packed_states import LayerState, Taps
from twinkle.module.recurrence import LayerFunctions, mix, pack_layers, state_bytes
from twinkle.module.state_space import SpaceInputs, StateSpace


def pack_mamba_layers(model: torch.nn.Module, functions: LayerFunctions) -> int:
    """Let the Mamba-2 layers of ``model`` run on packed rows; the bytes that they remember of a sequence."""
    return pack_layers(model, (NemotronHMamba2Mixer,), lambda layer: PackedMamba(layer, functions))


class PackedMamba(torch.nn.Module):
    """Stands in for one Mamba-2 layer of transformers."""

    def __init__(self, base: Any, functions: LayerFunctions) -> None:
        super().__init__()
        if base.activation not in ("silu", "swish"):
            raise ConfigError(f"its Mamba layers use {base.activation}, and only silu is served")
        self.layer_idx: int = base.layer_idx
        self.num_heads: int = base.num_heads
        self.head_size: int = base.head_dim
        self.num_groups: int = base.n_groups
        self.state_size: int = base.ssm_state_size
        self.shortest_step: float = base.time_step_limit[0]
        self.conv1d, self.norm = base.conv1d, base.norm
        self.in_proj, self.out_proj = base.in_proj, base.out_proj
        self.A_log, self.D, self.dt_bias = base.A_log, base.D, base.dt_bias
        self._functions = functions
        self._rule = StateSpace(functions.exp)

    @property
    def state_bytes(self) -> int:
        """What a ``LayerState`` of this layer takes."""
        return state_bytes(self.num_heads * self.state_size * self.head_size, self.conv1d)

    def forward(self, hidden_states: torch.Tensor, *, packed_attention: PackedAttention, **unused: Any) -> torch.Tensor:
        """Mix the tokens of each packed sequence [1, T, D]."""
        states = packed_attention.states
        past = states.before(self.layer_idx)
        size = self.num_heads * self.head_size
        sizes = (size, self.conv1d.in_channels, self.num_heads)
        gate_TI, mixed_TC, step_TH = self.in_proj(hidden_states)[0].split(sizes, dim=-1)
        taps = Taps(self.conv1d.weight.squeeze(1), states, past)
        convolved_TC = taps(mixed_TC)
        if self.conv1d.bias is not None:
            convolved_TC = convolved_TC + self.conv1d.bias
        inputs, skipped_THV = self._inputs(self._functions.silu(convolved_TC).float(), step_TH)
        out_THV, after = mix(self._rule, inputs, states, past)
        if after is not None:
            pasts = taps.after(mixed_TC)
            states.keep(self.layer_idx, [LayerState(*state) for state in zip(pasts, after, strict=True)])
        normed_TI = self._gated_norm((out_THV + skipped_THV).flatten(1), gate_TI)
        output: torch.Tensor = self.out_proj(normed_TI.to(hidden_states.dtype)[None])
        return output

    def _inputs(self, convolved_TC: torch.Tensor, step_TH: torch.Tensor) -> tuple[SpaceInputs, torch.Tensor]:
        """What the recurrence takes, and what goes past it [T, H, V]."""
        size, shared = self.num_heads * self.head_size, self.num_groups * self.state_size
        value, key, query = convolved_TC.split((size, shared, shared), dim=-1)
        value_THV = value.unflatten(-1, (self.num_heads, self.head_size))
        key_TGK, query_TGK = (part.unflatten(-1, (self.num_groups, self.state_size)) for part in (key, query))
        # No limit above. transformers leaves this one out when it goes on token by token, but not when it trains.
        length_TH = self._functions.softplus(step_TH.float() + self.dt_bias.float()).clamp(min=self.shortest_step)
        decay_TH = -self.A_log.float().exp() * length_TH
        inputs = SpaceInputs(query_TGK, key_TGK, value_THV * length_TH[..., None], decay_TH)
        return inputs, value_THV * self.D.float()[:, None]

    def _gated_norm(self, x_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """The gate, then the norm over the channels of each group."""
        grouped_TGI = (x_TI * self._functions.silu(gate_TI.float())).unflatten(-1, (-1, self.norm.group_size))
        normed_TGI = grouped_TGI * torch.rsqrt(grouped_TGI.pow(2).mean(-1, keepdim=True) + self.norm.variance_epsilon)
        weighted_TI: torch.Tensor = self.norm.weight * normed_TGI.flatten(1)
        return weighted_TI
