"""Products whose results come in float32 though their factors are half as precise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twinkle.module.row_product import RowProduct


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_does_not_round_what_comes_out_of_a_half_precision_product(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def mm(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        """As a GPU makes it, which alone can."""
        asked.append((left.dtype, right.dtype))
        return left.as_subclass(torch.Tensor).to(out_dtype) @ right.to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 40, generator=generator).to(dtype) for size in (9, 30))
    exact = x.double() @ weight.double().t()
    product = RowProduct(min_rows=1, min_columns=1)

    found = product.in_float32(x.as_subclass(OnCuda), weight)

    assert asked == [(dtype, dtype)], "products of halves"
    assert found.dtype == torch.float32
    error = (found - exact).abs().max()
    assert error < 1e-4 < (product.in_float32(x, weight) - exact).abs().max()
