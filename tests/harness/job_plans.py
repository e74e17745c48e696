"""Small plans for the tests of what runs them: real operations through the API, and every way for a plan to end."""

from __future__ import annotations

import json
from typing import ClassVar

from pydantic import BaseModel

from harness.fake_worker import BASE_MODEL
from twinkle.client.datum import next_token_datum
from twinkle.core.job import JobCancelled, JobEvent, JobFailed, JobKind, JsonObject
from twinkle.jobs.context import JobContext
from twinkle.jobs.plans import PlanClasses
from twinkle.wire.bodies.training import AdamParams


class TrainSpec(BaseModel, extra="forbid", frozen=True):
    """How many steps, on which model."""

    steps: int
    base_model: str = BASE_MODEL


class TrainPlan:
    """A few steps on data drawn from the job's seed, what they gave as a file, a checkpoint at the end."""

    kind: ClassVar[JobKind] = JobKind.SUPERVISED
    spec_class: ClassVar[type[BaseModel]] = TrainSpec

    async def run(self, context: JobContext[TrainSpec]) -> JsonObject:
        spec = context.spec
        run = await context.door.create_adapter(0, base_model=spec.base_model, rank=4, seed=context.seed_of("adapter"))
        lines: list[str] = list(context.saved.get("lines", []))
        try:
            for step in range(len(lines), spec.steps):
                start = context.seed_of("data", step) % 500
                data = [next_token_datum(list(range(start, start + 8)))]
                loss = await run.forward_backward(2 * step + 1, data)
                optimised = await run.optim_step(2 * step + 2, AdamParams(learning_rate=1e-3))
                lines.append(json.dumps({"loss": (await loss).metrics, "optim": (await optimised).metrics}))
                event = JobEvent(kind="metrics", message=f"step {step}", data={"step": step})
                await context.save(
                    {"lines": lines}, phase="training", done=step + 1, total=spec.steps, unit="steps", events=[event]
                )
        except JobCancelled as cancelled:
            saved = await (await run.save_weights(2 * len(lines) + 1, "cancelled"))
            cancelled.result = {"checkpoint": saved.path}
            raise
        saved = await (await run.save_weights(2 * spec.steps + 1, "final"))
        file_id = await context.files.write("metrics", "\n".join(lines).encode(), purpose="results")
        return {"checkpoint": saved.path, "file": file_id}


class FailSpec(BaseModel, extra="forbid", frozen=True):
    """How it fails: in an unforeseen way, for a reason that may pass, or for good; from the first attempt on or not."""

    how: str
    succeeds_at: int = 10**9


class FailPlan:
    """Fails."""

    kind: ClassVar[JobKind] = JobKind.CHECK
    spec_class: ClassVar[type[BaseModel]] = FailSpec

    async def run(self, context: JobContext[FailSpec]) -> JsonObject:
        if context.job.attempt >= context.spec.succeeds_at:
            return {"attempt": context.job.attempt}
        if context.spec.how == "rest":
            if context.saved:
                return {"rested": True}
            await context.save({"rested": True})
            raise context.rest(0.0)
        if context.spec.how == "unforeseen":
            raise RuntimeError("secret words")
        raise JobFailed(
            "asked_to", "as it was asked to", is_transient=context.spec.how == "transient", details={"errors": [1]}
        )


TEST_PLANS: PlanClasses = {plan.kind: plan for plan in (TrainPlan, FailPlan)}
