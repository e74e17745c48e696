"""What belongs to a job is kept until it has ended, however long that takes, and all of it has an end."""

from __future__ import annotations

import pytest
from sqlmodel import Session

from harness.clock import HandClock
from harness.job_life import JobBench
from harness.journal import MESH, Bench, done, new_adapter, submission
from twinkle.core.errors import NotFound
from twinkle.core.job import JobState
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind
from twinkle.storage.journal.records import NewSamplingSession
from twinkle.storage.sampling.ephemeral import NewEphemeralWeights
from twinkle.storage.sampling.sampling_sessions import Patience
from twinkle.storage.tables import SessionRow
from twinkle.storage.tenants.sessions import NewSession

DAY_S = 86_400.0


@pytest.fixture
def jobs(bench: Bench) -> JobBench:
    return JobBench(bench)


def _work(bench: Bench, lease: Lease, *, adapter: str, session: str) -> None:
    """Train a little in a session, and draw a sample from what came of it."""
    new = new_adapter(adapter)
    first = submission(adapter, 0, OperationKind.CREATE_MODEL, body=b"{}")
    bench.journal.open_lane(type(new)(**{**new.__dict__, "session": session}), first)
    bench.append(submission(adapter, 1))
    bench.run(lease)
    sampler = NewSamplingSession(
        id=f"{session}:sample:0",
        tenant="t0",
        session=session,
        mesh=MESH,
        base_model="base",
        weights=NewEphemeralWeights(
            adapter=adapter, seq=1, size_bytes=1, opened_at=bench.clock.now(), expires_at=None, max_open=8
        ),
        like=adapter,
    )
    bench.journal.open_lane(sampler)
    bench.append(submission(sampler.id, 0, OperationKind.SAMPLE))
    bench.journal.commit(lease, [done(claim) for claim in bench.claim_samples(lease, 4)])


def test_a_job_has_one_session_that_no_client_can_open_before_it(jobs: JobBench) -> None:
    sessions = jobs.bench.stores.sessions
    jobs.submit("a")
    taken = sessions.open("t0", NewSession(idempotency_key="a"))

    session = sessions.open("t0", NewSession(job="a", idempotency_key="whatever"))

    assert session != taken
    assert sessions.open("t0", NewSession(job="a", idempotency_key="another")) == session


def test_a_paused_jobs_results_and_weights_wait_for_a_week_and_end_a_day_after_it(
    jobs: JobBench, bench: Bench, lease: Lease, clock: HandClock
) -> None:
    patience = Patience(idle_s=DAY_S, silent_s=3600)
    jobs.submit("a")
    session = bench.stores.sessions.open("t0", NewSession(job="a"))
    _work(bench, lease, adapter="of-job", session=session)
    _work(bench, lease, adapter="of-client", session="session-t0")
    futures = [("of-job", 1), (f"{session}:sample:0", 0)]
    jobs.running.give_back(jobs.claim("a"), JobState.PAUSED, reason="paused")

    for _ in range(7):
        clock.move(DAY_S)
        bench.upkeep.expire_results(older_than_s=DAY_S)
        bench.sampling_sessions.end_unreachable(patience)
        jobs.keeping.release()
    assert bench.status("of-client", 1).expired
    assert not any(bench.status(*future).expired for future in futures)
    ended = bench.rows("SELECT adapter, ended_at IS NOT NULL AS ended FROM ephemeral_weights ORDER BY adapter")
    assert [(row.adapter, bool(row.ended)) for row in ended] == [("of-client", True), ("of-job", False)]  # type: ignore[attr-defined]

    jobs.jobs.request_resume("a", "t0")
    jobs.finish("a")
    bench.upkeep.expire_results(older_than_s=DAY_S)
    assert not any(bench.status(*future).expired for future in futures)
    jobs.keeping.release()
    bench.upkeep.expire_results(older_than_s=DAY_S)
    bench.sampling_sessions.end_unreachable(patience)

    assert all(bench.status(*future).expired for future in futures)
    assert bench.rows("SELECT 1 AS one FROM ephemeral_weights WHERE ended_at IS NULL") == []
    assert bench.rows("SELECT 1 AS one FROM job WHERE holds") == []


def test_held_results_are_out_of_the_way_of_the_sweep_that_looks_for_old_ones(
    jobs: JobBench, bench: Bench, lease: Lease, clock: HandClock
) -> None:
    jobs.submit("a")
    session = bench.stores.sessions.open("t0", NewSession(job="a"))
    _work(bench, lease, adapter="of-job", session=session)
    bench.append(*(submission("of-job", seq) for seq in range(2, 1300)))
    bench.run(lease)
    _work(bench, lease, adapter="of-client", session="session-t0")
    clock.move(DAY_S)

    bench.upkeep.expire_results(older_than_s=DAY_S)

    assert bench.status("of-client", 1).expired
    assert not bench.status("of-job", 1299).expired
    jobs.finish("a")
    assert jobs.keeping.release() > 1299


def test_a_job_that_is_paused_for_ever_is_cancelled_and_lets_its_plan_put_down_what_there_is(
    jobs: JobBench, clock: HandClock
) -> None:
    jobs.submit("never began")
    jobs.submit("half done")
    jobs.submit("still fresh")
    jobs.running.give_back(jobs.claim("half done"), JobState.PAUSED, reason="paused")
    jobs.jobs.request_pause("never began", "t0")
    clock.move(90 * DAY_S)
    jobs.jobs.request_pause("still fresh", "t0")

    jobs.keeping.end_paused(older_than_s=90 * DAY_S)

    names = ("never began", "half done", "still fresh")
    assert [jobs.state(name) for name in names] == ["cancelled", "queued", "paused"]
    assert jobs.running.beat(jobs.claim("half done")).cancel


def test_a_paused_job_whose_time_is_over_goes_on_to_end_itself(jobs: JobBench, clock: HandClock) -> None:
    jobs.submit("a", expires_at=clock.now() + DAY_S)
    jobs.running.give_back(jobs.claim("a"), JobState.PAUSED, reason="paused")
    clock.move(DAY_S)

    jobs.keeping.end_paused(older_than_s=90 * DAY_S)

    assert not jobs.running.beat(jobs.claim("a")).cancel


def test_a_job_is_forgotten_a_while_after_its_end_with_all_that_was_told_of_it(
    jobs: JobBench, bench: Bench, clock: HandClock
) -> None:
    jobs.submit("a")
    jobs.submit("b", needs={"a": "ok"})
    session = bench.stores.sessions.open("t0", NewSession(job="a"))
    jobs.finish("a")
    clock.move(DAY_S)
    jobs.finish("b")

    assert jobs.keeping.forget(older_than_s=DAY_S) == 1

    with pytest.raises(NotFound):
        jobs.jobs.find("a", "t0")
    assert jobs.jobs.attempts("b", "t0")
    for table in ("job_event", "job_attempt"):
        assert bench.rows(f"SELECT 1 AS one FROM {table} WHERE job = 'a'") == []
    clock.move(DAY_S)
    assert jobs.keeping.forget(older_than_s=DAY_S) == 1
    assert bench.rows("SELECT 1 AS one FROM job_dependency") == []
    with Session(bench.engine) as reading:
        row = reading.get(SessionRow, session)
        assert row is not None and row.job is None
