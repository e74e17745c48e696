"""``twinkle runs``: training runs, what is kept of their past, and taking them back to it, straight in the journal."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import print_table
from twinkle.core.adapter import Dialect
from twinkle.core.clock import SystemClock
from twinkle.core.errors import InvalidInput, TransientError, UserError
from twinkle.core.operation import Accepted
from twinkle.core.settings import Settings
from twinkle.storage.adapters.adapters import Adapter
from twinkle.storage.journal.branches import Branch, fork_of
from twinkle.storage.stores import Stores
from twinkle.storage.tenants.sessions import NewSession

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


def list_runs(settings: Settings, *, limit: int, as_json: bool) -> None:
    """Print the newest runs of every tenant."""
    with opened_journal(settings) as stores:
        rows = [_facts(stores, run) for run in stores.adapters.newest(limit=limit)]
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
    with opened_journal(settings) as stores:
        run = stores.adapters.find(run_id)
        facts = _facts(stores, run)
        steps = stores.branches.steps(run_id, limit=num_steps)
        snapshots = stores.snapshots.all(run_id)
        cost = stores.snapshots.cost(run_id)
        origin = stores.branches.origin(run_id)
        branches = [*stores.branches.rewinds(run_id), *stores.branches.forks(run_id)]
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
    with opened_journal(settings) as stores:
        run = stores.adapters.find(run_id)
        at = _operation_of(stores, run_id, step, operation)
        accepted = stores.branches.rewind(run_id, run.tenant, at=at, request_key=None)
        say(f"{run_id} goes back to operation {at}: {accepted.request_id}")
        _wait(stores, accepted, timeout_s)


def fork_run(
    settings: Settings,
    run_id: str,
    *,
    step: int | None,
    operation: int | None,
    timeout_s: float,
    dialect: str | None = None,
) -> None:
    """Begin a new run of the same tenant from a past state; its id stands alone on the last line."""
    with opened_journal(settings) as stores:
        source = stores.adapters.find(run_id)
        at = _operation_of(stores, run_id, step, operation)
        session = stores.sessions.open(source.tenant, NewSession(display_name=f"fork of {run_id}"))
        through = None if dialect is None else Dialect(dialect)
        adapter = fork_of(source, f"{session}:train:0", session, now=SystemClock().now(), dialect=through)
        accepted = stores.branches.fork(adapter, source=run_id, at=at)
        say(f"a new run begins as {run_id} was after operation {at}: {accepted.request_id}")
        _wait(stores, accepted, timeout_s)
        say(adapter.id)


def pin_run(settings: Settings, run_id: str, *, is_pinned: bool) -> None:
    """Keep a run's adapter on its device, or no longer.

    Raises:
        NotFound: There is no such run.
    """
    with opened_journal(settings) as stores:
        run = stores.adapters.find(run_id)
        stores.adapters.pin(run.id, is_pinned=is_pinned)
    if is_pinned:
        say(f"{run_id} stays on mesh {run.mesh} (pinned runs never take more than half of its places)")
    else:
        say(f"{run_id} may leave mesh {run.mesh} when others need the room")


def _operation_of(stores: Stores, run_id: str, step: int | None, operation: int | None) -> int:
    if (step is None) == (operation is None):
        raise InvalidInput("--at", "give either a step with --at or the number of an operation with --at-operation")
    if operation is not None:
        return operation
    assert step is not None, "one of the two is given"
    return stores.branches.seq_of(run_id, step=step)


def _wait(stores: Stores, accepted: Accepted, timeout_s: float) -> None:
    """Wait for the mesh, which looks into the journal once a second.

    Raises:
        UserError: It failed.
        TransientError: The time is up; it is done all the same as soon as the mesh has a worker.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = stores.journal.statuses([accepted.request_id])[accepted.request_id].status
        if status.failure is not None:
            raise UserError(f"{accepted.request_id} failed: {status.failure.message}")
        if status.state.is_final:
            say("done")
            return
        time.sleep(_POLL_S)
    raise TransientError(f"{accepted.request_id} is accepted and waits for mesh {accepted.mesh}; see `twinkle status`")


def _facts(stores: Stores, run: Adapter) -> _Facts:
    return _Facts(
        run=run.id,
        tenant=stores.tenants.name_of(run.tenant),
        base_model=run.config.base_model,
        rank=run.config.rank,
        mesh=run.mesh,
        steps=stores.branches.num_steps(run.id),
        state=_state(stores, run),
        created_at=run.created_at,
    )


def _state(stores: Stores, run: Adapter) -> str:
    if stores.adapters.is_unloaded(run.id):
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
