"""Bodies of sweeps' and flows' members: a line for each, which is best, and how many stand where."""

from __future__ import annotations

from pydantic import Field

from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.bodies.jobs_sweep import Goal, Value


class JobMemberInfo(ResponseBody):
    """One member: a sweep's with its ``values``, its number of the ``metric`` and whether it is the best so far."""

    id: str
    name: str
    kind: str
    state: str
    values: dict[str, Value] | None = None
    metric: float | None = None
    is_best: bool = False
    failure: str | None = None


class JobMembersResponse(ResponseBody):
    """``GET jobs/{job_id}/members``, in the order in which they were asked for; of other jobs there are none."""

    members: list[JobMemberInfo]
    counts: dict[str, int] = Field(default={})
    """How many are in which state."""
    metric: str | None = None
    """What a sweep's members are compared by; missing while none of them has told it."""
    goal: Goal | None = None
