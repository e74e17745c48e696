"""An optimizer step in one kernel, as accelerators make it, against the one in blocks, on the CPU, which has both."""

from collections.abc import Callable

import pytest
import torch

from twinkle.model.fused import adam
from twinkle.model.fused.adam import blockwise_update, fused_update, l2_norm, norm_in_parts
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import AdamParams
from twinkle.module.lora import LoraAdapter, LoraConfig


def filled(model: FusedLoraModel, seed: int) -> LoraAdapter:
    adapter = model.create_adapter(LoraConfig(rank=4))
    generator = torch.Generator().manual_seed(seed)
    for buffer in (adapter.params, adapter.grad, adapter.exp_avg, adapter.exp_avg_sq):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    adapter.exp_avg_sq.square_()
    adapter.step = 3
    return adapter


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_one_kernel_steps_as_blocks_do(decay: float, factor: float, load_model: Callable[..., FusedLoraModel]) -> None:
    model = load_model("qwen3")
    params = AdamParams(learning_rate=1e-2, weight_decay=decay)
    blocks, fused = filled(model, 1), filled(model, 1)
    blockwise_update(blocks, params, factor)
    fused_update(fused, params, factor)
    assert not torch.equal(fused.params, filled(model, 1).params)
    for name in ("params", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(getattr(fused, name), getattr(blocks, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", [1000, 1 << 24])
def test_a_norm_in_parts_is_the_norm_and_copies_a_part_at_a_time(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.randn(10_001, generator=torch.Generator().manual_seed(0)) * 1e20
    taken: list[int] = []
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x, **rest: (taken.append(x.numel()), norm(x, **rest))[1])
    monkeypatch.setattr(adam, "NORM_PART", part)
    found = norm_in_parts(buffer).item()
    monkeypatch.undo()
    assert found == pytest.approx(l2_norm(buffer), rel=1e-12)
    assert max(taken) <= part
