"""A training run to one who comes back to it: how to go on, how far it can be taken back, and taking it there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from twinkle.core.adapter import Dialect
from twinkle.core.errors import InvalidInput
from twinkle.server.openapi import described
from twinkle.server.receiving.request_metadata import HEADER, idempotency_key, priority_of
from twinkle.server.state import Artifacts, Common, Queue, Server, Tenant
from twinkle.server.tinker.answers import answer, moment
from twinkle.storage.journal.branches import Branch, fork_of
from twinkle.storage.tenants.sessions import NewSession
from twinkle.wire.bodies.base import MAX_INT64, parse_body
from twinkle.wire.bodies.native import RunResponse
from twinkle.wire.bodies.runs import (
    BranchInfo,
    BranchTicket,
    ForkRequest,
    HistoryResponse,
    PastState,
    RewindRequest,
    SnapshotInfo,
    StepInfo,
    TimesResponse,
)
from twinkle.wire.paths import ModelId

router = APIRouter()


@router.get("/runs/{run_id}", openapi_extra=described(RunResponse, refusals=[404]))
async def show_run(run_id: str, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """A run, and the number of its next operation."""
    run = await common.sql.run(artifacts.adapters.find, run_id, tenant=tenant)
    return answer(
        RunResponse(
            run_id=run.id,
            session_id=run.session,
            base_model=run.config.base_model,
            rank=run.config.rank,
            next_seq=await common.sql.run(artifacts.adapters.next_seq, run.id),
        )
    )


_KEY_PREFIX = "fork:"
_MAX_STEPS_SHOWN = 1000


@router.get("/runs/{run_id}/history", openapi_extra=described(HistoryResponse, refusals=[404]))
async def show_history(run_id: str, common: Common, queue: Queue, artifacts: Artifacts, tenant: Tenant) -> Response:
    """Where a run comes from, its latest steps, what of it is kept and what that takes up."""
    return answer(await common.listings.run(tenant, _describe, queue, artifacts, run_id, tenant))


@router.get("/runs/{run_id}/times", openapi_extra=described(TimesResponse, refusals=[404]))
async def show_times(
    run_id: str,
    common: Common,
    queue: Queue,
    artifacts: Artifacts,
    tenant: Tenant,
    after: Annotated[int, Query(ge=-1, le=MAX_INT64)] = -1,
) -> Response:
    """The time in line and on the device of a run's operations behind number ``after``."""
    run = await common.sql.run(artifacts.adapters.find, run_id, tenant=tenant)
    spent = await common.sql.run(partial(queue.timeline.spent, after=after), run.id)
    return answer(
        TimesResponse(run_id=run.id, last_operation=spent.last_seq, queue_s=spent.queue_s, compute_s=spent.compute_s)
    )


@router.post(
    "/runs/{run_id}/rewind",
    openapi_extra=described(BranchTicket, body=RewindRequest, refusals=[404], headers=[HEADER]),
)
async def rewind(run_id: str, request: Request, server: Server, tenant: Tenant) -> Response:
    """Let a run go on from a past state, behind all that was accepted. The same idempotency key: the same rewind."""
    body = parse_body(RewindRequest, await server.common.bodies.read(request))
    await server.common.sql.run(server.artifacts.adapters.find, run_id, tenant=tenant)
    branches, key = server.queue.branches, idempotency_key(request)
    operation = await _operation_of(server.common, body, partial(branches.seq_of_rewind, run_id, request_key=key))
    accepted = await server.queue.submitter.write(
        partial(branches.rewind, run_id, tenant, at=operation, step=body.step, request_key=key)
    )
    await server.common.sql.run(
        server.accounts.audit.note, tenant, "run_rewind", training_run=run_id, operation=str(operation)
    )
    return answer(BranchTicket(request_id=accepted.request_id, run_id=run_id, source=run_id, operation=operation))


@router.post(
    "/runs/{run_id}/fork",
    openapi_extra=described(BranchTicket, body=ForkRequest, refusals=[404], headers=[HEADER]),
)
async def fork(run_id: str, request: Request, server: Server, tenant: Tenant) -> Response:
    """Begin a new run from a past state. The same idempotency key, or number in a session: the same run."""
    body = parse_body(ForkRequest, await server.common.bodies.read(request))
    source = await server.common.sql.run(server.artifacts.adapters.find, run_id, tenant=tenant)
    branches, new_session = server.queue.branches, _session_of_fork(run_id, idempotency_key(request))
    if body.session_id is None:
        session_id = await server.common.sql.run(server.accounts.sessions.opened, tenant, new_session)
    else:
        session_id = (await server.common.sql.run(server.accounts.sessions.find, tenant, body.session_id)).id
    earlier = None if session_id is None else str(ModelId(session_id, body.model_seq_id))
    operation = await _operation_of(server.common, body, partial(branches.seq_of_fork, earlier, source=run_id))
    if session_id is None:
        session_id = await server.accounts.resends.open_session(tenant, new_session)
    adapter_id = str(ModelId(session_id, body.model_seq_id))
    await server.accounts.resends.take_run_of_id(tenant, adapter_id)
    adapter = replace(
        fork_of(
            source,
            adapter_id,
            session_id,
            now=server.common.clock.now(),
            dialect=None if body.dialect is None else Dialect(body.dialect),
        ),
        priority=priority_of(source.user_metadata),
        limit=await server.accounts.quotas.adapters_of(tenant),
    )
    accepted = await server.queue.submitter.write(
        partial(branches.fork, adapter, source=run_id, at=operation, step=body.step)
    )
    await server.common.sql.run(
        server.accounts.audit.note,
        tenant,
        "run_fork",
        training_run=adapter.id,
        source=run_id,
        operation=str(operation),
    )
    return answer(BranchTicket(request_id=accepted.request_id, run_id=adapter.id, source=run_id, operation=operation))


async def _operation_of(common: Common, state: PastState, seq_of: Callable[..., int]) -> int:
    if (state.step is None) == (state.operation is None):
        raise InvalidInput("step", "give either a step of the optimizer or the number of an operation")
    if state.operation is not None:
        return state.operation
    assert state.step is not None, "one of the two is given"
    return await common.sql.run(partial(seq_of, step=state.step))


def _session_of_fork(run_id: str, key: str | None) -> NewSession:
    return NewSession(display_name=f"fork of {run_id}", idempotency_key=f"{_KEY_PREFIX}{key}" if key else None)


def _describe(queue: Queue, artifacts: Artifacts, run_id: str, tenant: str) -> HistoryResponse:
    run = artifacts.adapters.find(run_id, tenant=tenant)
    steps = queue.branches.steps(run_id, limit=_MAX_STEPS_SHOWN)
    origin = queue.branches.origin(run_id)
    cost = queue.snapshots.cost(run_id)
    return HistoryResponse(
        run_id=run.id,
        parked_at=None if run.parked_at is None else moment(run.parked_at),
        earliest_operation=max(cost.floor_seq, 0),
        num_steps=queue.branches.num_steps(run_id),
        steps=[StepInfo(step=step.number, operation=step.seq, time=moment(step.finished_at)) for step in steps],
        origin=None if origin is None else _branch(origin),
        rewinds=[_branch(branch) for branch in queue.branches.rewinds(run_id)],
        forks=[_branch(branch) for branch in queue.branches.forks(run_id)],
        snapshots=[
            SnapshotInfo(operation=one.seq, size_bytes=one.size_bytes, time=moment(one.created_at))
            for one in queue.snapshots.all(run_id)
        ],
        snapshot_bytes=cost.snapshot_bytes,
        num_payloads=cost.num_payloads,
        payload_bytes=cost.payload_bytes,
    )


def _branch(branch: Branch) -> BranchInfo:
    return BranchInfo(
        run_id=branch.adapter,
        operation=branch.seq,
        source=branch.source,
        source_operation=branch.at,
        time=moment(branch.created_at),
    )
