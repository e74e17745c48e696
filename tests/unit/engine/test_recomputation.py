"""A training pass within a limit of bytes: layers that do not fit are computed twice, and no bit is another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from harness.families import VOCAB_SIZE
from harness.lora_kernels import LoraKernels
from twinkle.infra.device_memory import DeviceMemory
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraConfig

NUM_TOKENS = 500
LOW = 1000
"""Bytes: less than any pass keeps."""


def train(model: FusedLoraModel, data: tuple[Datum, ...]) -> tuple[np.ndarray, torch.Tensor]:
    adapter = model.create_adapter(LoraConfig(rank=4, seed=1))
    for pair in adapter.views.values():
        pair.b.fill_(0.02)
    adapter.publish()
    (outcome,) = model.forward_backward([TrainJob(adapter, data, "cross_entropy")])
    assert isinstance(outcome, TrainOutcome), outcome
    return np.concatenate(outcome.logprobs), adapter.grad


@pytest.fixture
def make_data(make_datum: Callable[..., Datum]) -> Callable[..., tuple[Datum, ...]]:
    return lambda *lengths: tuple(make_datum(np.random.default_rng(3), length) for length in lengths)


@pytest.mark.parametrize("way", ["loop", "grouped", "in place"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "qwen3_5", "gemma3"])
def test_layers_computed_twice_give_the_same_bits(
    family: str,
    way: str,
    base_dirs: Callable[[str], Path],
    make_data: Callable[..., tuple[Datum, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way != "loop":
        monkeypatch.setattr("twinkle.module.lora.supports_grouped_products", lambda device, dtype: True)
    if way == "in place":
        monkeypatch.setattr("twinkle.module.lora.kernels_for", lambda device_type, dtype: LoraKernels())
    data = make_data(7, 40, 12)
    kept = train(FusedLoraModel.from_pretrained(str(base_dirs(family))), data)
    twice = train(FusedLoraModel.from_pretrained(str(base_dirs(family)), activation_bytes=LOW), data)
    np.testing.assert_array_equal(twice[0], kept[0])
    assert kept[1].abs().max() > 0
    assert torch.equal(twice[1], kept[1])


def most_bytes(run: Callable[[], object]) -> int:
    """The most that was held at once of what ``run`` allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return int(np.cumsum([num_bytes for _, num_bytes in changes]).max())


def test_one_long_datum_trains_within_the_bytes_that_are_reckoned(
    base_dirs: Callable[[str], Path], make_data: Callable[..., tuple[Datum, ...]]
) -> None:
    data = make_data(NUM_TOKENS)
    models = [FusedLoraModel.from_pretrained(str(base_dirs("qwen3")), activation_bytes=limit) for limit in (None, LOW)]
    for model in models:
        train(model, data)  # what is made once is no activation

    kept, twice = (most_bytes(lambda model=model: train(model, data)) for model in models)

    sizes = models[0].activation_sizes
    assert sizes is not None
    saved = sizes.pass_bytes(NUM_TOKENS, recomputed=False) - sizes.pass_bytes(NUM_TOKENS, recomputed=True)
    assert saved > 0
    assert kept - twice > 0.8 * saved


def test_under_a_limit_of_bytes_a_long_datum_trains_within_it_that_would_not_with_all_kept(
    base_dirs: Callable[[str], Path], make_data: Callable[..., tuple[Datum, ...]]
) -> None:
    data = make_data(NUM_TOKENS)
    memory = DeviceMemory(None, torch.device("cpu"))
    bounded = FusedLoraModel.from_pretrained(str(base_dirs("qwen3")), memory=memory)
    unbounded = FusedLoraModel.from_pretrained(str(base_dirs("qwen3")))
    sizes = bounded.activation_sizes
    assert sizes is not None
    # An adapter, and of the head three times the logits: these, what becomes of them, and their gradient.
    beside = bounded.pool.sizes.rank_bytes * 4 + 3 * NUM_TOKENS * VOCAB_SIZE * 4
    limit = sizes.pass_bytes(NUM_TOKENS, recomputed=True) + beside
    memory.fix("base model", bounded.base_bytes)
    memory.limit_bytes = bounded.base_bytes + limit
    train(unbounded, data)  # what is made once is no activation

    assert most_bytes(lambda: train(bounded, data)) <= limit < most_bytes(lambda: train(unbounded, data))


def test_a_datum_that_does_not_fit_is_tried_once_more_with_its_layers_computed_twice(
    base_dirs: Callable[[str], Path], make_data: Callable[..., tuple[Datum, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FusedLoraModel.from_pretrained(str(base_dirs("qwen3")))
    data = make_data(40)
    expected = train(model, data)
    layer = model.base.model.layers[-1]

    def full(*args: object) -> None:
        if not layer.gradient_checkpointing and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("out of memory")

    layer.register_forward_pre_hook(full)
    found = train(model, data)
    np.testing.assert_array_equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_a_datum_that_fits_in_no_way_ends_with_its_reason(
    base_dirs: Callable[[str], Path], make_data: Callable[..., tuple[Datum, ...]]
) -> None:
    model = FusedLoraModel.from_pretrained(str(base_dirs("qwen3")))
    job = TrainJob(model.create_adapter(LoraConfig(rank=4)), make_data(40), "cross_entropy")

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    model.base.model.layers[-1].register_forward_pre_hook(full)
    (outcome,) = model.forward_backward([job])
    assert "ran out of memory" in str(outcome)
    forward = dataclasses.replace(job, backward=False)
    assert "ran out of memory" in str(model.forward_backward([forward])[0])
