"""Checkpoints that are pushed by themselves: each once, by the nearest wish, however often housekeeping looks."""

from __future__ import annotations

import json

import pytest

from harness.clock import HandClock
from harness.journal import CONFIG, Bench
from twinkle.core.adapter import Checkpoint, CheckpointKind, StoredFile
from twinkle.core.errors import NotFound
from twinkle.core.job import JobKind, NewJob
from twinkle.core.lease import Lease
from twinkle.core.limits import TenantLimits
from twinkle.storage.checkpoints.pushes import Pushes, filled
from twinkle.storage.jobs.jobs import Jobs
from twinkle.storage.journal.records import Records
from twinkle.tasks.pushing import CheckpointPusher

SPEC = {"forms": ["peft"], "to": "ms://team/{run}-{checkpoint}", "private": True, "hub_token": "sealed:x"}


@pytest.fixture
def pushes(bench: Bench, lease: Lease) -> Pushes:
    """Of tenant ``t0``, who has runs ``a`` and ``b``."""
    bench.created(lease, "a", "b")
    return bench.stores.pushes


@pytest.fixture
def pusher(bench: Bench, pushes: Pushes) -> CheckpointPusher:
    return CheckpointPusher(pushes, bench.stores.jobs)


def _save(bench: Bench, path: str, *, seq: int = 1, kind: CheckpointKind = CheckpointKind.TRAINING) -> None:
    run, _, name = path.removeprefix("tinker://").split("/")
    files = {"state.json": StoredFile(key=f"{path}/{seq}", size_bytes=1, sha256=str(seq))}
    checkpoint = Checkpoint(
        path=path, tenant="t0", adapter=run, kind=kind, name=name, seq=seq, config=CONFIG, files=files, created_at=0.0
    )
    with bench.database.transaction() as transaction:
        Records(checkpoints=[checkpoint]).insert(transaction, bench.clock.now())


def _jobs(bench: Bench) -> list[tuple[str, str]]:
    """What is exported, and whereto."""
    jobs = [bench.stores.jobs.find(row[0], "t0") for row in bench.rows("SELECT id FROM job")]
    return sorted((str(job.spec["checkpoint"]), str(job.spec["to"])) for job in jobs)


def test_what_is_saved_from_then_on_is_pushed_once_and_again_when_its_name_means_something_new(
    bench: Bench, clock: HandClock, pushes: Pushes, pusher: CheckpointPusher
) -> None:
    _save(bench, "tinker://a/weights/before")
    clock.move(1)
    pushes.want("t0", None, SPEC)
    _save(bench, "tinker://a/weights/x")
    _save(bench, "tinker://b/sampler_weights/y:z", kind=CheckpointKind.SAMPLER)
    _save(bench, "tinker://a/external_weights/w", kind=CheckpointKind.EXTERNAL)
    counts = [pusher.push(), pusher.push()]
    first = _jobs(bench)
    clock.move(2 * 3600)
    pusher.push()
    _save(bench, "tinker://a/weights/x", seq=2)
    _save(bench, "tinker://b/sampler_weights/y:z", kind=CheckpointKind.SAMPLER)
    counts.append(pusher.push())

    assert counts == [2, 0, 1]
    assert first == [
        ("tinker://a/weights/x", "ms://team/a-x"),
        ("tinker://b/sampler_weights/y:z", "ms://team/b-y-z"),
    ]
    assert len(_jobs(bench)) == 3
    (push,) = pushes.all("t0")
    job = bench.stores.jobs.find(str(push.last_job), "t0")
    assert (job.kind.value, job.spec["hub_token"], job.spec["private"]) == ("export", "sealed:x", True)


def test_a_run_s_own_wish_comes_before_its_tenant_s_and_one_that_is_ended_pushes_no_more(
    bench: Bench, pushes: Pushes, pusher: CheckpointPusher
) -> None:
    pushes.want("t0", None, SPEC)
    own = pushes.want("t0", "a", {**SPEC, "to": "hf://own/old"})
    again = pushes.want("t0", "a", {**SPEC, "to": "hf://own/a"})
    _save(bench, "tinker://a/weights/x")
    _save(bench, "tinker://b/weights/x")
    pusher.push()
    for push in pushes.all("t0"):
        pushes.end(push.id, "t0")
    _save(bench, "tinker://a/weights/later")

    assert own.id == again.id
    assert pusher.push() == 0 and pushes.all("t0") == []
    assert _jobs(bench) == [("tinker://a/weights/x", "hf://own/a"), ("tinker://b/weights/x", "ms://team/b-x")]
    with pytest.raises(NotFound):
        pushes.end(own.id, "t0")
    with pytest.raises(NotFound):
        pushes.want("t1", "a", SPEC)


def test_what_was_submitted_and_not_noted_is_the_same_job(
    bench: Bench, pushes: Pushes, pusher: CheckpointPusher
) -> None:
    pushes.want("t0", None, SPEC)
    _save(bench, "tinker://a/weights/x")
    pusher.push()
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE checkpoint SET pushed = NULL")

    assert pusher.push() == 1
    assert len(_jobs(bench)) == 1


def test_a_push_whose_name_its_tenant_gave_to_another_job_keeps_nobody_waiting(
    bench: Bench, pushes: Pushes, pusher: CheckpointPusher
) -> None:
    own = pushes.want("t0", "a", SPEC)
    _save(bench, "tinker://a/weights/x")
    (due,) = pushes.due()
    taken = NewJob(
        id="job-taken", tenant="t0", kind=JobKind.CHECK, spec={}, digest="x", client_id=f"{own.id}:{due.content}"
    )
    bench.stores.jobs.create(taken)
    pushes.want("t0", "b", SPEC)
    _save(bench, "tinker://b/weights/x")
    _save(bench, "tinker://a/weights/y")

    pusher.push()

    exported = [row[0] for row in bench.rows("SELECT spec FROM job WHERE kind = 'export' ORDER BY id")]
    assert sorted(json.loads(spec)["checkpoint"] for spec in exported) == [
        "tinker://a/weights/y",
        "tinker://b/weights/x",
    ]
    assert pusher.push() == 0


def test_what_its_tenant_has_no_room_for_waits(bench: Bench, clock: HandClock, pushes: Pushes) -> None:
    narrow = CheckpointPusher(pushes, Jobs(bench.database, clock, limits=TenantLimits(max_jobs=1)))
    pushes.want("t0", None, SPEC)
    _save(bench, "tinker://a/weights/x")
    _save(bench, "tinker://b/weights/x")

    assert narrow.push() == 2 and len(_jobs(bench)) == 1
    clock.move(5 * 3600)
    assert narrow.push() == 1 and len(_jobs(bench)) == 1
    assert CheckpointPusher(pushes, bench.stores.jobs).push() == 1
    assert len(_jobs(bench)) == 2


def test_names_in_a_target_have_the_letters_that_hubs_take() -> None:
    assert filled("ms://team/{run}.{checkpoint}", run="s:train:0", checkpoint="a b/c") == "ms://team/s-train-0.a-b-c"
