"""The gate of an MLP in one launch each way, for devices that launches keep waiting: ``silu(gate) * up``.

On the way back it is computed anew: two thirds are kept of what autograd keeps of the two operations that models write.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from twinkle.module.tried import own_kernels, replace_forwards

MODULE = "twinkle.module.gated_kernels"
SILU = tuple(type(ACT2FN[name]) for name in ("silu", "swish"))
"""What models have for it, by what configurations call it."""
BLOCK = 1024
"""Values of a program."""


class Gate(torch.autograd.Function):
    """``y = silu(gate) * up``, all of one shape."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kernels: Any) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        y = torch.empty_like(gate)
        if y.numel():
            with torch.cuda.device_of(y):
                kernels.gate[(_num_blocks(y),)](gate, up, y, y.numel(), BLOCK=BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        dy = dy.contiguous()
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        if dy.numel():
            with torch.cuda.device_of(dy):
                ctx.kernels.gate_back[(_num_blocks(dy),)](dy, gate, up, d_gate, d_up, dy.numel(), BLOCK=BLOCK)
        return d_gate, d_up, None


def fuse_gates(model: torch.nn.Module) -> int:
    """Have MLPs of the usual form call our kernel; how many were found."""

    def forward_for(module: torch.nn.Module, device_type: str, dtype: torch.dtype) -> Any | None:
        kernels = kernels_for(device_type, dtype) if _is_usual(module) else None
        return None if kernels is None else _with_kernels(kernels)

    return replace_forwards(model, forward_for)


@cache
def kernels_for(device_type: str, dtype: torch.dtype) -> Any | None:
    """The kernels, if they run there and are right; else a line in the log says why."""
    return own_kernels(
        MODULE,
        lambda kernels: relative_error(kernels, torch.device(device_type), dtype),
        device_type=device_type,
        dtype=dtype,
        event="device.no_gated_kernel",
        instead="gates are multiplied as models do",
    )


def relative_error(kernels: Any, device: torch.device, dtype: torch.dtype) -> float:
    """The largest of values and gradients, by norm, of more values than a program has, and no whole number of these."""
    generator = torch.Generator().manual_seed(0)
    gate, up, dy = (4 * torch.randn(7, BLOCK // 2, generator=generator).to(device, dtype) for _ in range(3))
    with torch.enable_grad():
        sides = gate.requires_grad_(), up.requires_grad_()
        y = Gate.apply(*sides, kernels)
        found = (y, *torch.autograd.grad(y, sides, dy))
        exact = [side.detach().double().requires_grad_() for side in sides]
        y = functional.silu(exact[0]) * exact[1]
        expected = (y, *torch.autograd.grad(y, exact, dy.double()))
    errors = [(ours.double() - right).norm() / right.norm() for ours, right in zip(found, expected, strict=True)]
    return float(torch.stack(errors).detach().max())


def _is_usual(module: torch.nn.Module) -> bool:
    """Whether it computes what ``_usual_forward`` says, by its code, and its gate is SiLU."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType):
        return False
    code, usual = forward.__code__, _usual_forward.__code__
    is_same = (code.co_code, code.co_names) == (usual.co_code, usual.co_names)
    return is_same and type(module.act_fn) in SILU


def _usual_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504 - to the byte what transformers' classes have


def _with_kernels(kernels: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(Gate.apply(self.gate_proj(x), self.up_proj(x), kernels))
        return found

    return forward


def _num_blocks(values: torch.Tensor) -> int:
    return -(-values.numel() // BLOCK)
