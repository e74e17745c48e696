"""Jobs that are done a slice at a time: the same bits, whatever is done with other adapters in between."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from twinkle.core.slices import finished
from twinkle.model.fused.training import AdamParams, TrainJob
from twinkle.module.lora import LoraConfig

LENGTHS = (30, 41, 17, 9, 25, 38)


def job_of(model, make_datum, adapter, seed, loss="cross_entropy"):
    rng = np.random.default_rng(seed)
    data = [make_datum(rng, length) for length in LENGTHS]
    if loss == "GRPOLoss":
        taken = ("target_tokens", "advantages")
        data = [replace(datum, inputs={name: datum.inputs[name] for name in taken}) for datum in data]
    return TrainJob(adapter, tuple(data), loss)


def adapter_of(model, seed):
    return model.create_adapter(LoraConfig(rank=4, seed=seed))


def alone(model, make_datum, seeds, loss):
    adapter = adapter_of(model, 1)
    outcomes = [model.forward_backward([job_of(model, make_datum, adapter, seed, loss)])[0] for seed in seeds]
    return outcomes, adapter.grad.clone()


@pytest.mark.parametrize("loss", ["cross_entropy", "GRPOLoss"])
def test_a_large_job_has_the_same_bits_when_others_train_between_its_passes(load_model, make_datum, loss):
    model = load_model(tokens_per_pass=48)
    expected, gradient = alone(model, make_datum, (2, 3), loss)
    mine, theirs = adapter_of(model, 1), adapter_of(model, 7)
    outcomes = [model.forward_backward([job_of(model, make_datum, mine, 2, loss)])[0]]

    num_slices = 0
    slices = model.passes([job_of(model, make_datum, mine, 3, loss)])
    while True:
        try:
            next(slices)
        except StopIteration as end:
            outcomes += end.value
            break
        num_slices += 1
        assert not isinstance(model.forward_backward([job_of(model, make_datum, theirs, num_slices)])[0], Exception)
        model.optim_step(theirs, AdamParams())

    assert num_slices >= 3
    assert torch.equal(mine.grad, gradient)
    for outcome, one in zip(outcomes, expected, strict=True):
        assert outcome.loss == one.loss
        assert all(np.array_equal(a, b) for a, b in zip(outcome.logprobs, one.logprobs, strict=True))


def test_jobs_that_are_dropped_between_two_passes_leave_other_adapters_as_they_are(load_model, make_datum):
    model = load_model(tokens_per_pass=48)
    [expected], gradient = alone(model, make_datum, (2,), "cross_entropy")
    slices = model.passes([job_of(model, make_datum, adapter_of(model, 9), 5)])
    next(slices)
    slices.close()
    mine = adapter_of(model, 1)

    [outcome] = finished(model.passes([job_of(model, make_datum, mine, 2)]))

    assert outcome.loss == expected.loss
    assert torch.equal(mine.grad, gradient)
