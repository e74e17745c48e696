"""``twinkle runs``: training runs, what is kept of their past, and taking them back to it, straight in the journal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from sqlalchemy import Engine

from twinkle.cli.console import say
from twinkle.cli.journal import opened_journal
from twinkle.cli.table import print_table
from twinkle.core.clock import SystemClock
from twinkle.core.errors import InvalidInput, TransientError, UserError
from twinkle.core.operation import Accepted
from twinkle.core.settings import Settings
from twinkle.storage.adapters.parking import Parking, Unloading
from twinkle.storage.adapters.snapshots import SnapshotStore
from twinkle.storage.checkpoints.catalog import Adapter, Catalog
from twinkle.storage.database import Database
from twinkle.storage.journal.branches import Branch, Branches, fork_of
from twinkle.storage.journal.journal import Journal
from twinkle.storage.tenants.directory import Directory, NewSession

_POLL_S = 0.2
_MEGABYTE = 10**6


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """A run at a glance."""

    run: str
    tenant: str
    base_model: str
    rank: int
    mesh: str
    steps: int
    state: str
    created_at: float


@dataclass(frozen=True)
class _Runs:
    """What these commands look into."""

    engine: Engine
    catalog: Catalog
    journal: Journal
    branches: Branches
    snapshots: SnapshotStore
    directory: Directory
    parking: Parking
    unloading: Unloading


def list_runs(settings: Settings, *, limit: int, as_json: bool) -> None:
    """Print the newest runs of every tenant."""
    with _opened(settings) as runs:
        rows = [_facts(runs, run) for run in runs.catalog.newest_adapters(limit=limit)]
    if as_json:
        say(json.dumps([asdict(row) for row in rows]))
        return
    columns = ("run", "tenant", "model", "steps", "state", "made")
    print_table(
        columns,
        [(row.run, row.tenant, row.base_model, str(row.steps), row.state, _date(row.created_at)) for row in rows],
    )


def show_run(settings: Settings, run_id: str, *, num_steps: int, as_json: bool) -> None:
    """Print where a run comes from, its latest steps, and what its past takes up."""
    with _opened(settings) as runs:
        run = runs.catalog.adapter(run_id)
        facts = _facts(runs, run)
        steps = runs.branches.steps(run_id, limit=num_steps)
        snapshots = runs.snapshots.all(run_id)
        cost = runs.snapshots.cost(run_id)
        origin = runs.branches.origin(run_id)
        branches = [*runs.branches.rewinds(run_id), *runs.branches.forks(run_id)]
    if as_json:
        say(
            json.dumps(
                {
                    **asdict(facts),
                    "origin": None if origin is None else asdict(origin),
                    "branches": [asdict(branch) for branch in branches],
                    "latest_steps": [asdict(step) for step in steps],
                    "snapshots": [asdict(snapshot) for snapshot in snapshots],
                    "cost": asdict(cost),
                }
            )
        )
        return
    say(f"{run_id}: {facts.base_model}, tenant {facts.tenant}, {facts.state}, {facts.steps} steps")
    for branch in ([] if origin is None else [origin]) + branches:
        say(_words(branch, run_id))
    largest = max((snapshot.size_bytes for snapshot in snapshots), default=0)
    say(
        f"kept: {cost.num_snapshots} snapshots of up to {largest / _MEGABYTE:.1f} MB,"
        f" {cost.snapshot_bytes / _MEGABYTE:.1f} MB together (at most {settings.max_snapshots});"
        f" {cost.num_payloads} payloads, {cost.payload_bytes / _MEGABYTE:.1f} MB"
    )
    say(f"can go back to operation {max(cost.floor_seq, 0)} and every step after it:")
    covered = {snapshot.seq for snapshot in snapshots}
    print_table(
        ("step", "operation", "snapshot", "ended"),
        [
            (str(step.number), str(step.seq), "yes" if step.seq in covered else "", _date(step.finished_at))
            for step in steps
            if step.seq >= cost.floor_seq
        ],
    )


def rewind_run(settings: Settings, run_id: str, *, step: int | None, operation: int | None, timeout_s: float) -> None:
    """Let a run go on from a past state; waits until it is there."""
    with _opened(settings) as runs:
        run = runs.catalog.adapter(run_id)
        at = _operation_of(runs, run_id, step, operation)
        accepted = runs.branches.rewind(run_id, run.tenant, at=at, request_key=None)
        say(f"{run_id} goes back to operation {at}: {accepted.request_id}")
        _wait(runs, accepted, timeout_s)


def fork_run(settings: Settings, run_id: str, *, step: int | None, operation: int | None, timeout_s: float) -> None:
    """Begin a new run of the same tenant from a past state; its id stands alone on the last line."""
    with _opened(settings) as runs:
        source = runs.catalog.adapter(run_id)
        at = _operation_of(runs, run_id, step, operation)
        new = NewSession(
            tags=[],
            user_metadata=None,
            project_id=None,
            display_name=f"fork of {run_id}",
            sdk_version="",
            idempotency_key=None,
        )
        session = runs.directory.open_session(source.tenant, new)
        adapter = fork_of(source, f"{session}:train:0", session, now=SystemClock().now())
        accepted = runs.branches.fork(adapter, source=run_id, at=at)
        say(f"a new run begins as {run_id} was after operation {at}: {accepted.request_id}")
        _wait(runs, accepted, timeout_s)
        say(adapter.id)


def pin_run(settings: Settings, run_id: str, *, is_pinned: bool) -> None:
    """Keep a run's adapter on its device, or no longer.

    Raises:
        NotFound: There is no such run.
    """
    with _opened(settings) as runs:
        run = runs.catalog.adapter(run_id)
        runs.parking.pin(run.id, is_pinned=is_pinned)
    if is_pinned:
        say(f"{run_id} stays on mesh {run.mesh} (pinned runs never take more than half of its places)")
    else:
        say(f"{run_id} may leave mesh {run.mesh} when others need the room")


@contextmanager
def _opened(settings: Settings) -> Iterator[_Runs]:
    with opened_journal(settings) as engine:
        clock = SystemClock()
        database = Database(settings.resolved_database_url)
        journal = Journal(database, clock)
        try:
            yield _Runs(
                engine=engine,
                catalog=Catalog(database, engine, clock),
                journal=journal,
                branches=Branches(database, journal, clock),
                snapshots=SnapshotStore(database, clock),
                directory=Directory(engine, clock),
                parking=Parking(database, clock),
                unloading=Unloading(database, journal),
            )
        finally:
            database.close()


def _operation_of(runs: _Runs, run_id: str, step: int | None, operation: int | None) -> int:
    if (step is None) == (operation is None):
        raise InvalidInput("--at", "give either a step with --at or the number of an operation with --at-operation")
    if operation is not None:
        return operation
    assert step is not None, "one of the two is given"
    return runs.branches.seq_of(run_id, step=step)


def _wait(runs: _Runs, accepted: Accepted, timeout_s: float) -> None:
    """Wait for the mesh, which looks into the journal once a second.

    Raises:
        UserError: It failed.
        TransientError: The time is up; it is done all the same as soon as the mesh has a worker.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = runs.journal.statuses([accepted.request_id])[accepted.request_id].status
        if status.failure is not None:
            raise UserError(f"{accepted.request_id} failed: {status.failure.message}")
        if status.state.is_final:
            say("done")
            return
        time.sleep(_POLL_S)
    raise TransientError(f"{accepted.request_id} is accepted and waits for mesh {accepted.mesh}; see `twinkle status`")


def _facts(runs: _Runs, run: Adapter) -> _Facts:
    return _Facts(
        run=run.id,
        tenant=runs.directory.tenant_name(run.tenant),
        base_model=run.config.base_model,
        rank=run.config.rank,
        mesh=run.mesh,
        steps=runs.branches.num_steps(run.id),
        state=_state(runs, run),
        created_at=run.created_at,
    )


def _state(runs: _Runs, run: Adapter) -> str:
    if runs.unloading.is_unloaded(run.id):
        return "unloaded"
    if run.pinned_at is not None:
        return "pinned"
    return "active" if run.parked_at is None else "parked"


def _words(branch: Branch, run_id: str) -> str:
    when = _date(branch.created_at)
    if branch.adapter == branch.source:
        return f"operation {branch.seq} went back to operation {branch.at}, {when}"
    if branch.adapter == run_id:
        return f"began as {branch.source} was after operation {branch.at}, {when}"
    return f"{branch.adapter} began as it was after operation {branch.at}, {when}"


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
