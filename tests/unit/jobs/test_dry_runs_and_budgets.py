"""What a training would take before it begins, and budgets that end it before their last token or hour is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from harness.clock import HandClock
from harness.fake_worker import FakeWorker
from harness.jobs import JobRig, job_rig
from harness.policy_jobs import PolicyTools, policy_spec
from harness.training_jobs import MemoryTools, metrics_of, run_of, spec_of
from twinkle.core.errors import InvalidInput
from twinkle.core.job import Job, JobKind, JobState, NewJob
from twinkle.core.operation import OperationKind
from twinkle.core.settings import Settings
from twinkle.wire.bodies.jobs_specs import parse_spec
from twinkle.wire.job_groups import expanded

SFT = JobKind.SUPERVISED


class SteppingClock(HandClock):
    """A minute passes whenever somebody looks."""

    def now(self) -> float:
        self.move(60.0)
        return super().now()


@pytest.fixture(scope="module")
def rig(settings: Settings, worker: FakeWorker) -> Iterator[JobRig]:
    """A runner with the plans that are shipped."""
    with job_rig(settings, tools=MemoryTools()) as rig:
        yield rig


def test_a_dry_run_counts_every_token_and_asks_nothing_of_a_device(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    spec = spec_of(epochs=2, batch_size=4, eval_fraction=0.2, checkpoint_every=2, keep_last=2)
    told = rig.do(tenant, SFT, {**spec, "dry_run": True})
    real = rig.do(tenant, SFT, spec)

    assert told.state is JobState.SUCCEEDED
    assert told.result is not None and real.result is not None
    assert told.result["steps"] == real.result["step"] == 4
    assert told.result["tokens"]["trained"] == real.result["tokens"] == 96
    looked_at = [one for one in metrics_of(rig, real) if "eval_loss" in one]
    assert told.result["tokens"]["forwarded"] == 2 * 6 * len(looked_at)
    assert told.result["around"] == _around(worker, real)
    assert (told.result["rows"], told.result["eval_rows"], told.result["epochs"]) == (8, 2, 2.0)
    assert rig.stores.database.read("SELECT 1 FROM session WHERE job = ?", (told.id,)) == []


def test_what_is_stored_at_the_end_is_as_many_checkpoints_as_were_told(rig: JobRig, tenant: str) -> None:
    spec = spec_of(steps=6, batch_size=2, checkpoint_every=2, keep_last=1)
    told = rig.do(tenant, SFT, {**spec, "dry_run": True})
    real = rig.do(tenant, SFT, spec)

    assert told.result is not None and real.result is not None
    kept, _ = rig.stores.checkpoints.page(tenant, limit=100, offset=0, adapter_id=run_of(real))
    assert told.result["storage"]["checkpoints"] == len(kept)
    assert told.result["memory"]["adapter_parameters"] == 4 * (100 + 200 + 50)


def test_the_time_is_told_from_what_was_measured_and_a_reason_where_nothing_was(rig: JobRig, tenant: str) -> None:
    told = rig.do(tenant, SFT, spec_of(model="never/served", dry_run=True)).result
    rig.do(tenant, SFT, spec_of(steps=4, batch_size=2))
    later = rig.do(tenant, SFT, spec_of(steps=4, batch_size=2, dry_run=True)).result

    assert told is not None and "no measurement of training and optimizer steps" in told["time"]["reason"]
    assert later is not None
    assert 0 <= later["time"]["low_s"] <= later["time"]["high_s"]
    assert later["price"]["training_tokens"] == later["tokens"]["trained"]


def test_a_dry_run_of_a_kind_that_has_none_says_so(rig: JobRig, tenant: str) -> None:
    job = rig.do(tenant, JobKind.SCRIPT, {"data": "file-1", "dry_run": True})

    assert job.failure is not None
    assert (job.failure.code, job.failure.field) == ("invalid_spec", "dry_run")


def test_a_budget_of_tokens_is_never_gone_beyond_and_ends_with_a_checkpoint(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    job = rig.do(tenant, SFT, spec_of(epochs=3, batch_size=4, max_train_tokens=100))

    assert job.state is JobState.SUCCEEDED
    assert job.result is not None
    # Ten rows of six tokens: an epoch is 60 of them in steps of 24, 24 and 12.
    assert (job.result["step"], job.result["tokens"], job.result["stopped_by"]) == (4, 84, "budget")
    assert job.result["checkpoint"].endswith("/weights/final")
    trained = [claim for claim in worker.executed_of(run_of(job)) if claim.kind is OperationKind.FORWARD_BACKWARD]
    assert len(trained) == 4


def test_a_budget_beyond_all_tokens_changes_nothing(rig: JobRig, tenant: str) -> None:
    job = rig.do(tenant, SFT, spec_of(epochs=2, batch_size=4, max_train_tokens=120))

    assert job.result is not None
    assert (job.result["step"], job.result["tokens"], job.result["stopped_by"]) == (6, 120, None)


def test_a_dry_run_tells_where_a_budget_ends(rig: JobRig, tenant: str) -> None:
    job = rig.do(tenant, SFT, spec_of(epochs=3, batch_size=4, max_train_tokens=100, dry_run=True))

    assert job.result is not None
    assert (job.result["steps"], job.result["tokens"]["trained"], job.result["stopped_by"]) == (4, 84, "budget")


def test_a_budget_that_is_too_small_for_a_step_fails_before_any_device_time(rig: JobRig, tenant: str) -> None:
    job = rig.do(tenant, SFT, spec_of(epochs=1, batch_size=4, max_train_tokens=23))

    assert job.failure is not None
    assert (job.failure.code, job.failure.field) == ("budget_too_small", "max_train_tokens")
    assert "the first step alone has 24 tokens" in job.failure.message


def test_a_budget_of_hours_ends_a_training_behind_what_was_begun(
    settings: Settings, worker: FakeWorker, rig: JobRig, tenant: str
) -> None:
    with job_rig(settings, tools=MemoryTools(), clock=SteppingClock()) as slow:
        job = slow.do(tenant, SFT, spec_of(steps=200, batch_size=2, max_hours=5))

    assert job.failure is None
    assert job.state is JobState.SUCCEEDED
    assert job.result is not None
    assert job.result["stopped_by"] == "budget"
    assert 0 < job.result["step"] < 200
    assert job.result["checkpoint"].endswith("/weights/final")


def test_a_dry_run_of_a_sweep_sums_up_what_its_members_would_take(rig: JobRig, tenant: str) -> None:
    spec = {
        "template": {"kind": "sft", "spec": spec_of(steps=4)},
        "parameters": {"batch_size": [2, 5]},
        "dry_run": True,
    }
    sweep = rig.stores.jobs.create_groups([expanded(rig.new(tenant, JobKind.SWEEP, spec))])[0]
    for member in (0, 1):
        rig.run(f"{sweep.id}~000{member}")
    rig.run(sweep.id)

    told = rig.stores.jobs.find(sweep.id, tenant)
    assert told.state is JobState.SUCCEEDED
    assert told.result is not None
    estimate = told.result["estimate"]
    assert (estimate["jobs"], estimate["steps"]) == (2, 8)
    assert estimate["tokens"]["trained"] == 4 * 2 * 6 + 4 * 5 * 6


def _around(worker: FakeWorker, job: Job) -> dict[str, int]:
    """What a job had done beside its passes, steps and samples."""
    kinds = {OperationKind.CREATE_MODEL, OperationKind.SAVE_WEIGHTS, OperationKind.SAVE_WEIGHTS_FOR_SAMPLER}
    return dict(Counter(one.kind.value for one in worker.executed_of(run_of(job)) if one.kind in kinds))


@pytest.fixture(scope="module")
def answering(settings: Settings, worker: FakeWorker) -> Iterator[JobRig]:
    """A runner whose rows are prompts."""
    with job_rig(settings, tools=PolicyTools()) as rig:
        yield rig


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (JobKind.REINFORCEMENT, {"group_size": 3, "kl_coef": 0.1}),
        (JobKind.DISTILL, {"group_size": 2, "grader": None}),
    ],
)
def test_of_answers_a_dry_run_tells_how_many_there_are_and_between_which_lengths_all_lies(
    answering: JobRig, tenant: str, worker: FakeWorker, kind: JobKind, own: dict[str, object]
) -> None:
    spec = policy_spec(steps=3, batch_size=2, eval_fraction=0.2, seed=5, **own)
    spec = {name: value for name, value in spec.items() if value is not None}
    spec |= {"teacher": spec["model"]} if kind is JobKind.DISTILL else {}
    told = answering.do(tenant, kind, {**spec, "dry_run": True})
    assert told.failure is None
    assert answering.stores.database.read("SELECT 1 FROM session WHERE job = ?", (told.id,)) == []
    real = answering.do(tenant, kind, spec)

    assert real.failure is None and told.result is not None and real.result is not None
    tokens = told.result["tokens"]
    assert (told.result["steps"], told.result["answers"]) == (3, 3 * 2 * spec["group_size"])
    assert tokens["trained_least"] <= real.result["tokens"] <= tokens["trained"]
    prompts = 3 * 2 * spec["group_size"] * 6
    assert (tokens["trained_least"], tokens["trained"]) == (
        prompts + told.result["answers"],
        prompts + 3 * told.result["answers"],
    )
    assert tokens["drawn_least"] < tokens["drawn"]
    assert not tokens["drawn_is_exact"]
    assert told.result["memory"] is not None
    assert told.result["around"] == _around(worker, real)


def test_off_policy_a_dry_run_counts_the_teachers_answers_and_the_training_on_them(
    answering: JobRig, tenant: str
) -> None:
    spec = {**policy_spec(epochs=2, group_size=2), "teacher": "another", "mode": "off_policy", "dry_run": True}
    del spec["grader"]
    spec["teacher"] = spec["model"]

    told = answering.do(tenant, JobKind.DISTILL, spec)

    assert told.result is not None, told.failure
    tokens = told.result["tokens"]
    assert (told.result["answers"], told.result["rows"], told.result["epochs"]) == (20, 20, 2.0)
    assert (tokens["prefilled"], tokens["drawn_least"], tokens["drawn"]) == (60, 20, 60)
    assert (tokens["trained_least"], tokens["trained"]) == (2 * 20 * 7, 2 * 20 * 9)


def test_a_budget_of_tokens_ends_learning_from_answers_behind_the_step_that_uses_it_up(
    answering: JobRig, tenant: str
) -> None:
    spec = policy_spec(steps=5, batch_size=2, group_size=2, max_train_tokens=50, seed=1)

    told = answering.do(tenant, JobKind.REINFORCEMENT, {**spec, "dry_run": True})
    job = answering.do(tenant, JobKind.REINFORCEMENT, spec)

    assert job.result is not None and told.result is not None
    assert job.result["stopped_by"] == "budget"
    assert 50 <= job.result["tokens"] <= told.result["tokens"]["trained"]
    assert job.result["step"] < 5


def test_what_cannot_be_reckoned_is_refused_by_name_when_it_is_submitted() -> None:
    with pytest.raises(InvalidInput, match="not for scripts"):
        parse_spec("script", {"data": "file-1", "dry_run": True})
    sweep = {"template": {"kind": "script", "spec": {"data": "file-1"}}, "parameters": {"max_seconds": [1, 2]}}
    with pytest.raises(InvalidInput, match="not for scripts"):
        parse_and_expand("sweep", {**sweep, "dry_run": True})
    flow = {"jobs": {"mine": {"kind": "script", "spec": {"data": "file-1"}}}}
    with pytest.raises(InvalidInput, match="not for scripts"):
        parse_and_expand("flow", {**flow, "dry_run": True})


def parse_and_expand(kind: str, values: dict[str, object]) -> None:
    spec = parse_spec(kind, values).model_dump(mode="json", exclude_none=True)
    expanded(NewJob(id="job-1", tenant="t", kind=JobKind(kind), spec=spec, digest="d"))
