"""Data looked at before anything is trained on them: the report, or all that is wrong. No operation is submitted."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel

from twinkle.core.job import JobKind, JsonObject
from twinkle.core.model_names import HUB_SCHEMES
from twinkle.jobs.context import JobContext
from twinkle.jobs.data import DataFormat, DataRequest, DataUse, PreparedData
from twinkle.jobs.estimate import Work
from twinkle.wire.bodies.jobs_check import CheckSpec


class CheckPlan:
    """Prepares data, which a fine-tuning on them then finds done, and tells of them."""

    kind: ClassVar[JobKind] = JobKind.CHECK
    spec_class: ClassVar[type[BaseModel]] = CheckSpec

    async def run(self, context: JobContext[Any]) -> JsonObject:
        """See :class:`twinkle.jobs.plans.Plan`."""
        prepared = await _prepared(context)
        return {
            "format": prepared.format.value,
            "rows": prepared.num_rows,
            "num_tokens": prepared.num_tokens,
            "num_trained": prepared.num_trained,
            "longest": prepared.longest,
            "report": prepared.report,
        }

    async def reckon(self, context: JobContext[Any]) -> Work:
        """Nothing of a device: it is what every dry run does with its data."""
        prepared = await _prepared(context)
        found = {"rows": prepared.num_rows, "num_tokens": prepared.num_tokens, "num_trained": prepared.num_trained}
        return Work(base_model=context.spec.model, details=found)


async def _prepared(context: JobContext[Any]) -> PreparedData:
    await context.save(phase="looking at the data")
    return await context.tools.prepare_data(request_of(context.spec, tenant=context.job.tenant))


def request_of(spec: CheckSpec, *, tenant: str) -> DataRequest:
    """What the tools are asked for."""
    is_of_a_hub = spec.data.startswith(HUB_SCHEMES)
    return DataRequest(
        tenant=tenant,
        model=spec.model,
        use=DataUse(spec.use),
        file=None if is_of_a_hub else spec.data,
        dataset=spec.data if is_of_a_hub else None,
        subset=spec.subset,
        split=spec.split,
        preprocessor=spec.preprocessor,
        format=DataFormat(spec.format),
        template=spec.template,
        system=spec.system,
        enable_thinking=spec.enable_thinking,
        max_length=spec.max_length,
        truncation=spec.truncation,
        max_rows=spec.max_rows,
    )
