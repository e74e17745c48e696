"""What clients' own losses may take in one operation: counted and summed over datums, never timed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.traced_losses import graph_of
from twinkle.core.errors import UserError
from twinkle.loss import operation_work
from twinkle.model.fused import step
from twinkle.model.fused.job_run import FIRST_EXPECTED_WORK, FailureReport, JobRun, ShareReport
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.module.lora import LoraConfig

CONFIG = LoraConfig(rank=4, seed=1)


def dear(logprobs):
    """About four million simple operations on cells for a datum of one token."""
    wide = logprobs.sum().expand(1 << 20)
    for _ in range(2):
        wide = wide * 1.0001
    return wide.mean(), {}


def cheap(logprobs):
    return -(logprobs * logprobs).sum(), {}


DEAR, CHEAP = (graph_of(loss, {"logprobs": 1}) for loss in (dear, cheap))


def job_of(model, num_datums, graph, **settings):
    rng = np.random.default_rng(3)
    data = tuple(
        Datum(np.array([token]), {"target_tokens": np.array([token])}) for token in rng.integers(0, 90, num_datums)
    )
    return TrainJob(model.create_adapter(CONFIG), data, "custom", graph=graph, **settings)


@pytest.fixture
def counted(monkeypatch):
    """How many datums each pass had."""
    sizes = []
    run_pass = step.FusedStep._run_pass

    def noted(self, places, *, backward):
        sizes.append(len(places))
        run_pass(self, places, backward=backward)

    monkeypatch.setattr(step.FusedStep, "_run_pass", noted)
    return sizes


def test_three_hundred_dear_datums_are_refused_with_the_limit_and_leave_no_gradient(load_model, counted):
    model = load_model()
    job = job_of(model, 300, DEAR)
    neighbour = job_of(model, 3, CHEAP)

    refused, done = model.forward_backward([job, neighbour])

    limit = operation_work.OperationWork.of(num_datums=300, num_tokens=300).limit
    assert isinstance(refused, UserError)
    assert f"more than {limit} operations on cells over all datums" in refused.message
    assert not job.adapter.has_gradients
    assert not job.adapter.grad.any()
    assert not isinstance(done, Exception)
    assert sum(counted) < 100


def test_no_pass_takes_long_with_clients_losses(load_model, counted):
    model = load_model()

    model.forward_backward([job_of(model, 60, DEAR)])

    assert counted[0] <= step.WORK_PER_PASS // FIRST_EXPECTED_WORK
    assert 0 < max(counted[1:]) <= step.WORK_PER_PASS // (4 << 20)


def test_cheap_losses_still_go_together(load_model, counted):
    model = load_model()

    [done] = model.forward_backward([job_of(model, 300, CHEAP)])

    assert not isinstance(done, Exception)
    assert max(counted) >= 100


def test_an_operation_that_is_done_again_is_not_judged_again(load_model, monkeypatch):
    for name in ("WORK_PER_OPERATION", "WORK_PER_DATUM_OF_ALL", "WORK_PER_TOKEN_OF_ALL"):
        monkeypatch.setattr(operation_work, name, 1)
    model = load_model()
    first, again = (job_of(model, 3, CHEAP, is_again=is_again) for is_again in (False, True))

    refused, done = model.forward_backward([first, again])

    assert isinstance(refused, operation_work.TooMuchWork)
    assert not isinstance(done, Exception)


def test_ranks_that_pass_the_limit_only_together_all_refuse(load_model):
    model = load_model()
    job = job_of(model, 8, DEAR)
    loss = model.validate(job)
    run = JobRun(job, loss, in_place=False)
    limit = run.work.limit
    nothing = {"failure": None, "logprobs": (), "entropies": (), "losses": (), "metrics": ()}
    run.shares = [range(4), range(4, 8)]

    run.take_reports([ShareReport(**nothing, work=limit // 2), ShareReport(**nothing, work=limit // 2)])
    assert run.failure is None
    run.take_reports([ShareReport(**nothing, work=limit // 2), ShareReport(**nothing, work=limit // 2 + 2)])

    alone = operation_work.OperationWork(limit).refusal(limit + 1)
    assert isinstance(run.failure, UserError)
    assert run.failure.message == alone.message == FailureReport.of(alone).to_error().message
    assert torch.equal(run.job.adapter.grad, torch.zeros_like(run.job.adapter.grad))
