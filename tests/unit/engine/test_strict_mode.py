"""MKL's strict mode is believed only where it is in force."""

import os
import subprocess
import sys

import pytest
import torch

from twinkle.model.fused.determinism import gives_the_same
from twinkle.module.row_product import RowProduct

MEASURE = """
import torch
if {too_late}:
    torch.ones(64, 64) @ torch.ones(64, 64)
from twinkle.model.fused.determinism import measure_determinism, prepare_environment, strict_mode_in_force
prepare_environment()
print(strict_mode_in_force(), measure_determinism(torch.device("cpu"), torch.float32)[0])
"""


def measured(*, too_late: bool) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    script = [sys.executable, "-c", MEASURE.format(too_late=too_late)]
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_a_mode_chosen_after_the_first_product_is_not_promised() -> None:
    in_time, mode_in_time = measured(too_late=False)
    late, mode_late = measured(too_late=True)

    assert (in_time, mode_in_time) == ("True", "mkl-strict")
    assert late == "False" and mode_late in ("tiled", "none")


def test_products_of_few_columns_go_unpadded_only_where_their_bits_are_those_of_padded_ones() -> None:
    class Rounding(RowProduct):
        def __call__(
            self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
        ) -> torch.Tensor:
            is_narrow = weight_NK.shape[0] == 3
            return super().__call__(x_TK, weight_NK, bias_N) * (1 + 1e-6 * is_narrow)

    padded = RowProduct(min_rows=4)

    assert gives_the_same(padded, padded, torch.float32)
    assert not gives_the_same(Rounding(min_rows=4, min_columns=1), padded, torch.float32)
