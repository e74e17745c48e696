"""Queries and keys turned by our kernel, in whose place a stand-in reads and writes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

from harness.families import FAMILIES
from harness.fused_pass import one_pass
from harness.rotary_kernels import RotaryKernels
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.rotary import fuse_rotary, relative_error

CPU = torch.device("cpu")
FAMILIES_FUSED = ("qwen3", "llama", "gemma3", "qwen3-moe")


def found_out(device_type: str, dtype: torch.dtype, plain: Any, kernels: RotaryKernels) -> RotaryKernels | None:
    """The kernels where they do what the model does."""
    try:
        return kernels if relative_error(kernels, plain, CPU, torch.float32) < 1e-5 else None
    except (TypeError, RuntimeError):
        return None


def test_the_kernel_is_told_from_one_that_turns_another_way() -> None:
    kernels = RotaryKernels()
    assert relative_error(kernels, modeling_llama.apply_rotary_pos_emb, CPU, torch.float32) < 1e-6
    assert relative_error(kernels, modeling_glm4.apply_rotary_pos_emb, CPU, torch.float32) > 0.5
    right = kernels.turn._run
    kernels.turn._run = lambda *given, BACK, **options: right(*given, BACK=False, **options)
    assert relative_error(kernels, modeling_llama.apply_rotary_pos_emb, CPU, torch.float32) > 0.5


@pytest.mark.parametrize("family", FAMILIES_FUSED)
def test_a_model_computes_the_same_with_its_queries_and_keys_turned_at_once(
    family: str,
    load_model: Callable[..., FusedLoraModel],
    base_dirs: Callable[..., Any],
    make_datum: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = one_pass(load_model(family), make_datum)
    kernels = RotaryKernels()
    monkeypatch.setattr("twinkle.module.rotary.kernels_for", lambda *given: found_out(*given, kernels=kernels))
    model = FusedLoraModel.from_pretrained(str(base_dirs(family)))
    assert fuse_rotary(model.module) == FAMILIES[family]().num_hidden_layers
    before = kernels.turn.num_calls
    found = one_pass(model, make_datum)
    assert kernels.turn.num_calls == before + 2 * FAMILIES[family]().num_hidden_layers
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["cohere", "ernie4.5", "glm4", "glm4-moe", "minimax-m2", "deepseek-v3", "gpt-oss"])
def test_what_a_model_turns_in_another_way_or_in_part_is_left_to_it(
    family: str,
    load_model: Callable[..., FusedLoraModel],
    base_dirs: Callable[..., Any],
    make_datum: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = RotaryKernels()
    monkeypatch.setattr("twinkle.module.rotary.kernels_for", lambda *given: found_out(*given, kernels=kernels))
    model = FusedLoraModel.from_pretrained(str(base_dirs(family)))
    fuse_rotary(model.module)
    expected, found = one_pass(load_model(family), make_datum), one_pass(model, make_datum)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-4)
