"""Tiled products, for CPUs without MKL strict mode: the same bits fused and alone, the numbers of plain products."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harness import tiled_run
from twinkle.model.fused.determinism import MKL_MODE_VARIABLE, rows_are_independent
from twinkle.module.row_product import RowProduct

TESTS = Path(tiled_run.__file__).parents[1]
TIMEOUT_S = 150


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_tiled_products_keep_bits_and_agree_with_plain_ones(family):
    environment = {**os.environ, MKL_MODE_VARIABLE: "AUTO", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    child = subprocess.run(
        [sys.executable, "-m", "harness.tiled_run", family],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    tiled = json.loads(child.stdout)

    assert tiled["determinism"] == "tiled"
    assert [result["digest"] for result in tiled["fused"]] == [result["digest"] for result in tiled["alone"]]
    assert "not finite" in tiled["sick"]["error"]
    model = tiled_run.make_model(family)
    for number, ours in enumerate(tiled["alone"]):
        [plain] = tiled_run.run(model, [tiled_run.make_job(model, number)])
        np.testing.assert_allclose(ours["logprobs"], plain["logprobs"], atol=2e-5)
        gradient = np.array(plain["gradient"])
        np.testing.assert_allclose(ours["gradient"], gradient, atol=2e-4 * np.abs(gradient).max())


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("shape", [(1, 64, 307), (63, 64, 16), (64, 61, 3), (65, 256, 96), (200, 3, 1)])
def test_a_tiled_product_is_the_product(shape, tile_rows):
    num_rows, num_inputs, num_outputs = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    bias = torch.randn(num_outputs, generator=generator)
    expected = (x.double() @ weight.double().t() + bias).float()

    torch.testing.assert_close(RowProduct(tile_rows)(x, weight, bias), expected, atol=1e-4, rtol=1e-5)


def test_tiles_are_independent_here_and_a_product_that_mixes_rows_is_found_out():
    class Mixing(RowProduct):
        def __call__(self, x, weight, bias=None):
            return super().__call__(x, weight, bias) * (1 + 1e-6 * x.shape[0])

    assert rows_are_independent(RowProduct(64), torch.float32)
    assert not rows_are_independent(Mixing(64), torch.float32)
