"""Jobs that are done a slice at a time: the same bits, whatever is done with other adapters in between."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.core.slices import finished
from twinkle.model.fused.embedding import FusedEmbedding
from twinkle.model.fused.training import AdamParams, Datum, TrainJob
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


def compared_job(adapter, seed, *, hard_negatives=None):
    rng = np.random.default_rng(seed)
    marks = (1, 0, 1, 0, 0, 1, 0)
    rows = [Datum(rng.integers(0, 250, 20), {"labels": np.array([mark], np.float32)}) for mark in marks]
    config = {} if hard_negatives is None else {"hard_negatives": hard_negatives}
    return TrainJob(adapter, tuple(rows), "InfonceLoss", config)


def test_rows_that_are_compared_go_through_a_pass_at_a_time_and_others_train_in_between(load_model, make_datum):
    whole, model = load_model(), load_model(tokens_per_pass=48)
    expected_adapter = adapter_of(whole, 1)
    [expected] = whole.forward_backward([compared_job(expected_adapter, 2)])
    mine, theirs = adapter_of(model, 1), adapter_of(model, 7)

    num_slices = 0
    slices = model.passes([compared_job(mine, 2)])
    while True:
        try:
            next(slices)
        except StopIteration as end:
            [outcome] = end.value
            break
        num_slices += 1
        assert not isinstance(model.forward_backward([job_of(model, make_datum, theirs, num_slices)])[0], Exception)
        model.optim_step(theirs, AdamParams())

    assert num_slices == 2 * 4 - 1, "four passes there and four back"
    assert outcome.loss == expected.loss
    assert all(np.array_equal(a, b) for a, b in zip(outcome.embeddings, expected.embeddings, strict=True))
    assert torch.equal(mine.grad, expected_adapter.grad) and mine.grad.any()


def test_of_all_passes_over_rows_that_are_compared_no_more_is_kept_than_their_last_tokens(load_model, monkeypatch):
    model = load_model(tokens_per_pass=48)
    run, alive = FusedEmbedding._run, []

    def noted(self, rows, adapter, gradient):
        assert not any(hidden() is not None for hidden in alive), "the hidden states of an earlier pass"
        hidden_TH, ends = run(self, rows, adapter, gradient)
        alive.append(weakref.ref(hidden_TH))
        return hidden_TH, ends

    monkeypatch.setattr(FusedEmbedding, "_run", noted)
    [outcome] = model.forward_backward([compared_job(adapter_of(model, 1), 2)])

    assert not isinstance(outcome, Exception)
    assert len(alive) == 8


def test_more_pairs_than_may_be_compared_are_refused_with_their_number(load_model):
    model = load_model()

    [refused] = model.forward_backward([compared_job(adapter_of(model, 1), 2, hard_negatives=10**9)])

    assert isinstance(refused, InvalidInput)
    assert refused.field == "data" and f"3 queries and {3 * (10**9 + 1)} documents" in str(refused)


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
