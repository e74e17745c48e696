"""Norms by one kernel: what the model's own give, wherever the form is known, and no other."""

from __future__ import annotations

import pytest
import torch
import transformers

from harness.families import FAMILIES, stir
from twinkle.module.norms import fuse_norms

TOKENS = [[5, 9, 17, 60, 3, 8, 8, 21]]
ROUNDING = 0.03
"""Relative, of logits in half precision."""


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "qwen3_5", "gemma3", "gpt-oss", "llama4"])
def test_a_model_gives_what_it_gives_with_its_own_norms(family: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.bfloat16).eval()
    stir(model)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.add_(torch.randn_like(weight) * 0.1)
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits.float()
        num_fused = fuse_norms(model)
        found = model(input_ids=tokens).logits.float()

    assert num_fused >= 2 * model.config.get_text_config().num_hidden_layers
    assert (found - expected).norm() < ROUNDING * expected.norm()
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert num_fused == sum("forward" in vars(norm) for norm in norms)


def test_weights_that_change_afterwards_are_used() -> None:
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3"]()).eval()
    fuse_norms(model)
    norm, x = model.model.norm, torch.randn(3, model.config.hidden_size)
    before = norm(x)
    with torch.no_grad():
        norm.weight.mul_(2)
    torch.testing.assert_close(norm(x), 2 * before)


class HalfRMSNorm(torch.nn.Module):
    """Of a form that nobody else has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class GatedRMSNorm(HalfRMSNorm):
    """Wants more than one value."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * gate


def test_a_norm_of_another_form_is_left_as_it_is() -> None:
    model = torch.nn.ModuleDict({"plain": HalfRMSNorm(8), "gated": GatedRMSNorm(8)})
    assert fuse_norms(model) == 0
    x = torch.randn(2, 8)
    assert torch.equal(model["plain"](x), HalfRMSNorm(8)(x))
    assert model["gated"](x, x).shape == x.shape
