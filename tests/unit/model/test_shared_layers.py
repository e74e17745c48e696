"""What ranks share, as far as one can tell alone; what they cannot is refused by name, before they meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.infra import DeviceMesh
from twinkle.model import MultiLoraTransformersModel
from twinkle.model.parallel.experts import share_experts
from twinkle.model.parallel.sequence import SequenceLayout


def test_a_model_without_experts_shares_none(model_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)

    with pytest.raises(ConfigError, match="ep_size: Qwen3ForCausalLM has no experts"):
        share_experts(model, DeviceMesh.from_sizes(fsdp_size=2, ep_size=2), {})
    assert share_experts(model, DeviceMesh.from_sizes(fsdp_size=2), {}) is None


def test_experts_that_do_not_divide_are_refused() -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=4,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)

    with pytest.raises(ConfigError, match="ep_size: 3 ranks cannot share 4 experts evenly"):
        share_experts(model, DeviceMesh.from_sizes(fsdp_size=3, ep_size=3), {})
    with pytest.raises(InvalidInput, match=r"expert_parallel\.enabled"):
        share_experts(model, DeviceMesh.from_sizes(fsdp_size=2, ep_size=2), {"enabled": False})


@pytest.mark.parametrize(
    ("sizes", "advice"),
    [
        ({"ulysses_size": 2}, "ulysses_size: is 2, .*; train one adapter with TransformersModel, or set it to 1"),
        (
            {"ep_size": 2},
            "ep_size: is 2, .*; use MultiLoraMegatronModel if it knows the model's family, or train one adapter with"
            " TransformersModel, or set it to 1",
        ),
    ],
)
def test_the_fused_model_says_what_it_cannot_share_before_it_looks_for_weights(
    tmp_path: Path, sizes: dict[str, int], advice: str
) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, device_type="cpu", **sizes)

    with pytest.raises(ConfigError, match=advice):
        MultiLoraTransformersModel(model_id=str(tmp_path / "none"), device_mesh=mesh)


def layout_of(positions: list[int], *, is_packed: bool = False, pads_left: bool = False) -> SequenceLayout:
    group: Any = None  # a mask is made without the other ranks
    return SequenceLayout(group, 2, 0, torch.tensor([positions]), is_packed=is_packed, pads_left=pads_left)


def seen(mask: torch.Tensor | None) -> list[str]:
    """Per position of the only row, what it attends to."""
    assert mask is not None
    return ["".join("x" if sees else "." for sees in row) for row in mask[0, 0].tolist()]


def test_positions_attend_to_what_they_would_on_one_rank() -> None:
    assert layout_of([0, 1, 2, 3]).mask(None) is None
    assert layout_of([0, 1, 2, 3]).mask(4) is None
    assert seen(layout_of([0, 1, 2, 3]).mask(2)) == ["x...", "xx..", ".xx.", "..xx"]
    assert seen(layout_of([0, 1, 0, 1], is_packed=True).mask(None)) == ["x...", "xx..", "..x.", "..xx"]
    # Padding attends to itself alone, or its softmax would be no number.
    assert seen(layout_of([-1, -1, 0, 1], pads_left=True).mask(None)) == ["x...", ".x..", "..x.", "..xx"]
