"""Learning from rewards as a plan, against a worker that computes nothing: what is sampled, graded and submitted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from harness.fake_worker import BASE_MODEL, FakeWorker
from harness.jobs import JobRig, job_rig
from harness.policy_jobs import EXACT, PolicyTools, policy_spec
from harness.training_jobs import metrics_of, run_of
from twinkle.core.job import Job, JobKind, JobState
from twinkle.core.operation import Claim, OperationKind
from twinkle.core.settings import Settings
from twinkle.wire.sampling import SampleRequest, parse_sample
from twinkle.wire.training import ForwardBackwardBody, decode_data

GRPO = JobKind.REINFORCEMENT
SLOW = {"type": "reward", "name": "slow", "reward": "arithmetic", "reference": "{{item.answer}}"}


@pytest.fixture(scope="module")
def tools() -> PolicyTools:
    return PolicyTools()


@pytest.fixture(scope="module")
def rig(settings: Settings, worker: FakeWorker, tools: PolicyTools) -> Iterator[JobRig]:
    """A runner with the plans that are shipped."""
    with job_rig(settings, tools=tools) as rig:
        yield rig


def claims_of(worker: FakeWorker, job: Job, kind: OperationKind) -> list[Claim]:
    return [claim for claim in worker.executed_of(run_of(job)) if claim.kind is kind]


def passes_of(worker: FakeWorker, job: Job) -> list[ForwardBackwardBody]:
    return [decode_data(worker.payload(claim)) for claim in claims_of(worker, job, OperationKind.FORWARD_BACKWARD)]


def samples_of(worker: FakeWorker, tenant: str) -> list[SampleRequest]:
    claims = [claim for claim in worker.executed if claim.tenant == tenant and claim.kind is OperationKind.SAMPLE]
    return [parse_sample(worker.payload(claim)) for claim in claims]


def test_a_step_samples_groups_grades_them_and_trains_on_how_much_better_each_is(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    job = rig.do(tenant, GRPO, policy_spec(steps=2, batch_size=2, group_size=3, temperature=0.5, seed=5))

    assert job.failure is None
    samples = samples_of(worker, tenant)
    assert [(one.num_samples, one.sampling_params.temperature) for one in samples] == [(3, 0.5)] * 4
    assert len({one.sampling_params.seed for one in samples}) == 4
    first = passes_of(worker, job)[0]
    assert (first.loss_fn, len(first.data)) == ("importance_sampling", 6)
    # Of answers 0, 1, 2 the second is right: 2/3 above the mean, by a deviation of sqrt(1/3), over 18 tokens.
    answer = first.data[1].inputs
    np.testing.assert_allclose(answer["advantages"][-3:], (2 / 3) / np.sqrt(1 / 3) / 18, rtol=1e-5)
    assert (answer["logprobs"][-3:] == -1).all()
    assert not answer["advantages"][:-3].any() and len(answer["target_tokens"]) == 6 + 2
    assert sum(datum.inputs["advantages"].sum() for datum in first.data) == pytest.approx(0, abs=1e-6)
    told = metrics_of(rig, job)[1]
    assert told["reward"] == pytest.approx(1 / 3)
    assert (told["without_spread"], told["answer_tokens"], told["ended"], told["kl_sampler"]) == (0.0, 3.0, 0.0, 0.0)


def test_numbers_go_on_without_a_gap_whatever_is_looked_at_and_saved(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    spec = policy_spec(
        epochs=2, batch_size=3, group_size=2, eval_fraction=0.2, eval_every=2, checkpoint_every=2, keep_last=1
    )
    job = rig.do(tenant, GRPO, spec)

    assert job.failure is None
    done = worker.executed_of(run_of(job))
    assert [claim.seq for claim in done] == list(range(1 + max(claim.seq for claim in done)))
    looks = [one for one in metrics_of(rig, job) if "eval_reward" in one]
    assert [one["step"] for one in looks] == [0, 2, 4, 6]
    assert all(one["eval_loss"] == -one["eval_reward"] for one in looks)
    assert job.result is not None
    assert job.result["sampler_checkpoint"].endswith("/sampler_weights/final")
    assert job.result["eval_reward"] == looks[-1]["eval_reward"]
    assert job.result["best_eval_reward"] == max(one["eval_reward"] for one in looks[1:])
    assert job.result["reward"] == metrics_of(rig, job)[-1]["reward"]


def test_divergence_from_the_first_weights_has_its_price(rig: JobRig, tenant: str, worker: FakeWorker) -> None:
    job = rig.do(tenant, GRPO, policy_spec(steps=1, batch_size=2, group_size=2, kl_coef=0.5))

    assert job.failure is None
    asked = [one for one in samples_of(worker, tenant) if one.prompt_logprobs]
    assert [one.num_prompt_tokens for one in asked] == [6 + 3] * 4
    # All tokens are equally far from the reference: the price moves nothing between them.
    assert metrics_of(rig, job)[1]["kl_reference"] == 0.5
    advantages = [datum.inputs["advantages"][-3:] for datum in passes_of(worker, job)[0].data]
    assert sum(one.sum() for one in advantages) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("loss", ["GRPOLoss", "CISPOLoss", "ppo", "cispo", "gspo"])
def test_other_losses_get_what_they_compare_with(rig: JobRig, tenant: str, worker: FakeWorker, loss: str) -> None:
    job = rig.do(tenant, GRPO, policy_spec(steps=1, batch_size=2, group_size=2, kl_coef=0.25, loss=loss))

    assert job.failure is None
    (body,) = passes_of(worker, job)
    inputs = body.data[0].inputs
    if loss.endswith("Loss"):
        assert body.loss_fn_config == {"beta": 0.25}
        assert (inputs["old_logps"][-3:] == -1).all() and (inputs["ref_logps"][-3:] == -1.5).all()
        assert inputs["weights"].tolist() == [0] * 5 + [1] * 3
    else:
        assert body.loss_fn_config == {} and (inputs["logprobs"][-3:] == -1).all()
    assert ("sequence_ratio_mask" in inputs) == (loss == "gspo")


def test_a_grader_that_takes_too_long_scores_nothing_and_is_told(
    rig: JobRig, tenant: str, tools: PolicyTools, worker: FakeWorker
) -> None:
    parts = {"exact": EXACT, "slow": SLOW}
    multi = {"type": "multi", "name": "both", "graders": parts, "calculate_output": "exact + slow"}
    tools.slow = True
    try:
        job = rig.do(tenant, GRPO, policy_spec(steps=1, batch_size=2, group_size=3, grader=multi))
    finally:
        tools.slow = False

    assert job.state is JobState.SUCCEEDED
    assert job.progress["ungraded_answers"] == 6
    messages = [one for one in rig.stores.jobs.events(job.id, tenant, limit=100) if "graders" in one.data]
    assert messages[0].data["graders"] == {"slow: unresponsive_reward_error": 6}
    assert "6 of 6 answers" in messages[0].message
    told = metrics_of(rig, job)[1]
    assert (told["reward/exact"], told["reward/slow"]) == (pytest.approx(1 / 3), 0.0)


def test_a_served_model_judges_in_the_job_s_own_session(rig: JobRig, tenant: str, worker: FakeWorker) -> None:
    judge = {
        "type": "score_model",
        "name": "judge",
        "model": BASE_MODEL,
        "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    }
    job = rig.do(tenant, GRPO, policy_spec(steps=1, batch_size=1, group_size=2, grader=judge))

    # The worker of these tests has no tokenizer to ask it by: the judge fails, the job goes on.
    assert job.state is JobState.SUCCEEDED
    events = [one for one in rig.stores.jobs.events(job.id, tenant, limit=100) if "graders" in one.data]
    assert events[0].data["graders"] == {"judge: model_grader_server_error": 2}


@pytest.mark.parametrize(
    ("grader", "code", "words"),
    [
        ({**EXACT, "reference": "{{item.solution}}"}, "invalid_data", "row 0: solution: is missing"),
        (
            {"type": "label_model", "name": "j", "model": "gpt-9", "labels": ["a", "b"], "passing_labels": ["a"]}
            | {"input": [{"role": "user", "content": "x"}]},
            "model_not_found",
            "gpt-9",
        ),
    ],
)
def test_what_cannot_be_graded_fails_before_anything_is_sampled(
    rig: JobRig, tenant: str, worker: FakeWorker, grader: dict[str, object], code: str, words: str
) -> None:
    job = rig.do(tenant, GRPO, policy_spec(grader=grader))

    assert job.state is JobState.FAILED
    assert job.failure is not None
    assert job.failure.code == code
    assert words in job.failure.message
    assert samples_of(worker, tenant) == []
