"""Elementwise functions give a row the bits that it has alone, wherever it stands, with however many threads."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from twinkle.module.rowwise import RowwiseActivation, rowwise_mul

NUM_ROWS = (9, 67, 101, 1001)


@pytest.fixture(params=[1, 2, 3, 6])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_features", [96, 1376])
@pytest.mark.parametrize("activation", [functional.silu, functional.gelu, torch.sigmoid])
def test_a_row_is_activated_as_it_is_alone(activation, num_features: int, num_threads: int) -> None:
    rowwise = RowwiseActivation(activation)
    for num_rows in NUM_ROWS:
        rows_TN = torch.randn(num_rows, num_features, generator=torch.Generator().manual_seed(num_rows)) * 3
        torch.set_num_threads(1)
        alone_TN = torch.cat([rowwise(row_N[None]) for row_N in rows_TN])
        torch.set_num_threads(num_threads)

        assert torch.equal(rowwise(rows_TN), alone_TN)


@pytest.mark.parametrize("num_pairs", [3, 64])
def test_complex_numbers_are_multiplied_as_they_are_alone(num_pairs: int, num_threads: int) -> None:
    for num_rows in NUM_ROWS:
        generator = torch.Generator().manual_seed(num_rows)
        parts = torch.randn(2, num_rows, 4, num_pairs, 2, generator=generator)
        left, right = torch.view_as_complex(parts).unbind(0)
        torch.set_num_threads(1)
        alone = torch.cat([rowwise_mul(a[None], b[None]) for a, b in zip(left, right, strict=True)])
        torch.set_num_threads(num_threads)

        product = rowwise_mul(left, right)

        assert torch.equal(torch.view_as_real(product), torch.view_as_real(alone))
        assert torch.allclose(product, left * right, rtol=1e-6, atol=1e-6)
