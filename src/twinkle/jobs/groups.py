"""The plans of kinds ``sweep`` and ``flow``: they run when all that they are made of has ended, and sum it up."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlencode

from pydantic import BaseModel

from twinkle.core.job import JobCancelled, JobFailed, JobKind, JobState, JsonObject
from twinkle.jobs.context import JobContext
from twinkle.jobs.estimate import sum_of_estimates
from twinkle.wire.bodies.jobs import JobResponse, JobsResponse
from twinkle.wire.bodies.jobs_flow import FlowSpec
from twinkle.wire.bodies.jobs_groups import JobMemberInfo, JobMembersResponse
from twinkle.wire.bodies.jobs_sweep import Requirement, SweepSpec

_JOBS = "/api/native/v1/jobs"
_MOST_NAMED = 10
_PAGE = 200


class SweepPlan:
    """``sweep``: which of its members is best. All of them are told by the table, not by the result."""

    kind: ClassVar[JobKind] = JobKind.SWEEP
    spec_class: ClassVar[type[BaseModel]] = SweepSpec

    async def run(self, context: JobContext[SweepSpec]) -> JsonObject:
        """See the class.

        Raises:
            JobFailed: Too few members have succeeded.
            JobCancelled: It was cancelled while they ran; the result tells of those that had ended.
        """
        told = await _members(context)
        best = next((member for member in told.members if member.is_best), None)
        result: JsonObject = {
            "members": len(told.members),
            "counts": told.counts,
            "metric": told.metric,
            "goal": None if told.goal is None else told.goal.value,
            "best": None if best is None else await _best(context, best),
        }
        if context.spec.dry_run:
            result["estimate"] = await _sum_of_estimates(context)
        if context.job.cancel_requested:
            raise JobCancelled(f"sweep {context.job.id} was cancelled", result=result)
        succeeded = told.counts.get(JobState.SUCCEEDED, 0)
        if succeeded < (len(told.members) if context.spec.require is Requirement.ALL else 1):
            raise _failed(told.members, of="sweep", result=result)
        return result


class FlowPlan:
    """``flow``: how its jobs ended, by their names. It has succeeded if all of them have."""

    kind: ClassVar[JobKind] = JobKind.FLOW
    spec_class: ClassVar[type[BaseModel]] = FlowSpec

    async def run(self, context: JobContext[FlowSpec]) -> JsonObject:
        """See the class.

        Raises:
            JobFailed: One of its jobs has not succeeded.
            JobCancelled: It was cancelled while they ran.
        """
        told = await _members(context)
        jobs = {member.name: {"id": member.id, "state": member.state} for member in told.members}
        result: JsonObject = {"jobs": jobs, "counts": told.counts}
        if context.spec.dry_run:
            result["estimate"] = await _sum_of_estimates(context)
        if context.job.cancel_requested:
            raise JobCancelled(f"flow {context.job.id} was cancelled", result=result)
        if told.counts.get(JobState.SUCCEEDED, 0) < len(told.members):
            raise _failed(told.members, of="flow", result=result)
        return result


async def _members(context: JobContext[Any]) -> JobMembersResponse:
    answer = await context.door.request("GET", f"{_JOBS}/{context.job.id}/members")
    if not answer.is_success:
        raise JobFailed("internal", f"its members could not be read: {answer.text}", is_transient=True)
    return JobMembersResponse.model_validate_json(answer.content)


async def _best(context: JobContext[Any], member: JobMemberInfo) -> JsonObject:
    """The best member's own result, with which member it is: ``${sweep.best.checkpoint}`` is found here."""
    answer = await context.door.request("GET", f"{_JOBS}/{member.id}")
    if not answer.is_success:
        raise JobFailed("internal", f"the best member could not be read: {answer.text}", is_transient=True)
    result = JobResponse.model_validate_json(answer.content).result or {}
    return {**result, "id": member.id, "name": member.name, "parameters": member.values, "value": member.metric}


async def _sum_of_estimates(context: JobContext[Any]) -> JsonObject:
    """What all members together would take, one after the other; a time only where each has one."""
    results: list[JsonObject] = []
    query = {"parent": context.job.id, "limit": str(_PAGE)}
    while True:
        answer = await context.door.request("GET", f"{_JOBS}?{urlencode(query)}")
        if not answer.is_success:
            raise JobFailed("internal", f"its members could not be read: {answer.text}", is_transient=True)
        page = JobsResponse.model_validate_json(answer.content)
        results += [_own_estimate(job.result) for job in page.jobs if job.result is not None]
        if page.cursor is None:
            return sum_of_estimates(results)
        query["cursor"] = page.cursor


def _own_estimate(result: JsonObject) -> JsonObject:
    """A member's; of a sweep in a flow that of all its members."""
    own: JsonObject = result.get("estimate", result)
    return own


def _failed(members: list[JobMemberInfo], *, of: str, result: JsonObject) -> JobFailed:
    others = [member for member in members if member.state != JobState.SUCCEEDED]
    named = [f"{member.name} {member.state}" + (f" ({member.failure})" if member.failure else "") for member in others]
    more = f", and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return JobFailed(
        "members_failed",
        f"{len(others)} of the {of}'s {len(members)} jobs did not succeed: {'; '.join(named[:_MOST_NAMED])}{more}",
        details=result,
    )
