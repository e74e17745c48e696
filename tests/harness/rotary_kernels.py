"""A stand-in for the kernel that turns queries and keys, which only GPUs run: it reads and writes the same places."""

from __future__ import annotations

import torch

from harness.lora_kernels import Kernel


class RotaryKernels:
    """What ``twinkle.module.rotary_kernels`` has."""

    def __init__(self) -> None:
        self.turn = Kernel(_turn)


def _turn(
    grid: tuple[int, int], x_0: torch.Tensor, x_1: torch.Tensor, y_0: torch.Tensor, y_1: torch.Tensor,
    cosines: torch.Tensor, sines: torch.Tensor, token_stride_0: int, token_stride_1: int,
    head_stride_0: int, head_stride_1: int, cosine_stride: int, sine_stride: int, heads_0: int, heads_1: int, half: int,
    *, BACK: bool, HEADS: int, HALF: int,
) -> None:  # fmt: skip
    num_tokens, of = grid
    assert of == 2 and max(heads_0, heads_1) <= HEADS and half <= HALF
    cos, sin = (
        each.as_strided((num_tokens, 1, 2 * half), (stride, 0, 1)).float()
        for each, stride in ((cosines, cosine_stride), (sines, sine_stride))
    )
    for x, y, heads, strides in (
        (x_0, y_0, heads_0, (token_stride_0, head_stride_0, 1)),
        (x_1, y_1, heads_1, (token_stride_1, head_stride_1, 1)),
    ):
        rows = x.as_strided((num_tokens, heads, 2 * half), strides).float()
        turned = rows * cos + (_rotated(rows * sin, -1) if BACK else _rotated(rows, 1) * sin)
        y.view(num_tokens, heads, 2 * half).copy_(turned.to(y.dtype))


def _rotated(rows: torch.Tensor, sign: int) -> torch.Tensor:
    first, second = rows.chunk(2, dim=-1)
    return torch.cat((-sign * second, sign * first), dim=-1)
