"""Megatron's core on a GPU, in bfloat16, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("megatron.core", reason="the extra twinkle-queue[megatron] is not installed")

from twinkle.infra.process_group import leave_world
from twinkle.model import MegatronModel
from twinkle.model.megatron.layout import leave_layout

TOKENS = [17, 5, 99, 250, 3, 41, 7, 120]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    yield
    leave_layout()
    leave_world()


@pytest.mark.gpu
def test_megatron_has_the_logprobs_of_transformers_and_lowers_its_loss(base_folder: Path) -> None:
    model = MegatronModel(model_id=str(base_folder))
    row = {"input_ids": TOKENS[:-1], "labels": TOKENS[1:]}
    plain = transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = plain(torch.tensor([TOKENS[:-1]])).logits.log_softmax(-1)[0]
    expected = logprobs.gather(-1, torch.tensor(TOKENS[1:])[:, None]).squeeze(-1)

    found = model.forward_only(inputs=[row])["logps"][0].float().cpu()

    # Eight bits of mantissa through three layers.
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
    model.set_optimizer("default", lr=1e-3)
    losses = []
    for _ in range(5):
        losses.append(model.forward_backward(inputs=[row])["loss"])
        model.clip_grad_and_step()
    assert losses[-1] < losses[0]
