"""Kernels of our own on the device; what they are given is tested on a CPU, by stand-ins for them."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from twinkle.module import gated, rotary
from twinkle.module.lora_check import kernels_for, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_members", [1, 2, 3])
@pytest.mark.parametrize("ranks", [(1, 16), (5, 64), (96, 33), (129, 256)], ids=str)
def test_updates_and_gradients_are_right_at_every_rank(
    ranks: tuple[int, int], num_members: int, dtype: torch.dtype
) -> None:
    """Ranks of which none fills its block, rows that fill no tile, and one owner whose rows lie in two places."""
    kernels = kernels_for("cuda", torch.bfloat16)
    assert kernels is not None
    assert relative_error(kernels, torch.device("cuda"), dtype, ranks=ranks, num_members=num_members) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_and_keys_are_turned_as_models_turn_them(dtype: torch.dtype) -> None:
    kernels = rotary.kernels_for("cuda", dtype, apply_rotary_pos_emb)
    assert kernels is not None
    assert rotary.relative_error(kernels, apply_rotary_pos_emb, torch.device("cuda"), dtype) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_are_multiplied_as_models_multiply_them(dtype: torch.dtype) -> None:
    kernels = gated.kernels_for("cuda", dtype)
    assert kernels is not None
    assert gated.relative_error(kernels, torch.device("cuda"), dtype) < 0.01
