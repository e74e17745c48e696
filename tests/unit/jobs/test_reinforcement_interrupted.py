"""Learning from rewards that is cut off, fails in the middle, or is cancelled: what comes of it is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.cut_jobs import Cuts
from harness.fake_worker import FakeWorker
from harness.jobs import JobRig, job_rig
from harness.policy_jobs import PolicyTools, policy_spec
from harness.training_jobs import done_in, metrics_of, run_of, told
from twinkle.core.job import JobKind, JobState, JsonObject
from twinkle.core.operation import Claim, Failure, FailureCategory, OperationKind
from twinkle.core.settings import Settings
from twinkle.jobs.reinforcement.plan import DistillPlan, ReinforcementPlan

GRPO, DISTILL = JobKind.REINFORCEMENT, JobKind.DISTILL
SPEC = {"steps": 3, "batch_size": 2, "eval_fraction": 0.2, "eval_every": 2, "checkpoint_every": 2, "seed": 11}
CUTS = Cuts()
POLICY = {**SPEC, "group_size": 3, "kl_coef": 0.1}
GRPO_CUTS = [(1, False), (3, False), (4, False), (5, False), (5, True), (6, False), (6, True), (7, False), (8, False)]
DISTILL_CUTS = [(4, False), (5, False), (6, True)]
"""Here there are no grades to be saved in the middle of a step."""


@pytest.fixture(scope="module")
def tools() -> PolicyTools:
    return PolicyTools()


@pytest.fixture(scope="module")
def rig(settings: Settings, worker: FakeWorker, tools: PolicyTools) -> Iterator[JobRig]:
    with job_rig(
        settings, plans={GRPO: CUTS.into(ReinforcementPlan), DISTILL: CUTS.into(DistillPlan)}, tools=tools
    ) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _nothing_left(worker: FakeWorker) -> Iterator[None]:
    yield
    CUTS.at = worker.failing = None


def distilled(**values: Any) -> JsonObject:
    spec = policy_spec(**values)
    del spec["grader"]
    return {**spec, "teacher": spec["model"]}


# A job goes on by the same steps, whichever database holds it: each kind on one, on the other in soak.
@pytest.mark.parametrize(
    ("settings", "kind", "cuts"),
    [
        pytest.param("sqlite", GRPO, GRPO_CUTS, id="sqlite-grpo"),
        pytest.param("postgres", DISTILL, DISTILL_CUTS, id="postgres-distill"),
        pytest.param("postgres", GRPO, GRPO_CUTS, id="postgres-grpo", marks=pytest.mark.soak),
        pytest.param("sqlite", DISTILL, DISTILL_CUTS, id="sqlite-distill", marks=pytest.mark.soak),
    ],
    indirect=["settings"],
)
def test_wherever_an_attempt_is_cut_off_the_next_one_goes_on_and_nothing_is_done_twice(
    rig: JobRig, tenant: str, worker: FakeWorker, kind: JobKind, cuts: list[tuple[int, bool]]
) -> None:
    spec = policy_spec(**POLICY) if kind is GRPO else distilled(**SPEC)
    calm = rig.do(tenant, kind, spec)
    assert calm.failure is None
    for place in cuts:
        job = rig.submit(tenant, kind, spec, max_attempts=5)
        CUTS.at = place
        first = rig.run(job.id)
        assert first is not None
        assert first.state is JobState.RETRYING, "it was not cut off"
        rig.run(job.id)
        ended = rig.stores.jobs.find(job.id, tenant)

        assert ended.state is JobState.SUCCEEDED, (place, ended.failure)
        assert told(ended) == told(calm), place
        assert metrics_of(rig, ended) == metrics_of(rig, calm), place
        assert done_in(worker, ended) == done_in(worker, calm), place


def test_grades_are_given_once_even_if_the_next_attempt_would_give_others(
    rig: JobRig, tenant: str, worker: FakeWorker, tools: PolicyTools
) -> None:
    grader = {"type": "reward", "name": "sum", "reward": "arithmetic", "reference": "{{item.answer}}"}
    spec = policy_spec(**{**POLICY, "eval_fraction": 0.0, "steps": 1}, grader=grader)
    calm = rig.do(tenant, GRPO, spec)
    job = rig.submit(tenant, GRPO, spec, max_attempts=5)
    # Preparing, deciding, beginning, what comes before the first step, then its grades.
    CUTS.at = (5, True)
    first = rig.run(job.id)
    assert first is not None and first.state is JobState.RETRYING
    tools.slow, before = True, tools.num_graded
    try:
        rig.run(job.id)
    finally:
        tools.slow = False

    ended = rig.stores.jobs.find(job.id, tenant)
    assert tools.num_graded == before
    assert done_in(worker, ended) == done_in(worker, calm)


def test_a_failure_of_the_service_s_is_gone_past_by_a_new_run_with_samplers_of_its_own(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    job = rig.submit(tenant, GRPO, policy_spec(**POLICY), max_attempts=5)
    steps = 0

    def fails_once(claim: Claim) -> Failure | None:
        nonlocal steps
        if claim.kind is OperationKind.OPTIM_STEP and claim.tenant == tenant:
            steps += 1
            if steps == 3:
                return Failure(message="took its worker down", category=FailureCategory.SERVER, code="poison")
        return None

    worker.failing = fails_once
    rig.run(job.id)
    rig.run(job.id)

    ended = rig.stores.jobs.find(job.id, tenant)
    assert ended.failure is None
    assert run_of(ended).endswith(":train:1")
    assert (ended.result or {})["step"] == 3


def test_a_cancelled_job_leaves_what_it_has_learnt(rig: JobRig, tenant: str, worker: FakeWorker) -> None:
    job = rig.submit(tenant, GRPO, policy_spec(**{**POLICY, "steps": 50}))

    def cancels(claim: Claim) -> Failure | None:
        if claim.kind is OperationKind.OPTIM_STEP and claim.tenant == tenant:
            rig.stores.jobs.request_cancel(job.id, tenant)
        return None

    worker.failing = cancels
    rig.run(job.id)

    ended = rig.stores.jobs.find(job.id, tenant)
    assert ended.state is JobState.CANCELLED
    assert ended.result is not None
    assert ended.result["sampler_checkpoint"].endswith("/sampler_weights/cancelled")
    assert 1 <= ended.result["step"] < 50


def test_a_teacher_with_other_tokens_cannot_judge_the_student_s(
    settings: Settings, rig: JobRig, tenant: str, tools: PolicyTools
) -> None:
    spec = distilled(**SPEC)
    tools.vocabularies = {"another-model": "others"}
    try:
        job = rig.do(tenant, DISTILL, {**spec, "teacher": "another-model"})
    finally:
        tools.vocabularies = {}

    assert job.failure is not None
    assert (job.failure.code, job.failure.field) == ("other_vocabulary", "teacher")
