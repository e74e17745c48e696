"""A stand-in for the kernels of an MLP's gate, which only GPUs run: it reads and writes the same places."""

from __future__ import annotations

import torch

from harness.lora_kernels import Kernel


class GatedKernels:
    """What ``twinkle.module.gated_kernels`` has."""

    def __init__(self) -> None:
        self.gate = Kernel(_gate)
        self.gate_back = Kernel(_gate_back)


def _gate(
    grid: tuple[int], gates: torch.Tensor, ups: torch.Tensor, ys: torch.Tensor, numel: int, *, BLOCK: int
) -> None:
    num_covered = min(numel, grid[0] * BLOCK)
    gate, up = (side.reshape(-1)[:num_covered].float() for side in (gates, ups))
    ys.view(-1)[:num_covered] = (gate * gate.sigmoid() * up).to(ys.dtype)


def _gate_back(
    grid: tuple[int], d_ys: torch.Tensor, gates: torch.Tensor, ups: torch.Tensor, d_gates: torch.Tensor,
    d_ups: torch.Tensor, numel: int, *, BLOCK: int,
) -> None:  # fmt: skip
    num_covered = min(numel, grid[0] * BLOCK)
    d_y, gate, up = (side.reshape(-1)[:num_covered].float() for side in (d_ys, gates, ups))
    share = gate.sigmoid()
    d_gates.view(-1)[:num_covered] = (d_y * up * share * (1 + gate * (1 - share))).to(d_gates.dtype)
    d_ups.view(-1)[:num_covered] = (d_y * gate * share).to(d_ups.dtype)
