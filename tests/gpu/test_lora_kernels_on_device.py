"""The kernels that read adapters in place, on the device; their tables are tested on a CPU, by a stand-in for them."""

from __future__ import annotations

import pytest
import torch

from twinkle.module.lora_check import kernels_for, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [(1, 16), (5, 64), (96, 33), (129, 256)], ids=str)
def test_updates_and_gradients_are_right_at_every_rank(ranks: tuple[int, int], dtype: torch.dtype) -> None:
    """Ranks of which none fills its block, rows that fill no tile, and one owner whose rows lie in two places."""
    kernels = kernels_for("cuda", torch.bfloat16)
    assert kernels is not None
    assert relative_error(kernels, torch.device("cuda"), dtype, ranks=ranks) < 0.01
