"""Exports: written step by step where the training library is, read back, and only then given out."""

from __future__ import annotations

from dataclasses import asdict
from typing import ClassVar

from pydantic import BaseModel

from twinkle.core.job import JobCancelled, JobEvent, JobFailed, JobKind, JsonObject
from twinkle.core.process.crash import crash_point
from twinkle.jobs.context import JobContext
from twinkle.jobs.estimate import Work
from twinkle.jobs.exporting import ExportedFile, ExportOrder, ExportWork
from twinkle.wire.bodies.jobs_export import ExportSpec


class ExportPlan:
    """See :class:`twinkle.jobs.plans.Plan`."""

    kind: ClassVar[JobKind] = JobKind.EXPORT
    spec_class: ClassVar[type[BaseModel]] = ExportSpec

    async def run(self, context: JobContext[ExportSpec]) -> JsonObject:
        """Write, verify, publish."""
        work = await _opened(context)
        try:
            result = await _export(context, work)
        except JobCancelled:
            await work.clear()
            raise
        except JobFailed as error:
            if not error.failure.is_transient:
                await work.clear()
            raise
        await work.clear()
        return result

    async def reckon(self, context: JobContext[ExportSpec]) -> Work:
        """What will be written, as far as it is known beforehand; whether it can be exported at all is."""
        work = await _opened(context)
        try:
            return Work(
                base_model=work.facts["base_model"],
                stored_bytes=work.size_bytes if context.spec.to is None else 0,
                details={
                    "forms": list(context.spec.forms),
                    "files_bytes": work.size_bytes,
                    "steps_of_writing": len(work.steps),
                    **work.facts,
                },
            )
        finally:
            await work.clear()


async def _opened(context: JobContext[ExportSpec]) -> ExportWork:
    order = ExportOrder(
        job=context.job.id,
        tenant=context.job.tenant,
        spec=context.spec.model_dump(mode="json", exclude_none=True),
        content=context.saved.get("content"),
    )
    return await context.tools.open_export(order)


async def _export(context: JobContext[ExportSpec], work: ExportWork) -> JsonObject:
    """Do it all. What was written is found again by whoever repeats a step; what was published is saved."""
    saved = {"content": work.content, "published": context.saved.get("published", [])}
    total = len(work.steps) + len(context.spec.forms)
    begins = JobEvent(kind="message", message=f"writes {', '.join(context.spec.forms)}", data=dict(work.facts))
    await context.save(saved, phase="writing", done=0, total=total, unit="steps", events=[begins])
    files: list[ExportedFile] = []
    for number, step in enumerate(work.steps, 1):
        files += await work.take(step)
        crash_point("export.step_taken")
        written = sum(file.size_bytes for file in files)
        await context.save(phase="writing", done=number, bytes=written, bytes_total=work.size_bytes)
    verification: dict[str, dict[str, float]] = {}
    for number, form in enumerate(context.spec.forms, len(work.steps) + 1):
        await context.save(phase="verifying")
        verification[form] = await work.verify(form)
        await context.save(done=number)
        await context.event("metrics", f"{form} reads back as it was meant", **verification[form])
    given = await _publish(context, work, files, saved)
    url = await work.finish(verification)
    return {
        "checkpoint": context.spec.checkpoint,
        "content": work.content,
        **work.facts,
        "files": [asdict(file) for file in given],
        "size_bytes": sum(file.size_bytes for file in given),
        "verification": verification,
        "to": context.spec.to,
        "url": url,
    }


async def _publish(
    context: JobContext[ExportSpec], work: ExportWork, files: list[ExportedFile], saved: JsonObject
) -> list[ExportedFile]:
    done = {one["path"]: ExportedFile(**one) for one in saved["published"]}
    for file in files:
        found = done.get(file.path)
        if found is None or found.sha256 != file.sha256:
            done[file.path] = await work.publish(file)
            crash_point("export.file_published")
            saved["published"] = [asdict(one) for one in done.values()]
            await context.save(dict(saved), phase="giving out")
    return [done[file.path] for file in files]
