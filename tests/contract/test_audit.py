"""The audit log: who did it stands in it, it only grows, and what operations tell outlives them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.journal import Bench, done, submission
from twinkle.core.actor import acting_as, key_actor, operator_actor
from twinkle.core.errors import StatementFailed
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind
from twinkle.storage.tenants.audit import TOLD_BY_OPERATIONS, AuditRecord, keep

FOR_EVER = 1e12


def entries(bench: Bench, tenant: str | None = None) -> list[AuditRecord]:
    return bench.stores.audit.entries(tenant, start=0, end=FOR_EVER)


def test_an_entry_names_who_acted_of_whose_it_is_and_the_service_where_nobody_asked(bench: Bench) -> None:
    with acting_as(operator_actor("olga")):
        bench.stores.tenants.suspend("t0", "unpaid")
        bench.stores.audit.note(None, "mesh_drain", mesh="m")
    with acting_as(key_actor("k1")):
        bench.stores.tenants.create_key("t1", "laptop")
    bench.stores.tenants.resume("t0")

    told = [(one.tenant, one.actor, one.event) for one in entries(bench)]

    assert told == [
        ("t0", "operator olga", "tenant_suspend"),
        (None, "operator olga", "mesh_drain"),
        ("t1", "key k1", "apikey_create"),
        ("t0", "service", "tenant_resume"),
    ]
    assert [one.event for one in entries(bench, "t0")] == ["tenant_suspend", "tenant_resume"]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET actor = 'somebody else'",
        "UPDATE audit SET at = at + 1",
        "DELETE FROM audit",
        "UPDATE audit_floor SET at = -1",
        "DELETE FROM audit_floor",
    ],
)
def test_no_statement_changes_or_takes_away_an_entry(bench: Bench, statement: str) -> None:
    bench.stores.audit.note("t0", "apikey_create", key="k")
    before = entries(bench)

    with pytest.raises(StatementFailed), bench.database.transaction() as transaction:
        transaction.execute(statement)

    assert entries(bench) == before and len(before) == 1


def test_an_entry_cannot_be_replaced_nor_the_table_emptied(bench: Bench) -> None:
    bench.stores.audit.note("t0", "apikey_create", key="k")
    before = entries(bench)
    trick = "TRUNCATE audit" if bench.database.is_postgres else "INSERT OR REPLACE INTO audit SELECT * FROM audit"

    with pytest.raises(StatementFailed), bench.database.transaction() as transaction:
        transaction.execute(trick)

    assert entries(bench) == before


def test_what_is_older_than_what_is_kept_goes_and_nothing_else(bench: Bench) -> None:
    for number in range(3):
        bench.stores.audit.note("t0", f"apikey_create{number}")
        bench.clock.move(10)
    middle = bench.clock.now() - 20

    gone = bench.stores.audit.forget_before(middle)
    again = bench.stores.audit.forget_before(middle - 10)

    assert (gone, again) == (1, 0)
    assert [one.event for one in entries(bench)] == ["apikey_create1", "apikey_create2"]


def test_what_a_save_tells_outlives_its_operation(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1, OperationKind.SAVE_WEIGHTS, body=b'{"path": "kept"}'))
    (claim,) = bench.claim(lease)
    bench.journal.commit(lease, [replace(done(claim), num_tokens=0)])
    (told,) = entries(bench, "t0")

    with bench.database.transaction() as transaction:
        rows = transaction.execute(
            "SELECT tenant, finished_at, kind, lane, payload FROM operation WHERE lane = 'a' AND seq = 1"
        ).fetchall()
        keep(transaction, [row for row in rows if row.kind in TOLD_BY_OPERATIONS])
        transaction.execute("UPDATE operation SET state = 'failed' WHERE lane = 'a' AND seq = 1")

    assert told.event == "checkpoint_create" and told.details["tinker_path"] == "tinker://a/weights/kept"
    assert entries(bench, "t0") == [told]


def test_of_many_entries_the_latest_are_given_in_their_order(bench: Bench) -> None:
    for number in range(5):
        bench.stores.audit.note("t0", f"e{number}")
        bench.clock.move(1)

    latest = bench.stores.audit.entries(None, start=0, end=FOR_EVER, limit=2)

    assert [one.event for one in latest] == ["e3", "e4"]
