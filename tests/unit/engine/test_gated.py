"""Gates of MLPs by our kernels, in whose place a stand-in reads and writes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from harness.families import FAMILIES
from harness.fused_pass import one_pass
from harness.gated_kernels import GatedKernels
from twinkle.model.fused import layers
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.gated import BLOCK, Gate, fuse_gates, relative_error

CPU = torch.device("cpu")


@pytest.mark.parametrize("kernel", ["gate", "gate_back"])
def test_kernels_are_told_from_ones_that_leave_the_last_values_out_or_compute_others(kernel: str) -> None:
    kernels = GatedKernels()
    assert relative_error(kernels, CPU, torch.float32) < 1e-6
    right = getattr(kernels, kernel)._run
    getattr(kernels, kernel)._run = lambda grid, *given, **options: right((grid[0] - 1,), *given, **options)
    assert not relative_error(kernels, CPU, torch.float32) < 0.02
    getattr(kernels, kernel)._run = lambda grid, gates, ups, *rest, **options: right(grid, ups, gates, *rest, **options)
    assert not relative_error(kernels, CPU, torch.float32) < 0.02


def test_what_does_not_lie_side_by_side_is_laid_so_and_nothing_is_launched_for_no_rows() -> None:
    kernels = GatedKernels()
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(BLOCK + 5, 3, generator=generator).t().requires_grad_() for _ in range(2))
    dy = torch.randn(BLOCK + 5, 3, generator=generator).t()
    y = Gate.apply(gate, up, kernels)
    found = y, *torch.autograd.grad(y, (gate, up), dy)
    y = torch.nn.functional.silu(gate) * up
    for ours, right in zip(found, (y, *torch.autograd.grad(y, (gate, up), dy)), strict=True):
        torch.testing.assert_close(ours, right, atol=1e-6, rtol=1e-5)
    num_calls = kernels.gate.num_calls, kernels.gate_back.num_calls
    nothing = torch.zeros(0, 3, requires_grad=True)
    Gate.apply(nothing, nothing, kernels).sum().backward()
    assert (kernels.gate.num_calls, kernels.gate_back.num_calls) == num_calls == (1, 1)


def test_two_tensors_of_its_width_are_kept_for_the_way_back() -> None:
    def num_kept(compute: Callable[..., torch.Tensor]) -> int:
        kept = set()
        gate, up = torch.randn(2, 5, 3).requires_grad_().unbind()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.add(each.data_ptr()), lambda each: each):
            compute(gate, up)
        return len(kept)

    assert num_kept(lambda gate, up: torch.nn.functional.silu(gate) * up) == 3
    assert num_kept(lambda gate, up: Gate.apply(gate, up, GatedKernels())) == 2


@pytest.mark.parametrize(
    ("family", "num_per_layer"),
    # Of a layer of experts those that lie in one tensor are computed elsewhere; gemma's gate is no SiLU.
    [("qwen3", 1), ("llama", 1), ("glm4-moe", None), ("gemma3", 0), ("qwen3-moe", 0)],
)
def test_a_model_computes_the_same_with_its_gates_multiplied_at_once(
    family: str,
    num_per_layer: int | None,
    load_model: Callable[..., FusedLoraModel],
    base_dirs: Callable[..., Any],
    make_datum: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = one_pass(load_model(family), make_datum)
    kernels = GatedKernels()
    monkeypatch.setattr("twinkle.module.gated.kernels_for", lambda device_type, dtype: kernels)
    fused: list[int] = []
    # On a CPU activations are replaced by ones whose values do not depend on how many there are.
    monkeypatch.setattr(layers, "make_rowwise", lambda served, *rest: fused.append(fuse_gates(served)))
    model = FusedLoraModel.from_pretrained(str(base_dirs(family)))
    (num_fused,) = fused
    if num_per_layer is None:
        assert num_fused > 0
    else:
        assert num_fused == num_per_layer * FAMILIES[family]().num_hidden_layers
    before = kernels.gate.num_calls, kernels.gate_back.num_calls
    found = one_pass(model, make_datum)
    assert (kernels.gate.num_calls - before[0], kernels.gate_back.num_calls - before[1]) == (num_fused, num_fused)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-4)
