"""Linears with the same rows: who is computed together, and what is done where a model gives them other rows."""

from __future__ import annotations

import pytest
import torch

from harness.lora_kernels import LoraKernels
from twinkle.module.adapter import TrainedModule
from twinkle.module.lora import LoraConfig, LoraPool, Segment
from twinkle.module.row_product import RowProduct
from twinkle.module.shared_input import siblings_of
from twinkle.module.targets import find_targets

WIDTH = 32


class Attention(torch.nn.Module):
    """Gives its Linears the same rows, or not, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(WIDTH, size) for size in (48, 16, 16))
        self.o_proj = torch.nn.Linear(80, WIDTH)

    def forward(self, x: torch.Tensor, names: str, apart: str) -> torch.Tensor:
        found = {name: getattr(self, f"{name}_proj")(x.clone() if name in apart else x) for name in names}
        return self.o_proj(torch.cat([found[name] for name in "qkv"], dim=-1))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.self_attn = Attention()
        self.mlp = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(WIDTH, WIDTH)})
        self.lm_head = torch.nn.Linear(WIDTH, 8, bias=False)
        self.requires_grad_(False)


def make_pool(kernels: LoraKernels | None) -> tuple[Model, LoraPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twinkle.module.lora.kernels_for", lambda device_type, dtype: kernels)
        model = Model()
        return model, LoraPool(model, find_targets(model, model.lm_head, model), product=RowProduct(), max_rank=8)


def make_x() -> torch.Tensor:
    return torch.randn(1, 20, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)


def run(names: str, apart: str, *, kernels: LoraKernels | None, launches: int = 0) -> list[torch.Tensor]:
    """What comes out, the gradient of what goes in and those of two adapters, of which one trains two Linears."""
    model, pool = make_pool(kernels)
    whole = pool.create(LoraConfig(rank=5, seed=1))
    trained = tuple(TrainedModule(f"self_attn.{name}_proj", rank, 4.0) for name, rank in (("q", 3), ("v", 2)))
    part = pool.create(LoraConfig(rank=3, seed=2, modules=trained))
    for adapter in (whole, part):
        for pair in adapter.views.values():
            pair.b.fill_(0.02)
        adapter.publish()
    segments = [Segment(whole, 0, 9, whole.grad_views), Segment(part, 9, 20, part.grad_views)]
    x = make_x()
    with pool.routed(pool.route(segments, 20)), torch.inference_mode():
        sampled = model.self_attn(x, names, apart)
    if kernels is not None:
        assert kernels.expand.num_calls == launches
    with pool.routed(pool.route(segments, 20)):
        y = model.self_attn(x, names, apart)
    assert torch.equal(sampled, y)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, whole.grad, part.grad]


@pytest.mark.parametrize(
    ("names", "apart", "launches"),
    [
        ("qkv", "", 2),
        ("qkv", "k", 3),
        ("qkv", "kv", 4),
        ("qvk", "q", 4),
        # What was computed before it was asked for is computed again.
        ("kqv", "", 3),
    ],
)
def test_linears_give_what_they_give_alone_whichever_rows_they_are_given(names: str, apart: str, launches: int) -> None:
    kernels = LoraKernels()
    together, alone = run(names, apart, kernels=kernels, launches=launches), run(names, apart, kernels=None)
    for found, expected in zip(together, alone, strict=True):
        assert expected.any()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_keep_their_bits_whether_or_not_others_train_a_linear_of_a_group() -> None:
    """The gradients of what goes in are added up in one order, or it would depend on the company."""
    model, pool = make_pool(LoraKernels())
    companies = [pool.create(LoraConfig(rank=4, train_attn=trains)) for trains in (False, True)]
    found = []
    for company in (None, *companies):
        x = make_x()
        gradient = None if company is None else company.grad_views
        with pool.routed(pool.route([Segment(company, 0, 9, gradient)], 20)):
            y = model.self_attn(x, "qkv", "")
        y.square().sum().backward()
        assert x.grad is not None
        found.append((y[0, 9:].detach(), x.grad[0, 9:]))
    for others in found[1:]:
        assert all(torch.equal(left, right) for left, right in zip(found[0], others, strict=True))


def test_siblings_share_what_they_have_the_same_inputs_for() -> None:
    widths = {
        "0.attn.q_proj": 8, "0.attn.v_proj": 8, "0.attn.o_proj": 6, "0.mlp.gate_proj": 8, "0.mlp.up_proj": 4,
        "1.attn.k_proj": 8, "1.attn.q_proj": 8,
    }  # fmt: skip
    assert list(siblings_of(widths)) == [
        ("0.attn.q_proj", "0.attn.v_proj"),
        ("0.attn.o_proj",),
        ("0.mlp.gate_proj",),
        ("0.mlp.up_proj",),
        ("1.attn.q_proj", "1.attn.k_proj"),
    ]
