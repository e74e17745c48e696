"""How many launches a training pass of many tenants takes on CUDA in half precision, counted without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import transformers

from harness.families import FAMILIES
from harness.launches import counted_model, per_layer
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraConfig

NUM_TOKENS = 9
LAUNCHES = 51
"""Of a layer, forward and backward. More of them is more that a GPU waits for: a new one needs a reason."""
MakeDatum = Callable[..., Datum]


def launches(
    config: transformers.PretrainedConfig,
    num_layers: int,
    make_datum: MakeDatum,
    *,
    num_jobs: int = 16,
    num_data: int = 1,
) -> Counter[str]:
    """Of one pass, of tenants of unlike ranks, every third of which trains MLPs alone."""
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * num_layers)[:num_layers]
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        model, counting = counted_model(config, patch)
        jobs = [
            TrainJob(
                model.create_adapter(LoraConfig(rank=1 + number, seed=number, train_attn=number % 3 != 2)),
                tuple(make_datum(rng, NUM_TOKENS) for _ in range(num_data)),
                "cross_entropy",
            )
            for number in range(num_jobs)
        ]
        with counting() as counted:
            outcomes = model.forward_backward(jobs)
    assert all(isinstance(outcome, TrainOutcome) for outcome in outcomes), outcomes
    return counted.of


def test_a_layer_takes_so_many_launches_forward_and_backward(make_datum: MakeDatum) -> None:
    layer, _ = per_layer(lambda num_layers: launches(FAMILIES["qwen3"](), num_layers, make_datum))
    # Queries, keys and values are a group, gates and what they multiply another; each of the rest is one by itself.
    assert layer["ours.shrink"] == layer["ours.expand"] == 2 * 4
    assert layer["ours.add_outer"] == 4
    # Weights that are frozen; of a group the gradients of what goes in are added up by the products themselves.
    assert layer["mm"] + layer["addmm_"] == 2 * 7
    assert layer["rms_norm"] == layer["rms_norm_backward"] == 4
    assert layer["ours.turn"] == 2
    assert layer["ours.gate"] == layer["ours.gate_back"] == 1
    assert layer.total() == LAUNCHES, layer


def test_a_layer_takes_as_many_launches_for_many_tenants_as_for_one(make_datum: MakeDatum) -> None:
    one, many = (
        per_layer(lambda num_layers, n=n: launches(FAMILIES["qwen3"](), num_layers, make_datum, num_jobs=n))[0]
        for n in (1, 16)
    )
    assert one == many


def test_heads_take_as_many_launches_for_many_datums_of_a_tenant_without_grouped_products(
    make_datum: MakeDatum, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an A100, for which torch has none."""
    monkeypatch.setattr("twinkle.module.lora._are_grouped", lambda targets, device, dtype: False)
    one, many = (launches(FAMILIES["qwen3"](), 2, make_datum, num_jobs=1, num_data=number) for number in (1, 5))
    assert [one[name] for name in ("mm", "addmm_")] == [many[name] for name in ("mm", "addmm_")]
