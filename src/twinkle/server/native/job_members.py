"""What sweeps and flows are made of, and how it stands: the table of a sweep with the best of it marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fastapi import APIRouter, Response

from twinkle.core.job import Job, JobKind, JobMember
from twinkle.server.openapi import described
from twinkle.server.state import Common, JobBook, Tenant
from twinkle.server.tinker.answers import answer
from twinkle.wire.bodies.jobs_groups import JobMemberInfo, JobMembersResponse
from twinkle.wire.job_groups import sweep_of
from twinkle.wire.sweep_tables import table_of

router = APIRouter(prefix="/jobs")


@router.get("/{job_id}/members", openapi_extra=described(JobMembersResponse, refusals=[404]))
async def show_members(job_id: str, common: Common, book: JobBook, tenant: Tenant) -> Response:
    """How everything that a sweep or a flow is made of stands now."""
    job = await common.sql.run(book.store.find, job_id, tenant)
    members = await common.sql.run(book.store.members, job_id, tenant)
    return answer(await common.object_io.run(_sweep, job, members) if job.kind is JobKind.SWEEP else _others(members))


def _sweep(job: Job, members: Sequence[JobMember]) -> JobMembersResponse:
    spec, planned = sweep_of(job.spec)
    table = table_of(spec, planned, members)
    kinds = {member.id: member.kind.value for member in members}
    lines = [
        JobMemberInfo(
            id=line.id,
            name=line.name,
            kind=kinds[line.id],
            state=line.state.value,
            values=dict(line.values),
            metric=line.metric,
            is_best=table.best is not None and line.id == table.best.id,
            failure=line.failure,
        )
        for line in table.lines
    ]
    return JobMembersResponse(members=lines, counts=table.num_by_state, metric=table.metric, goal=table.goal)


def _others(members: Sequence[JobMember]) -> JobMembersResponse:
    return JobMembersResponse(
        members=[
            JobMemberInfo(
                id=member.id,
                name=member.name,
                kind=member.kind.value,
                state=member.state.value,
                failure=member.failure,
            )
            for member in members
        ],
        counts=dict(sorted(Counter(member.state.value for member in members).items())),
    )
