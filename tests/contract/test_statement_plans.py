"""No statement on the way of an operation, and none that housekeeping repeats, reads a whole table to find its rows.

The statements are those that the code really sends, each explained by the database that got it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest

from harness.clock import HandClock
from harness.job_life import JobBench, new_job
from harness.journal import MESH, Bench, done, failed, new_sampler, submission
from harness.servers import drop_database
from twinkle.core.ids import request_id_of
from twinkle.core.job import JobEvent, JobKind, JobState
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind
from twinkle.core.places import PlaceInList
from twinkle.scheduler.retention import Retention
from twinkle.storage.database import Cursor, Database, Row, Transaction
from twinkle.storage.jobs.hooks import DueJob
from twinkle.storage.sampling.ephemeral import NewEphemeralWeights
from twinkle.storage.sampling.sampling_sessions import Patience, SamplePoll, SamplingSessions
from twinkle.wire.job_groups import expanded

Statement = tuple[str, tuple[object, ...]]
Action = Callable[[Bench, Lease], object]

NUM_LANES = 50_000
"""As many as PostgreSQL no longer reads as a whole to find a hundred."""

NUM_JOBS = 10_000

DAY_S = 86_400.0

TABLES = (
    "operation",
    "lane",
    "adapter",
    "checkpoint",
    "access_token",
    "ephemeral_weights",
    "job",
)
TABLES_OF_JOBS = ("job_event", "job_attempt", "job_dependency")

# A walk along one of these is one along what waits, not along what there is.
_SMALL = (
    "lane_ready|lane_gap|lane_prunable|lane_unloaded|sample_waiting|operation_open"
    "|lane_forgettable|sample_forgettable|ephemeral_of_session|ephemeral_pinned|job_ready|job_running|job_settled|job_paused|job_holds|job_untold"
)
_ANY_TABLE = "|".join(TABLES + TABLES_OF_JOBS)
_WHOLE_TABLE = re.compile(
    rf"SCAN (o|l|j|busy|sampling_session|{_ANY_TABLE})\b(?! USING (COVERING )?INDEX ({_SMALL})\b)"
    rf'|"Seq Scan"[^{{}}]*"Relation Name": "({_ANY_TABLE})"'
)


def _tell(bench: Bench) -> None:
    """One job of the many has a webhook, and something to tell."""
    jobs = JobBench(bench)
    bench.stores.jobs.create(new_job("told", notify_url="https://example.com/hook"))
    jobs.claim("told")
    assert bench.stores.job_hooks.due(limit=32, each=8) == [DueJob(id="told", tenant="t0")]
    hook = bench.stores.job_hooks.take("told", hold_s=0.0)
    assert hook is not None
    bench.stores.job_hooks.put_off(hook, "refused", seconds=0.0)
    bench.stores.job_hooks.end(hook, "told")


@dataclass(frozen=True)
class Crowd:
    """A filled database that nobody is connected to, when it was filled, and the lease of its mesh."""

    url: str
    filled_at: float
    lease: Lease


@pytest.fixture(scope="module")
def crowd(module_url: str) -> Crowd:
    """Many adapters with finished operations, few with work; adapter ``a`` has one running and one waiting."""
    bench = Bench(module_url, HandClock())
    lease = bench.lease()
    _fill(bench, lease)
    bench.close()
    return Crowd(module_url, bench.clock.now(), lease)


@pytest.fixture
def crowded(request: pytest.FixtureRequest, crowd: Crowd, copy_database: Callable[[str], str]) -> Iterator[Bench]:
    """A copy of the crowd, for a test to do with as it likes."""
    bench = Bench(copy_database(crowd.url), HandClock(crowd.filled_at))
    yield bench
    bench.close()
    if bench.database.is_postgres:
        drop_database(request.getfixturevalue("postgres_server_url"), bench.url)


def _fill(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a", "b")
    bench.journal.open_lane(new_sampler("s"))
    with bench.database.transaction() as transaction:
        if bench.database.is_postgres:
            # Half a million rows come without a look at what each refers to.
            transaction.execute("SET LOCAL session_replication_role = 'replica'")
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {NUM_LANES})"
        transaction.execute(
            "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime, requested_at)"
            f" {numbers} SELECT CAST(i AS TEXT), 't0', 'mesh0', TRUE, 1, 0, 0, 0, i FROM n"
        )
        transaction.execute(
            "INSERT INTO adapter (id, tenant, session, mesh, config, optimizer, created_at)"
            f" {numbers} SELECT CAST(i AS TEXT), 't0', 'session-t0', 'mesh' || CAST(i AS TEXT), '', '', 0 FROM n"
        )
        transaction.execute(
            "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts, claim_epoch,"
            " num_tokens, device_s, expired, accepted_at, not_before, finished_at)"
            f" {numbers} SELECT CAST(i AS TEXT) || ':req:0', 't0', CAST(i AS TEXT), 'mesh0', 0, 'forward', '', 'done',"
            f" 1, 1, 5, 0, FALSE, 0, 0, {bench.clock.now() + 10 * DAY_S} FROM n"
        )
        some = numbers.replace(str(NUM_LANES), str(NUM_LANES // 10))
        # Few have an end.
        transaction.execute(
            "INSERT INTO checkpoint (path, tenant, adapter, kind, name, seq, config, files, size_bytes, public, listed,"
            f" created_at, content, expires_at) {some} SELECT 'tinker://' || CAST(i AS TEXT) || '/weights/x', 't0',"
            " CAST(i AS TEXT), 'training', 'x', 0, '{\"base_model\": \"base\"}',"
            " '{}', 1, FALSE, TRUE, 0, CAST(i AS TEXT),"
            f" CASE WHEN i < 50 THEN {bench.clock.now() + DAY_S} END FROM n"
        )
        transaction.execute(
            f"INSERT INTO session (id, tenant, tags, sdk_version, created_at, heartbeat_at) {some}"
            " SELECT 'listed-' || CAST(i AS TEXT), 't0', '[]', '', i, i FROM n"
        )
        transaction.execute(
            "INSERT INTO access_token (id, digest, tenant, adapter, name, created_at, expires_at)"
            f" {some} SELECT CAST(i AS TEXT), CAST(i AS TEXT), 't0', CAST(i AS TEXT), '', 0,"
            f" {bench.clock.now() + 100 * DAY_S} + i FROM n"
        )
        transaction.execute(
            "INSERT INTO sampling_session (id, tenant, session, base_model)"
            f" {numbers} SELECT CAST(i AS TEXT), 't0', 'session-t0', '' FROM n"
        )
        transaction.execute(
            "INSERT INTO ephemeral_weights (sampling_session, tenant, session, adapter, seq, size_bytes, opened_at,"
            " used_at, ended_at) "
            f" {numbers} SELECT CAST(i AS TEXT), 't0', 'session-t0', CAST(i AS TEXT), 3, 1, 0, 0, 1 FROM n"
        )
        _crowd_jobs(transaction, numbers.replace(str(NUM_LANES), str(NUM_JOBS)), bench.clock.now())
    bench.append(submission("a", 1))
    bench.claim(lease)
    bench.append(submission("a", 2), submission("b", 1), submission("s", 0, OperationKind.SAMPLE))
    if bench.database.is_postgres:
        # As autovacuum would; for SQLite the service keeps no statistics.
        with bench.database.transaction() as transaction:
            transaction.execute("ANALYZE")


def _crowd_jobs(transaction: Transaction, numbers: str, now: float) -> None:
    """Many jobs that have ended, each with an event, an attempt and one that it came after."""
    transaction.execute(
        "INSERT INTO job (id, tenant, kind, spec, digest, nice, max_attempts, user_metadata, seed, state, progress,"
        " saved, attempt, num_failures, best_done, num_events, num_needs, holds, epoch, lease_until, not_before,"
        " nudged_at, created_at, finished_at)"
        f" {numbers} SELECT CAST(i AS TEXT), 't0', 'ops', '{{}}', '', 50, 3, '{{}}', 0, 'succeeded', '{{}}', '{{}}', 1,"
        f" 0, 0, 1, 0, FALSE, 1, 0, 0, 0, i, {now} FROM n"
    )
    transaction.execute(
        "INSERT INTO job_event (job, number, at, kind, message, data)"
        f" {numbers} SELECT CAST(i AS TEXT), 1, 0, 'status', '', '{{}}' FROM n"
    )
    transaction.execute(
        f"INSERT INTO job_attempt (job, attempt, owner, started_at) {numbers} SELECT CAST(i AS TEXT), 1, '', 0 FROM n"
    )
    transaction.execute(
        f"INSERT INTO job_dependency (job, needs, condition, ended) {numbers}"
        " SELECT CAST(i AS TEXT), CAST(i + 1 AS TEXT), 'any', TRUE FROM n"
    )


def _run_job(bench: Bench, lease: Lease) -> None:
    jobs = JobBench(bench)
    claim = jobs.claim("new")
    jobs.running.beat(claim)
    jobs.running.record(claim, progress={"done": 1}, saved={"step": 1}, events=[JobEvent(kind="message", message="x")])
    jobs.running.finish(claim, JobState.SUCCEEDED)


def _sweep(bench: Bench, lease: Lease) -> None:
    """A sweep's whole life, and every look at it."""
    jobs, outlooks = bench.stores.jobs, bench.stores.job_outlooks
    spec = {"template": {"kind": "sft", "spec": {"model": "m", "data": "file-1"}}, "parameters": {"seed": [1, 2, 3]}}
    jobs.create_groups([expanded(replace(new_job("sweep", kind=JobKind.SWEEP), spec=spec))])
    assert len(jobs.members("sweep", "t0")) == 3
    assert jobs.num_by_state("t0")
    assert outlooks.of("sweep~0001", "t0").wait is not None
    assert outlooks.of("sweep", "t0").wait is not None
    jobs.request_pause("sweep", "t0")
    jobs.request_resume("sweep", "t0")
    claim = JobBench(bench).claim("sweep~0000")
    assert outlooks.of("sweep~0000", "t0").wait is None
    assert bench.stores.running_jobs.results_of_needs("7") == {}
    bench.stores.running_jobs.finish(claim, JobState.FAILED)
    jobs.request_cancel("sweep", "t0")
    bench.stores.waiting_jobs.settle()
    bench.stores.running_jobs.finish(JobBench(bench).claim("sweep"), JobState.FAILED)
    jobs.request_retry("sweep", "t0")


def _page_of_jobs(bench: Bench, lease: Lease) -> None:
    jobs = bench.stores.jobs
    first = jobs.page("t0", limit=50)
    place = PlaceInList(created_at=first[-1].created_at, id=first[-1].id)
    assert len(jobs.page("t0", limit=50, after=place)) == 50
    assert len(jobs.page("t0", limit=50, states=[JobState.SUCCEEDED], kinds=[JobKind.OPS])) == 50
    assert jobs.page("t0", limit=50, states=[JobState.RUNNING]) == []
    jobs.page("t0", limit=50, parent="7")


def _commit(bench: Bench, lease: Lease) -> None:
    claims = bench.claim(lease)
    bench.journal.commit(lease, [failed(claim) if claim.lane == "a" else done(claim) for claim in claims])


def _commit_sample(bench: Bench, lease: Lease) -> None:
    bench.journal.commit(lease, [done(claim) for claim in bench.claim_samples(lease, 4)])


def _close_gap(bench: Bench, lease: Lease) -> None:
    bench.clock.move(700)
    assert bench.upkeep.close_gaps(older_than_s=600)


def _ephemeral(bench: Bench) -> SamplingSessions:
    return bench.sampling_sessions


def _open_ephemeral(bench: Bench, lease: Lease) -> None:
    weights = NewEphemeralWeights(
        adapter="a", seq=1, size_bytes=1, opened_at=bench.clock.now(), expires_at=None, max_open=1
    )
    bench.journal.open_lane(replace(new_sampler("nameless"), weights=weights))


def _expire_overdue(bench: Bench, lease: Lease) -> None:
    bench.clock.move(2 * DAY_S)
    assert bench.upkeep.expire_overdue(deadline_s=DAY_S, deadline_s_of={OperationKind.SAMPLE: 60.0})


def _resend_forgotten(bench: Bench, lease: Lease) -> None:
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE lane SET gone_seq = 5 WHERE id IN ('7', 's')")
    bench.append(submission("7", 3), submission("s", 4, OperationKind.SAMPLE))


# In this order, each finds something to do.
ACTIONS: dict[str, Action] = {
    "append": lambda bench, lease: bench.append(submission("1", 1), submission("2", 2), submission("s", 1)),
    "resend": lambda bench, lease: bench.append(submission("a", 2)),
    "record_loss": lambda bench, lease: bench.journal.record_loss(
        submission("session-t0:loss", 0, OperationKind.CREATE_CUSTOM_LOSS), result=b"{}"
    ),
    "find_loss": lambda bench, lease: bench.journal.loss_definition("session-t0:loss", 0),
    "statuses": lambda bench, lease: bench.journal.statuses([request_id_of("a", 1), request_id_of("1", 0)]),
    "failed_meanwhile": lambda bench, lease: bench.journal.failed_meanwhile([request_id_of("s", 0)]),
    "held_polls": lambda bench, lease: bench.sampling_sessions.having_ended(
        [SamplePoll(lane="s", client=0, after=0), SamplePoll(lane="1", client=0, after=0)]
    ),
    "num_open_samples": lambda bench, lease: bench.journal.num_open_samples("t0"),
    "ready_meshes": lambda bench, lease: bench.journal.ready_meshes(),
    "meshes": lambda bench, lease: bench.meshes.all(),
    "waiting": lambda bench, lease: bench.journal.waiting(lease),
    "claim": lambda bench, lease: bench.claim(lease),
    "claim_samples": lambda bench, lease: bench.claim_samples(lease, 4, under_way=["s:req:7"]),
    "give_back": lambda bench, lease: bench.journal.give_back(lease, [request_id_of("a", 1)], delay_s=0.0),
    "commit": _commit,
    "commit_sample": _commit_sample,
    "close_gaps": _close_gap,
    "runs_to_prune": lambda bench, lease: bench.snapshots.runs_to_prune(older_than_s=DAY_S),
    "prune": lambda bench, lease: bench.snapshots.prune("1", Retention(keep_s=0, every_ops=1, max_snapshots=2).choose),
    "open_ephemeral": _open_ephemeral,
    "note_use": lambda bench, lease: _ephemeral(bench).note_use(["nameless"]),
    "open_among": lambda bench, lease: _ephemeral(bench).open_among(["nameless", "7"]),
    "to_pin": lambda bench, lease: _ephemeral(bench).to_pin(MESH, older_than_s=0.0),
    "end_unreachable": lambda bench, lease: _ephemeral(bench).end_unreachable(Patience(idle_s=DAY_S, silent_s=DAY_S)),
    "expire_overdue": _expire_overdue,
    "timeline_lanes": lambda bench, lease: next(bench.stores.timeline.lanes("session-t1"), None),
    "timeline_operations": lambda bench, lease: list(bench.stores.timeline.operations("a", until=bench.clock.now())),
    "grant": lambda bench, lease: bench.stores.access_tokens.grant(
        "wat-nonsense", "tinker://1/weights/x", reader="t1", purpose="load"
    ),
    "expire_checkpoints": lambda bench, lease: bench.upkeep.expire_checkpoints(),
    "expire_access_tokens": lambda bench, lease: bench.upkeep.expire_access_tokens(),
    "create_job": lambda bench, lease: bench.stores.jobs.create_many(
        [new_job("new"), new_job("next", needs={"new": "ok", "7": "any"}, parent="8")]
    ),
    "resend_job": lambda bench, lease: bench.stores.jobs.create(new_job("new")),
    "page_of_jobs": _page_of_jobs,
    "events_of_job": lambda bench, lease: bench.stores.jobs.events("7", "t0"),
    "attempts_of_job": lambda bench, lease: bench.stores.jobs.attempts("7", "t0"),
    "ready_jobs": lambda bench, lease: bench.stores.waiting_jobs.take_ready(limit=16, again_after_s=10.0),
    "run_job": _run_job,
    "settle_jobs": lambda bench, lease: bench.stores.waiting_jobs.settle(),
    "jobs_by_their_clients_ids": lambda bench, lease: bench.stores.jobs.ids_of("t0", ["mine", "7"]),
    "jobs_with_news": lambda bench, lease: bench.stores.jobs.num_events(["7", "8"]),
    "webhooks": lambda bench, lease: _tell(bench),
    "sweep": _sweep,
    "speeds": lambda bench, lease: bench.stores.speeds.recent(MESH),
    "busy_tenants": lambda bench, lease: bench.stores.speeds.num_others(MESH, "t0"),
    "pause_job": lambda bench, lease: bench.stores.jobs.request_pause("next", "t0"),
    "end_paused_jobs": lambda bench, lease: bench.stores.job_keeping.end_paused(older_than_s=0.0),
    "release_results_of_jobs": lambda bench, lease: bench.stores.job_keeping.release(),
    "forget_jobs": lambda bench, lease: bench.stores.job_keeping.forget(older_than_s=100 * DAY_S),
    "resend_of_what_is_forgotten": _resend_forgotten,
    "statuses_of_what_is_forgotten": lambda bench, lease: bench.journal.statuses(["1:req:0", "7:req:5", "no:req:0"]),
    "sampled_before": lambda bench, lease: bench.sampling_sessions.sampled_before(
        "session-t0", checkpoint="tinker://1/weights/x", seq=2**60
    ),
    "forget_operations": lambda bench, lease: bench.stores.forgetting.forget_operations(
        older_than_s=DAY_S, max_batches=4
    ),
    "forget_lanes": lambda bench, lease: bench.stores.gone_lanes.forget(older_than_s=0.0),
    "forget_usage": lambda bench, lease: bench.stores.forgetting.forget_usage(older_than_s=DAY_S),
    "forget_audit": lambda bench, lease: bench.stores.audit.forget(older_than_s=DAY_S),
    "count_kept_payloads": lambda bench, lease: bench.stores.kept_payloads.count(max_looks=1),
    "expire_results": lambda bench, lease: bench.upkeep.expire_results(older_than_s=DAY_S),
}


def test_what_is_done_again_and_again_never_reads_a_whole_table(
    crowded: Bench, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, action in ACTIONS.items():
        statements = _statements_of(partial(action, crowded, crowd.lease), monkeypatch)

        assert statements, name
        for sql, parameters in statements:
            plan = _plan(crowded, sql, parameters)
            assert not _WHOLE_TABLE.search(plan), f"{name}: {sql}\n{plan}"


def test_with_ten_thousand_ready_jobs_a_claim_and_a_page_of_the_list_read_few_of_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench.database.transaction() as transaction:
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {NUM_JOBS})"
        transaction.execute(
            "INSERT INTO job (id, tenant, kind, spec, digest, nice, max_attempts, user_metadata, seed, state, progress,"
            " saved, attempt, num_failures, best_done, num_events, num_needs, holds, epoch, lease_until, not_before,"
            f" nudged_at, created_at) {numbers} SELECT 'job-' || CAST(i AS TEXT), 't' || CAST(i - (i / 2) * 2 AS TEXT),"
            " 'ops', '{}', '', 50, 3, '{}', 0, 'queued', '{}', '{}', 0, 0, 0, 0, 0, FALSE, 0, 0, 0, 0, i FROM n"
        )
    if bench.database.is_postgres:
        with bench.database.transaction() as transaction:
            transaction.execute("ANALYZE")
    jobs = bench.stores.jobs
    actions: dict[str, Callable[[], object]] = {
        "hand out": lambda: bench.stores.waiting_jobs.take_ready(limit=16, again_after_s=10.0),
        "claim": lambda: JobBench(bench).claim("job-1"),
        "list": lambda: jobs.page("t0", limit=50),
        "list by state": lambda: jobs.page("t0", limit=50, states=[JobState.QUEUED]),
        "look": lambda: jobs.find("job-8", "t0"),
    }
    for name, action in actions.items():
        statements = _statements_of(action, monkeypatch)
        assert len(statements) == 1 or name not in {"list", "list by state"}, statements
        for sql, parameters in statements:
            plan = _plan(bench, sql, parameters)
            assert not re.search(r"SCAN (j|job)\b(?! USING)|Seq Scan[^{}]*\"job\"", plan), f"{name}: {sql}\n{plan}"
            assert not re.search(r"TEMP B-TREE FOR ORDER BY|\"Node Type\": \"Sort\"", plan), f"{name}: {sql}\n{plan}"


def test_a_page_of_runs_or_checkpoints_is_one_query_that_walks_an_index(
    crowded: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PlaceInList(created_at=0.0, id="tinker://4/weights/x")
    lists: dict[str, Callable[[], object]] = {
        "runs": lambda: crowded.adapters.newest_of("t0", limit=100, after=replace(place, id="a")),
        "checkpoints": lambda: crowded.checkpoints.newest_of("t0", limit=100, after=place),
        # Behind an offset too: what is passed over is walked in the index.
        "wanted runs": lambda: crowded.adapters.page("t0", limit=100, offset=NUM_LANES // 2),
        "wanted checkpoints": lambda: crowded.checkpoints.page("t0", limit=100, offset=NUM_LANES // 20),
        "sessions": lambda: crowded.stores.sessions.page("t0", limit=100, offset=NUM_LANES // 20),
    }
    monkeypatch.setattr("twinkle.storage.adapters.adapters._adapter_of", lambda row: row.id)
    monkeypatch.setattr("twinkle.storage.checkpoints.checkpoints._checkpoint_of", lambda row: row.path)
    for name, action in lists.items():
        sent = _statements_of(action, monkeypatch)
        # Threads that other tests have left may ask for something else at the same time.
        table = {"runs": "adapter a", "wanted runs": "lane l", "sessions": "session"}.get(name, "checkpoint")
        statements = [one for one in sent if f" FROM {table} " in one[0] and "COUNT(*)" not in one[0]]

        assert len(statements) == 1, name
        plan = _plan(crowded, *statements[0])
        assert not _WHOLE_TABLE.search(plan), f"{name}\n{plan}"
        assert name != "wanted runs" or "lane_requested" in plan, plan
        assert not re.search(r"TEMP B-TREE|\"Node Type\": \"(Sort|Incremental Sort)\"", plan), f"{name}\n{plan}"


def test_a_statement_that_reads_a_whole_table_is_recognised(crowded: Bench) -> None:
    for table in TABLES:
        # All columns: no index has them, so none can be read in the table's stead.
        plan = _plan(crowded, f"SELECT * FROM {table} WHERE tenant || tenant = ?", ("t0t0",))

        assert _WHOLE_TABLE.search(plan), plan


def _statements_of(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[Statement]:
    """What the action sends to the database, each statement once; not what a server of other tests sends meanwhile."""
    seen: dict[str, tuple[object, ...]] = {}
    here = threading.get_ident()
    execute, read = Transaction.execute, Database.read

    def note(sql: str, parameters: Sequence[object]) -> None:
        if threading.get_ident() == here:
            seen.setdefault(sql, tuple(parameters))

    def noted_execute(transaction: Transaction, sql: str, parameters: Sequence[object] = ()) -> Cursor:
        note(sql, parameters)
        return execute(transaction, sql, parameters)

    def noted_read(database: Database, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        note(sql, parameters)
        return read(database, sql, parameters)

    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "execute", noted_execute)
        patched.setattr(Database, "read", noted_read)
        action()
    return list(seen.items())


def _plan(bench: Bench, sql: str, parameters: Sequence[object]) -> str:
    if bench.database.is_postgres:
        return json.dumps(bench.rows(f"EXPLAIN (FORMAT JSON) {sql}", parameters)[0][0])
    return "".join(f"{row[3]}\n" for row in bench.rows(f"EXPLAIN QUERY PLAN {sql}", parameters))
