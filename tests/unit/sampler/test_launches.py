"""How many launches a step that decodes a token for each sequence takes on CUDA in half precision, without CUDA."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from harness.families import FAMILIES
from harness.launches import counted_model, per_layer
from twinkle.infra.sending import Arriving
from twinkle.module.lora import LoraConfig
from twinkle.module.paged_varlen import PagedKernel
from twinkle.sampler import SampleRequest, SteppedTorchSampler
from twinkle.sampler.cache_kinds import PagedCaches

LAUNCHES = 26
"""Of a layer. More of them is more that a GPU waits for: a new one needs a reason."""


def launches(num_layers: int, num_sequences: int) -> Counter[str]:
    """Of one step in the middle of as many sequences, each with an adapter of its own."""
    config = FAMILIES["qwen3"]()
    config.num_hidden_layers = num_layers
    config.layer_types = ["full_attention"] * num_layers
    kernel = PagedKernel(lambda query, *rest, **options: query * 1, wants_ends=False)
    with pytest.MonkeyPatch.context() as patch:
        model, counting = counted_model(config, patch)
        patch.setattr("twinkle.sampler.paged_attention.paged_kernel_for", lambda query, key, form: kernel)
        patch.setattr(Arriving, "read", lambda arriving: np.ones(arriving._values.shape))
        caches = PagedCaches(torch.device("meta"), page_tokens=16)
        sampler = SteppedTorchSampler(model, slots=num_sequences, caches=caches)
        for number in range(num_sequences):
            sampler.add(
                SampleRequest(
                    key=str(number),
                    adapter=model.create_adapter(LoraConfig(rank=1 + number), trainable=False),
                    prompt=tuple(range(7, 20)),
                    seed=number,
                    max_tokens=64,
                    stop_token_ids=frozenset(),
                )
            )
        for _ in range(3):
            sampler.step()
        with counting() as counted:
            sampler.step()
    return counted.of


def test_a_layer_takes_so_many_launches_for_a_token_of_each_sequence() -> None:
    layer, _ = per_layer(lambda num_layers: launches(num_layers, 16))
    assert layer["ours.shrink"] == layer["ours.expand"] == 4
    assert layer["linear"] == 7
    assert layer["rms_norm"] == 4
    assert layer["ours.turn"] == layer["ours.gate"] == 1
    assert layer.total() == LAUNCHES, layer


def test_a_layer_takes_as_many_launches_for_many_sequences_as_for_one() -> None:
    one, many = (per_layer(lambda num_layers, n=n: launches(num_layers, n))[0] for n in (1, 16))
    assert one == many
