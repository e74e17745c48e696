"""Losses of many datums computed at once, as an accelerator does, against each by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from twinkle.core.errors import UserError
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraConfig

MakeDatum = Callable[..., Datum]
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")


@pytest.fixture(scope="module")
def model(base_dirs: Callable[[str], Path]) -> FusedLoraModel:
    """Whose head sums over a tenant's datums at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twinkle.module.lora.supports_grouped_products", lambda device, dtype: True)
        made = FusedLoraModel.from_pretrained(str(base_dirs("qwen3")))
    assert made._head.sums_together
    return made


def jobs_of(model: FusedLoraModel, make_datum: MakeDatum, losses: Sequence[str] = LOSSES) -> list[TrainJob]:
    """Two tenants of each loss; some datums bring inputs that others leave out, some tokens have several targets."""
    rng = np.random.default_rng(7)
    jobs = []
    for number, loss in enumerate([*losses, *losses]):
        adapter = model.create_adapter(LoraConfig(rank=3 + number, seed=number))
        adapter.params.copy_(torch.from_numpy(rng.normal(0, 0.05, adapter.params.numel())))
        columns = 3 if loss == "cross_entropy" and number >= len(losses) else None
        data = [make_datum(rng, length, columns=columns) for length in (9, 1, 30, 12)]
        if loss in ("ppo", "cispo", "gspo"):
            narrow = {"clip_low_threshold": np.full(30, 0.5, np.float32)}
            data[2] = Datum(data[2].tokens, {**data[2].inputs, **narrow})
        if loss == "stable_reinforce":
            data[3] = Datum(data[3].tokens, {**data[3].inputs, "mask": np.ones(12, np.float32)})
        config = {"kl_coeff": 0.1} if loss == "stable_reinforce" else {}
        if loss == "cross_entropy":
            config = {"count_correct": 1}
        jobs.append(TrainJob(adapter, tuple(data), loss, config))
    return jobs


def train(model: FusedLoraModel, jobs: Sequence[TrainJob]) -> list[tuple[TrainOutcome, torch.Tensor]]:
    found = []
    for job, outcome in zip(jobs, model.forward_backward(jobs), strict=True):
        assert isinstance(outcome, TrainOutcome), outcome
        found.append((outcome, job.adapter.grad.clone()))
        job.adapter.clear_gradients()
    return found


@pytest.mark.parametrize("rows_per_group", [None, 40, 20])
def test_they_are_those_of_each_datum_by_itself(
    rows_per_group: int | None, model: FusedLoraModel, make_datum: MakeDatum, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a group of rows ends within a batch, or within a datum: a long one then goes by itself."""
    jobs = jobs_of(model, make_datum)
    if rows_per_group is not None:
        monkeypatch.setattr(model._head, "rows_per_group", rows_per_group)
    together = train(model, jobs)
    monkeypatch.setattr(model._head, "sums_together", False)
    apart = train(model, jobs)

    for (ours, gradient), (theirs, expected) in zip(together, apart, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-5)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-5)
        for found, right in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_array_equal(found, right)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_what_is_not_finite_stays_with_its_owner(model: FusedLoraModel, make_datum: MakeDatum) -> None:
    """No bit of a neighbour's is another one, though its terms are computed beside those of NaN."""
    jobs = jobs_of(model, make_datum)
    healthy = train(model, jobs)
    sick = [number for number in range(len(jobs)) if number % 2]
    for number in sick:
        jobs[number].adapter.params.fill_(torch.nan)
        jobs[number].adapter.publish()
    outcomes = model.forward_backward(jobs)
    for number, (job, outcome) in enumerate(zip(jobs, outcomes, strict=True)):
        if number in sick:
            assert isinstance(outcome, UserError)
            assert not job.adapter.has_gradients and not job.adapter.grad.any()
            continue
        assert isinstance(outcome, TrainOutcome)
        before, gradient = healthy[number]
        assert outcome.loss == before.loss
        assert all(map(np.array_equal, outcome.logprobs, before.logprobs))
        assert torch.equal(job.adapter.grad, gradient)


def test_a_datum_whose_loss_is_not_finite_is_named_and_costs_its_own_job_alone(
    model: FusedLoraModel, make_datum: MakeDatum
) -> None:
    jobs = jobs_of(model, make_datum, ("ppo",))
    healthy = train(model, jobs)
    data = list(jobs[0].data)
    wild = {"advantages": np.full(30, 3e38, np.float32), "logprobs": np.full(30, -3e38, np.float32)}
    data[2] = Datum(data[2].tokens, {**data[2].inputs, **wild})
    sick = TrainJob(jobs[0].adapter, tuple(data), "ppo")

    theirs, ours = model.forward_backward([sick, jobs[1]])

    assert "not finite in data[2]" in str(theirs)
    assert isinstance(ours, TrainOutcome)
    assert ours.loss == healthy[1][0].loss
    assert torch.equal(jobs[1].adapter.grad, healthy[1][1])
