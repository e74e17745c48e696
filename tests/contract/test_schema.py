"""The schema: reached from nothing and from itself, by one process or two, and the same as the tables in the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import event, text
from sqlmodel import SQLModel

from harness.clock import HandClock
from harness.journal import Bench, new_sampler, submission
from twinkle.core.errors import ConfigError
from twinkle.core.operation import OperationKind
from twinkle.storage import tables
from twinkle.storage.database import Database
from twinkle.storage.journal.turns import HEADS_OF_TENANT, LANES_WITH_SAMPLES, READY_TENANTS, SAMPLES_OF_LANE
from twinkle.storage.migrating import migrate
from twinkle.storage.schema import is_begun, newest_revision, upgrade
from twinkle.storage.sql_engine import sql_engine

_UPGRADE = """
import sys
from twinkle.storage.schema import upgrade
sys.stdin.readline()
upgrade(sys.argv[1])
"""


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, make_empty_database_url: Callable[[str], str]) -> str:
    return make_empty_database_url(request.param)


def _differences(url: str) -> list[object]:
    assert tables.LaneRow.__tablename__ in SQLModel.metadata.tables
    engine = sql_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        found = compare_metadata(context, SQLModel.metadata)
    engine.dispose()
    return list(found)


def test_upgrading_twice_is_upgrading_once_and_leaves_no_difference_to_the_code(empty_url: str) -> None:
    upgrade(empty_url)
    upgrade(empty_url)

    assert _differences(empty_url) == []


def test_two_processes_may_upgrade_at_once(empty_url: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _UPGRADE, empty_url], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=60)[1] for process in processes]

    assert [process.returncode for process in processes] == [0, 0], errors
    assert _differences(empty_url) == []


def test_the_newest_migration_is_told_without_loading_it(empty_url: str) -> None:
    assert not is_begun(empty_url)
    upgrade(empty_url)
    database = Database(empty_url)
    applied = database.read("SELECT version_num FROM alembic_version")
    database.close()

    assert is_begun(empty_url)
    assert applied == [(newest_revision(),)]


def test_a_journal_one_migration_behind_is_brought_along(empty_url: str) -> None:
    engine = sql_engine(empty_url)
    migrate(engine, revision=f"{int(newest_revision()) - 1:04}")
    engine.dispose()

    upgrade(empty_url)

    assert _differences(empty_url) == []


def test_a_migration_may_pause_longer_than_a_transaction_of_the_service(
    make_empty_database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinkle.storage.database.FROZEN_AFTER_S", 0.1)
    engine = sql_engine(make_empty_database_url("postgres"))

    @event.listens_for(engine, "before_cursor_execute")
    def pause(_: object, __: object, statement: str, *___: object) -> None:
        if "CREATE TABLE checkpoint" in statement:
            threading.Event().wait(1.0)

    migrate(engine)

    with engine.connect() as connection:
        assert connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar() == "100ms"
        assert connection.execute(text("SELECT COUNT(*) FROM checkpoint")).scalar() == 0
    engine.dispose()


def test_a_journal_of_the_first_schema_is_brought_along_with_what_it_holds(empty_url: str) -> None:
    engine = sql_engine(empty_url)
    migrate(engine, revision="0001")
    database = Database(empty_url)
    with database.transaction() as transaction:
        transaction.execute("INSERT INTO tenant (id, name, weight, created_at) VALUES ('t', 't', 1, 0)")
        transaction.execute(
            "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime)"
            " VALUES ('s', 't', 'm', FALSE, 0, -1, 0, 0)"
        )
        transaction.execute(
            "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts, claim_epoch,"
            " num_tokens, device_s, expired, accepted_at, not_before, result)"
            " VALUES ('s:req:0', 't', 's', 'm', 0, 'sample', '', 'done', 1, 1, 5, 0, FALSE, 0, 0, ?)",
            (b"kept",),
        )
    database.close()

    migrate(engine)

    assert database.read("SELECT request_id, result, num_prompt_tokens, ended_no FROM operation") == [
        ("s:req:0", b"kept", 0, None)
    ]
    assert database.read("SELECT num_ended FROM lane") == [(0,)]
    database.close()
    engine.dispose()
    assert _differences(empty_url) == []


def test_weights_that_were_saved_without_a_name_get_an_end_and_named_ones_stay_as_they_are(empty_url: str) -> None:
    engine = sql_engine(empty_url)
    migrate(engine, revision="0013")
    database = Database(empty_url)
    before = time.time()
    with database.transaction() as transaction:
        transaction.execute("INSERT INTO tenant (id, name, weight, created_at) VALUES ('t', 't', 1, 0)")
        transaction.execute(
            "INSERT INTO session (id, tenant, tags, sdk_version, created_at, heartbeat_at)"
            " VALUES ('s', 't', '[]', '', 0, 0)"
        )
        transaction.execute(
            "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime)"
            " VALUES ('a', 't', 'm', TRUE, 0, -1, 0, 0)"
        )
        transaction.execute(
            "INSERT INTO adapter (id, tenant, session, mesh, config, optimizer, created_at)"
            " VALUES ('a', 't', 's', 'm', '', '', 0)"
        )
        for name, is_listed, expires_at in (("named", True, None), ("ephemeral-7", False, None), ("short", False, 5.0)):
            transaction.execute(
                "INSERT INTO checkpoint (path, tenant, adapter, kind, name, seq, config, files, size_bytes, public,"
                " listed, created_at, expires_at, content) VALUES (?, 't', 'a', 'sampler', ?, 0, '', '{}', 1, FALSE, ?,"
                " 0, ?, ?)",
                (name, name, is_listed, expires_at, name),
            )
    database.close()

    migrate(engine)

    ends = {row.path: row.expires_at for row in database.read("SELECT path, expires_at FROM checkpoint")}
    database.close()
    engine.dispose()
    day_s = 86_400
    assert (ends["named"], ends["short"]) == (None, 5.0)
    assert before + day_s <= ends["ephemeral-7"] <= time.time() + day_s


def test_what_was_given_out_before_contents_is_bound_to_what_its_name_means_now(empty_url: str) -> None:
    engine = sql_engine(empty_url)
    migrate(engine, revision="0011")
    database = Database(empty_url)
    loads = {
        # Of what is the tenant's own, public, granted, private, and of the run itself.
        "own": {"path": "tinker://b/weights/x"},
        "public": {"path": "tinker://a/weights/public"},
        "granted": {"path": "tinker://a/weights/x", "grant": {"token": "k", "owner": "t0", "run": "a", "seq": 1}},
        "private": {"path": "tinker://a/weights/x"},
        "b": {"path": "tinker://b/weights/x"},
    }
    with database.transaction() as transaction:
        for tenant in ("t0", "t1"):
            transaction.execute(
                f"INSERT INTO tenant (id, name, weight, created_at) VALUES ('{tenant}', '{tenant}', 1, 0)"
            )
            transaction.execute(
                "INSERT INTO session (id, tenant, tags, sdk_version, created_at, heartbeat_at)"
                f" VALUES ('{tenant}', '{tenant}', '[]', '', 0, 0)"
            )
        for lane, tenant in (("a", "t0"), *((lane, "t1") for lane in (*loads, "s0", "s1", "s2"))):
            transaction.execute(
                "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime)"
                f" VALUES ('{lane}', '{tenant}', 'm', TRUE, 0, 0, 0, 0)"
            )
        for run, tenant in (("a", "t0"), ("b", "t1")):
            transaction.execute(
                "INSERT INTO adapter (id, tenant, session, mesh, config, optimizer, created_at)"
                f" VALUES ('{run}', '{tenant}', '{tenant}', 'm', '', '', 0)"
            )
        for path, run, tenant, public in (("a/weights/x", "a", "t0", False), ("a/weights/public", "a", "t0", True),
                                          ("b/weights/x", "b", "t1", False)):  # fmt: skip
            transaction.execute(
                "INSERT INTO checkpoint (path, tenant, adapter, kind, name, seq, config, files, size_bytes, public,"
                " listed, created_at) VALUES (?, ?, ?, 'training', 'x', 1, '', '{}', 1, ?, TRUE, 0)",
                (f"tinker://{path}", tenant, run, public),
            )
        for session, path in (("s0", "tinker://a/weights/public"), ("s1", "tinker://a/weights/x"), ("s2", None)):
            transaction.execute(
                "INSERT INTO sampling_session (id, tenant, session, base_model, checkpoint)"
                " VALUES (?, 't1', 't1', 'base', ?)",
                (session, path),
            )
        for token, path, seq in (
            ("k", "tinker://a/weights/x", 1),
            ("old", "tinker://a/weights/x", 0),
            ("run", None, None),
        ):
            transaction.execute(
                "INSERT INTO access_token (id, digest, tenant, adapter, path, seq, name, created_at, expires_at)"
                " VALUES (?, ?, 't0', 'a', ?, ?, '', 0, 1)",
                (token, token, path, seq),
            )
        for lane, request in loads.items():
            transaction.execute(
                "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts,"
                " claim_epoch, num_tokens, device_s, expired, accepted_at, not_before, payload)"
                " VALUES (?, 't1', ?, 'm', 0, 'load_weights', '', 'queued', 0, 0, 0, 0, FALSE, 0, 0, ?)",
                (lane, lane, json.dumps(request).encode()),
            )

    migrate(engine)

    content = {row.path: row.content for row in database.read("SELECT path, content FROM checkpoint")}
    private, public, own = (content[f"tinker://{p}"] for p in ("a/weights/x", "a/weights/public", "b/weights/x"))
    assert len({private, public, own}) == 3
    sessions = database.read("SELECT content, generation FROM sampling_session ORDER BY id")
    assert [tuple(row) for row in sessions] == [(public, 0), ("none", 0), (None, None)]
    tokens = database.read("SELECT id, content FROM access_token ORDER BY id")
    assert [tuple(row) for row in tokens] == [("k", private), ("old", "none"), ("run", None)]
    bound = {
        row.lane: json.loads(bytes(row.payload)).get("content")
        for row in database.read("SELECT lane, payload FROM operation")
    }
    assert bound == {"own": own, "public": public, "granted": private, "private": None, "b": None}
    database.close()
    engine.dispose()
    assert _differences(empty_url) == []


# -- the hot statements use their indexes -----------------------------------------------------------------------------


_SCAN = re.compile(r'SCAN (o|l|operation|lane)\n|"Seq Scan"[^{}]*"Relation Name": "(operation|lane)"')


def _plan(bench: Bench, sql: str, parameters: Sequence[object]) -> str:
    if not bench.database.is_postgres:
        return "".join(f"{row[3]}\n" for row in bench.rows(f"EXPLAIN QUERY PLAN {sql}", parameters))
    return json.dumps(bench.rows(f"EXPLAIN (FORMAT JSON) {sql}", parameters)[0][0])


@pytest.fixture(scope="module")
def crowded(module_url: str) -> Iterator[Bench]:
    """Many lanes with finished operations, few that wait: where a scan would cost what an index does not."""
    bench = Bench(module_url, HandClock())
    lease = bench.lease()
    adapters = [f"adapter{number:03d}" for number in range(200)]
    bench.created(lease, *adapters)
    bench.journal.open_lane(new_sampler("s"))
    for seq in range(1, 3):
        bench.append(*(submission(adapter, seq) for adapter in adapters))
        bench.run(lease)
    bench.append(submission("adapter000", 3), *(submission("s", seq, OperationKind.SAMPLE) for seq in range(3)))
    with bench.database.transaction() as transaction:
        transaction.execute(
            "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime)"
            " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 50000)"
            " SELECT CAST(i AS TEXT), 't0', 'mesh0', TRUE, 1, 0, 0, 0 FROM n"
        )
        transaction.execute("ANALYZE")
    yield bench
    bench.close()


@pytest.mark.parametrize(
    ("sql", "parameters", "index"),
    [
        (READY_TENANTS, ("mesh0", "mesh0", "mesh0", 2e9, 256), "lane_ready"),
        (HEADS_OF_TENANT, ("t0", "mesh0", 2e9, 256), "lane_ready"),
        (LANES_WITH_SAMPLES, ("mesh0", "mesh0", 2e9, 64), "sample_waiting"),
        (SAMPLES_OF_LANE, ("s", "mesh0", 64), "sample_waiting"),
        (
            "SELECT seq FROM operation WHERE lane = ? AND seq > ? AND seq < ? AND state IN ('done', 'failed')",
            ("adapter001", 0, 2),
            "lane",
        ),
        ("SELECT id FROM lane WHERE gap_since IS NOT NULL AND gap_since <= ? LIMIT ?", (0.0, 500), "lane_gap"),
        (
            "SELECT request_id FROM operation WHERE finished_at IS NOT NULL AND NOT expired AND held_by IS NULL"
            " AND finished_at <= ? LIMIT ?",
            (0.0, 500),
            "operation_kept",
        ),
        (
            "SELECT o.request_id FROM operation o JOIN lane l ON l.id = o.lane WHERE o.state = 'queued'"
            " AND o.state IN ('queued', 'running') AND o.accepted_at <= ? ORDER BY o.accepted_at LIMIT ?",
            (0.0, 500),
            "operation_open",
        ),
        (
            "SELECT request_id FROM operation WHERE lane = ? AND ended_no > ? AND seq >= ? AND seq < ?"
            " ORDER BY ended_no LIMIT ?",
            ("s", 0, 0, 10**9, 1000),
            "sample_ended",
        ),
    ],
    ids=[
        "ready_tenants",
        "heads",
        "lanes_with_samples",
        "samples",
        "history",
        "close_gaps",
        "expire_results",
        "expire_overdue",
        "ended_samples",
    ],
)
def test_hot_statements_use_their_indexes(crowded: Bench, sql: str, parameters: tuple[object, ...], index: str) -> None:
    plan = _plan(crowded, sql, parameters)

    assert index in plan, plan
    assert not _SCAN.search(plan), plan


def test_a_database_of_a_later_version_is_refused_by_its_number_and_left_as_it_is(empty_url: str) -> None:
    engine = sql_engine(empty_url)
    migrate(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    with pytest.raises(ConfigError, match="schema is 9999, of a later version"):
        migrate(engine)

    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    engine.dispose()
