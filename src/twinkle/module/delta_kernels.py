"""The gated delta rule by the kernels of ``flash-linear-attention``, for accelerators.

They take sequences packed in one row (``cu_seqlens``) and begin each from its own state. What they compute is compared
with the plain rule when a model starts, as all of the packed path is (``model.probe``).

Shapes: T packed tokens, S sequences, H heads, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from twinkle.core.process.events import event_log
from twinkle.module.delta_rule import DeltaInputs, DeltaRule, PlainDeltaRule
from twinkle.module.packed_states import SpanChunks
from twinkle.module.recurrence import Elementwise

PACKAGE = "fla"
MODULE = "fla.ops.gated_delta_rule"

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

log = event_log()


@dataclass(frozen=True)
class FlashDeltaRule:
    """The rule by two kernels with the signatures of ``flash-linear-attention``."""

    chunk_gated_delta_rule: Kernel
    fused_recurrent_gated_delta_rule: Kernel

    def over_spans(
        self, inputs: DeltaInputs, chunks: SpanChunks, before_SHKV: torch.Tensor | None, *, keeps: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`Recurrence`."""
        out_1THV, after_SHKV = self.chunk_gated_delta_rule(
            **_arguments(inputs, batch_axis=0),
            initial_state=before_SHKV,
            output_final_state=keeps,
            cu_seqlens=chunks.bounds,
        )
        return out_1THV[0], after_SHKV

    def over_tokens(self, inputs: DeltaInputs, before_SHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Recurrence`."""
        out_S1HV, after_SHKV = self.fused_recurrent_gated_delta_rule(
            **_arguments(inputs, batch_axis=1), initial_state=before_SHKV, output_final_state=True
        )
        assert after_SHKV is not None, "asked for"
        return out_S1HV[:, 0], after_SHKV


def _arguments(inputs: DeltaInputs, *, batch_axis: int) -> dict[str, Any]:
    query, key, value, decay, beta = (values.unsqueeze(batch_axis).contiguous() for values in inputs)
    return {"q": query, "k": key, "v": value, "g": decay, "beta": beta, "use_qk_l2norm_in_kernel": True}


def delta_rule(device: torch.device, exp: Elementwise) -> DeltaRule:
    """The rule as it is computed on a device: ``exp`` is for the plain one."""
    if device.type == "cpu":
        return PlainDeltaRule(exp)
    return _kernels(device.type) or PlainDeltaRule(exp)


@cache
def _kernels(device_type: str) -> FlashDeltaRule | None:
    if find_spec(PACKAGE) is None:
        log.warning("model.delta_rule.plain", device=device_type, next="pip install flash-linear-attention; it is slow")
        return None
    module = import_module(MODULE)
    return FlashDeltaRule(module.chunk_gated_delta_rule, module.fused_recurrent_gated_delta_rule)
