"""Rotary embeddings of queries and keys in one launch each way, for devices that launches keep waiting.

Models call a function of their file that does it with ten, and with more on the way back. Attention of a model whose
function is of the usual form gets ours instead, for itself alone: nothing of transformers' is changed.

Shapes: H query heads, G key heads, T packed tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch

from twinkle.module.tried import own_kernels, replace_forwards

MODULE = "twinkle.module.rotary_kernels"
FUNCTION = "apply_rotary_pos_emb"
"""What models call it."""

Turn = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Rotary(torch.autograd.Function):
    """``x * cos + rotated(x) * sin`` of queries and of keys; positions get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kernels: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cosines, sines)
        ctx.kernels = kernels
        return _turned(query, key, cosines, sines, kernels, back=False)

    @staticmethod
    def backward(ctx: Any, d_query: torch.Tensor, d_key: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return (*_turned(d_query, d_key, cosines, sines, ctx.kernels, back=True), None, None, None)


def fuse_rotary(model: torch.nn.Module) -> int:
    """Have the attention of a known form call our kernel; how many layers were found."""

    def forward_for(module: torch.nn.Module, device_type: str, dtype: torch.dtype) -> FunctionType | None:
        forward = type(module).forward
        plain = forward.__globals__.get(FUNCTION) if isinstance(forward, FunctionType) else None
        if plain is None or FUNCTION not in forward.__code__.co_names:
            return None
        kernels = kernels_for(device_type, dtype, plain)
        if kernels is None:
            return None
        names = {**forward.__globals__, FUNCTION: _with_kernels(plain, kernels)}
        changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        changed.__kwdefaults__ = forward.__kwdefaults__
        return changed

    return replace_forwards(model, forward_for)


@cache
def kernels_for(device_type: str, dtype: torch.dtype, plain: Turn) -> Any | None:
    """The kernels, if they run there and do what a model's function does; else a line in the log says why."""
    return own_kernels(
        MODULE,
        lambda kernels: relative_error(kernels, plain, torch.device(device_type), dtype),
        device_type=device_type,
        dtype=dtype,
        event="device.no_rotary_kernel",
        instead="queries and keys are turned as the model does",
        function=plain.__module__,
    )


def relative_error(kernels: Any, plain: Turn, device: torch.device, dtype: torch.dtype) -> float:
    """The largest of turned queries and keys and of their gradients, by norm; angles are unlike in every place."""
    num_tokens, heads, groups, size = 5, 6, 2, 24
    generator = torch.Generator().manual_seed(0)

    def rows(num_heads: int) -> torch.Tensor:
        by_token = torch.randn(1, num_tokens, num_heads, size, generator=generator).to(device, dtype)
        return by_token.transpose(1, 2).requires_grad_()

    query, key, d_query, d_key = rows(heads), rows(groups), rows(heads), rows(groups)
    angles = torch.randn(1, num_tokens, size, generator=generator).to(device)
    found = []
    with torch.enable_grad():
        for turn in (plain, _with_kernels(plain, kernels)):
            turned = turn(query, key, angles.cos().to(dtype), angles.sin().to(dtype))
            gradients = torch.autograd.grad(turned, (query, key), (d_query.detach(), d_key.detach()))
            found.append([each.detach().double() for each in (*turned, *gradients)])
    errors = [(ours - theirs).norm() / theirs.norm() for theirs, ours in zip(*found, strict=True)]
    return float(torch.stack(errors).max())


def _with_kernels(plain: Turn, kernels: Any) -> Turn:
    def turn(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_plain = not rest and not options and q.dim() == 4 and len(q) == len(k) == len(cos) == 1
        # Some turn a part of each head, or have angles of a dtype of their own.
        if is_plain and q.shape[3] == k.shape[3] == cos.shape[-1] and q.dtype == k.dtype == cos.dtype:
            if torch.is_grad_enabled():
                return Rotary.apply(q, k, cos, sin, kernels)
            return _turned(q, k, cos, sin, kernels, back=False)
        return plain(q, k, cos, sin, *rest, **options)

    return turn


def _turned(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    cosines_1TD: torch.Tensor,
    sines_1TD: torch.Tensor,
    kernels: Any,
    *,
    back: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    xs = [x if x.stride(3) == 1 else x.contiguous() for x in (query_1HTD, key_1GTD)]
    cosines, sines = cosines_1TD.contiguous(), sines_1TD.contiguous()
    (_, heads, num_tokens, size), groups = xs[0].shape, xs[1].shape[1]
    # By token, as they came from their products and as attention wants them.
    ys = [x.new_empty(1, num_tokens, x.shape[1], size) for x in xs]
    if num_tokens:
        with torch.cuda.device_of(xs[0]):
            kernels.turn[(num_tokens, 2)](
                *xs, *ys, cosines, sines, *(x.stride(2) for x in xs), *(x.stride(1) for x in xs),
                cosines.stride(1), sines.stride(1), heads, groups, size // 2,
                BACK=back, HEADS=_power_of_two(max(heads, groups)), HALF=_power_of_two(size // 2),
            )  # fmt: skip
    query, key = (y.transpose(1, 2) for y in ys)
    return query, key


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
