"""What this machine can promise about bits, and how it keeps the promise.

A replayed operation must give the same bits as the first time, though it ran fused with others then. That needs matrix
products whose rows are independent of their company (see ``twinkle.module.row_product``):

* ``mkl-strict``: Intel MKL with ``MKL_CBWR=AVX512,STRICT`` or ``AVX2,STRICT``; nearly free. Must be set before the
  first product of the process, which is what ``prepare_environment`` is for.
* ``tiled``: products in tiles of one fixed shape; any CPU, at the same number of threads.
* ``none``: neither was proven here. Results are right, but their last bits may depend on the batch.

The mode is measured at start-up, never assumed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from twinkle.module.row_product import DEFAULT_TILE_ROWS, MIN_ROWS_CHOICES, MIN_SIDE, RowProduct

Determinism = Literal["mkl-strict", "tiled", "none"]

WEAKEST_FIRST: tuple[Determinism, ...] = ("none", "tiled", "mkl-strict")
MKL_MODE_VARIABLE = "MKL_CBWR"
MKL_CBWR_ALL = -1
MKL_CBWR_STRICT = 0x10000
"""As ``mkl_cbwr_get`` takes and gives them (Intel, "Developer Reference for oneMKL", Conditional Numerical
Reproducibility)."""
SELF_TEST_SHAPES = (
    (64, 96),
    (256, 688),
    (2048, 512),
    (61, 307),
    (3, 64),
    (1, 64),
    *((64, n) for n in (1, 3, 12, 16, 40, 65)),
)
SELF_TEST_ROWS = 70
UNPADDED = RowProduct(min_rows=1, min_columns=1)
"""Where nothing is promised nothing is paid for it."""
SELF_TEST_SLICES = (
    (0, 1),
    (3, 4),
    (5, 7),
    (1, 12),
    (0, 13),
    (17, 33),
    (0, 31),
    (3, 51),
    (2, 66),
    (0, 69),
    (2, 6),
    (4, 9),
    (60, 63),
)
SELF_TEST_INPUTS = (3, 61, 256, 2048)


def prepare_environment() -> str:
    """Choose MKL's strict branch for this CPU unless the user chose one; return the value in force.

    Call it before the first matrix product of the process (importing torch is no product).
    """
    branch = {"AVX512": "AVX512,STRICT", "AVX2": "AVX2,STRICT"}.get(torch.backends.cpu.get_cpu_capability())
    if branch is not None and torch.backends.mkl.is_available():
        os.environ.setdefault(MKL_MODE_VARIABLE, branch)
    return os.environ.get(MKL_MODE_VARIABLE, "")


def measure_determinism(device: torch.device, dtype: torch.dtype) -> tuple[Determinism, RowProduct]:
    """The strongest mode whose self-test passes on this device, and the cheapest product that keeps its promise."""
    if device.type != "cpu":
        return "none", UNPADDED
    if dtype == torch.float32 and strict_mode_in_force():
        for min_rows in MIN_ROWS_CHOICES:
            product = RowProduct(min_rows=min_rows)
            if rows_are_independent(product, dtype):
                narrow = RowProduct(min_rows=min_rows, min_columns=1)
                return "mkl-strict", narrow if gives_the_same(narrow, product, dtype) else product
    tiled = RowProduct(DEFAULT_TILE_ROWS)
    return ("tiled", tiled) if rows_are_independent(tiled, dtype) else ("none", UNPADDED)


def strict_mode_in_force() -> bool:
    """Whether MKL computes in strict mode.

    A process that multiplied matrices before the mode was set keeps the one it had, and the self-test may pass by luck;
    so MKL is asked, where its library lets itself be asked.
    """
    if not os.environ.get(MKL_MODE_VARIABLE, "").upper().endswith(",STRICT"):
        return False
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        ask = ctypes.CDLL(str(library)).mkl_serv_cbwr_get
    except (OSError, AttributeError):
        return True
    return bool(ask(MKL_CBWR_ALL) & MKL_CBWR_STRICT)


def agreed_product(
    mode: Determinism, product: RowProduct, modes: Sequence[Determinism]
) -> tuple[Determinism, RowProduct]:
    """What holds for ranks that have each measured a mode, and this rank's product for it."""
    agreed = min(modes, key=WEAKEST_FIRST.index)
    if agreed == mode:
        return mode, product
    return agreed, RowProduct(DEFAULT_TILE_ROWS) if agreed == "tiled" else UNPADDED


def rows_are_independent(product: RowProduct, dtype: torch.dtype) -> bool:
    """Whether rows keep their bits when they stand alone, elsewhere or in other company, in both directions."""
    generator = torch.Generator().manual_seed(0)
    for num_inputs, num_outputs in SELF_TEST_SHAPES:
        x = torch.randn(SELF_TEST_ROWS, num_inputs, generator=generator).to(dtype)
        weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
        for matrix in (weight, torch.randn(num_inputs, num_outputs, generator=generator).to(dtype).t()):
            together = product(x, matrix)
            added = torch.ones_like(together)
            product.add_(added, x, matrix.t(), 0.5)
            for start, end in SELF_TEST_SLICES:
                alone = torch.ones_like(together[start:end])
                product.add_(alone, x[start:end], matrix.t(), 0.5)
                if not torch.equal(product(x[start:end], matrix), together[start:end]):
                    return False
                if not torch.equal(alone, added[start:end]):
                    return False
    return True


def gives_the_same(narrow: RowProduct, padded: RowProduct, dtype: torch.dtype) -> bool:
    """Whether products of few columns, as adapters of small rank have, are to the bit what they are padded."""
    generator = torch.Generator().manual_seed(0)
    for num_inputs in SELF_TEST_INPUTS:
        x = torch.randn(SELF_TEST_ROWS, num_inputs, generator=generator).to(dtype)
        for num_columns in range(1, MIN_SIDE):
            weight = torch.randn(num_columns, num_inputs, generator=generator).to(dtype)
            for matrix in (weight, weight.t().contiguous().t()):
                expected = padded(x, matrix)
                for start, end in SELF_TEST_SLICES:
                    if not torch.equal(narrow(x[start:end], matrix), expected[start:end]):
                        return False
    return True
