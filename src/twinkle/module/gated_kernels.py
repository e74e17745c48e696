"""An MLP's gate in one launch each way, in Triton: as models write it that takes two, and three on the way back."""

from __future__ import annotations

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def gate(gates, ups, ys, numel, BLOCK: tl.constexpr):
    """``y = silu(gate) * up``, of ``numel`` values each."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < numel
    gated = tl.load(gates + place, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(ups + place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(ys + place, (gated * tl.sigmoid(gated) * up).to(ys.dtype.element_ty), mask=is_there)


@triton.jit
def gate_back(d_ys, gates, ups, d_gates, d_ups, numel, BLOCK: tl.constexpr):
    """The gradients of both, by those of ``y``."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < numel
    d_y = tl.load(d_ys + place, mask=is_there, other=0.0).to(tl.float32)
    gated = tl.load(gates + place, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(ups + place, mask=is_there, other=0.0).to(tl.float32)
    share = tl.sigmoid(gated)
    d_gate = d_y * up * share * (1.0 + gated * (1.0 - share))
    tl.store(d_gates + place, d_gate.to(d_gates.dtype.element_ty), mask=is_there)
    tl.store(d_ups + place, (d_y * gated * share).to(d_ups.dtype.element_ty), mask=is_there)
