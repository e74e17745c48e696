"""Scripts: a tenant's own Python loop, run beside the service, started again where it was lost.

What it prints become the job's events. It is a client like any other: what it has submitted lies in the journal, and
its next attempt finds its session under the job's id.
"""

from __future__ import annotations

import signal
from typing import ClassVar

from pydantic import BaseModel

from twinkle.core.job import JobCancelled, JobEvent, JobFailed, JobKind, JsonObject
from twinkle.jobs.context import JobContext
from twinkle.jobs.script_tools import RunningScript, ScriptEnd, ScriptOutput, ScriptRequest
from twinkle.wire.bodies.jobs_script import MAX_SCRIPT_BYTES, ScriptSpec

_LOOK_S = 1.0


class ScriptPlan:
    """See :class:`twinkle.jobs.plans.Plan`."""

    kind: ClassVar[JobKind] = JobKind.SCRIPT
    spec_class: ClassVar[type[BaseModel]] = ScriptSpec

    async def run(self, context: JobContext[ScriptSpec]) -> JsonObject:
        """Run the script to its end."""
        job, spec, tools = context.job, context.spec, context.tools
        source = await context.files.read(spec.data)
        if len(source) > MAX_SCRIPT_BYTES:
            raise JobFailed("too_large", f"the script has {len(source)} bytes, {MAX_SCRIPT_BYTES} may be", field="data")
        request = ScriptRequest(
            job=job.id,
            tenant=job.tenant,
            attempt=job.attempt,
            source=source,
            arguments=spec.arguments,
            max_seconds=spec.max_seconds,
        )
        try:
            async with tools.run_script(request) as script:
                end = await _follow(context, script)
        except JobCancelled:
            await tools.forget_script(job.id)
            raise
        await tools.forget_script(job.id)
        failure = _failure_of(end)
        if failure is not None:
            raise failure
        return {"exit_code": end.code}


async def _follow(context: JobContext[ScriptSpec], script: RunningScript) -> ScriptEnd:
    await context.save(phase="running")
    while True:
        news = await script.news(timeout_s=_LOOK_S)
        await context.save(events=[_event(one) for one in news.output])
        if news.end is not None:
            return news.end


def _event(output: ScriptOutput) -> JobEvent:
    data: JsonObject = {"stream": output.stream}
    if output.num_left_out:
        data["num_left_out_bytes"] = output.num_left_out
    return JobEvent(kind="message", message=output.text, data=data)


def _failure_of(end: ScriptEnd) -> JobFailed | None:
    """Why a script that ended is a job that failed. None of it may pass: its own next run would end like this one."""
    if end.ended_by == "time":
        return JobFailed("time_limit", "the script was ended: its time was over", details={"exit_code": end.code})
    if end.ended_by == "folder":
        return JobFailed("folder_limit", "the script was ended: its folder was full", details={"exit_code": end.code})
    if end.ended_by == "stop":
        return JobFailed("stopped", "the script was stopped from outside", is_transient=True)
    if end.code == -signal.SIGXCPU:
        return JobFailed(
            "cpu_limit", "the script was ended: its processor time was used up", details={"exit_code": end.code}
        )
    if end.code < 0:
        return JobFailed("signal", f"the script was ended by signal {-end.code}", details={"exit_code": end.code})
    if end.code:
        return JobFailed("exit_code", f"the script ended with exit code {end.code}", details={"exit_code": end.code})
    return None
