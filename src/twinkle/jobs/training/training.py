"""A training under way: steps are submitted a few ahead, their results taken in, in order, and what is kept decided."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Any, Protocol

from twinkle.core.job import JobEvent, JobFailed, JsonObject
from twinkle.jobs.context import JobContext
from twinkle.jobs.run import JobRun
from twinkle.jobs.training.data import TrainingData
from twinkle.jobs.training.datums import ReferenceOf
from twinkle.jobs.training.report import checkpoint_event, metrics_of, write_metrics
from twinkle.jobs.training.samples import answer_prompts
from twinkle.jobs.training.standing import BUDGET, CANCEL, CANCELLED, EXPIRY, FINAL, Kept, Standing
from twinkle.jobs.training.steps import Outcome, Steps, outcome_of, refer
from twinkle.wire.bodies.jobs_training import (
    DEFAULT_RANK,
    PreferenceSpec,
    SupervisedSpec,
    TrainingSpec,
    checkpoint_name,
)
from twinkle.wire.paths import ModelId, parse_checkpoint_path

STEPS_AHEAD = 3
"""Submitted beyond the step whose results are waited for, so that the mesh need not wait for the next one."""
_SAVE_EVERY_S = 1.0
_HOUR_S = 3600.0
_MISSING = 404


class StepsOfRun(Protocol):
    """Submits the steps of one run, and takes their results in."""

    async def submit(self, step: int, number: int) -> Any:
        """Hand a step over, its first operation under this number."""
        ...

    async def collect(self, submitted: Any) -> Outcome:
        """Wait for all results of a step."""
        ...


class Training:
    """One attempt at one training."""

    def __init__(
        self,
        context: JobContext[Any],
        spec: TrainingSpec,
        base_model: str,
        data: TrainingData,
        standing: Standing,
    ) -> None:
        self._context = context
        self._spec = spec
        self._base_model = base_model
        self._data = data
        self._standing = standing
        self._events: list[JobEvent] = []
        self._saved_at = context.now()
        self._step_ended_at = context.now()
        self._began_at = context.now()

    async def go(self) -> None:
        """Go through all steps that are left.

        Raises:
            JobFailed: An operation failed by what the job asked.
            OperationFailed: One failed for a reason of the service's: its number is used up.
        """
        standing, patience = self._standing, self._spec.patience
        run = await self._open_run(standing.generation)
        steps = await self._open_steps(run)
        numbers = standing.course.first_numbers(standing.from_step)
        submitted: deque[Any] = deque()
        following = standing.step + 1
        while not standing.has_enough(patience):
            if standing.last_step is None and (reason := self._out_of_time()) is not None:
                await self._end_early(run, reason)
            while following <= standing.end and len(submitted) <= STEPS_AHEAD and not self._must_look(submitted):
                submitted.append(await steps.submit(following, numbers[following - standing.from_step]))
                following += 1
            if not submitted:
                break
            await self._take_in(await steps.collect(submitted.popleft()))
        await self._save()

    async def finish(self) -> JsonObject:
        """Save what was learnt under the name that the job's result has."""
        await self._context.save(self._standing.to_json(), phase="saving")
        final = await self._save_checkpoint(FINAL)
        await self._context.save(self._standing.to_json(), phase="reporting")
        return self._result(final) | {"metrics_file": await write_metrics(self._context)}

    async def leave(self) -> JsonObject | None:
        """Save what a cancelled training has learnt, under a name of its own; ``None`` where nothing has begun.

        What was accepted is applied whatever its owner wants now, so the steps that were begun are gone through first.
        """
        standing = self._standing
        if standing.left is None:
            if standing.last_step is None:
                await self._end_early(await self._open_run(standing.generation), CANCEL)
            if standing.end < 0:
                return None
            await self.go()
            standing.left = await self._save_checkpoint(CANCELLED)
            await self._context.save(standing.to_json(), events=[checkpoint_event(standing.left)])
        return self._result(standing.left)

    async def begin_again(self, why: str) -> None:
        """Go on in a new run, from the last checkpoint there is: the numbers of the present one are used up."""
        standing = self._standing
        standing.begin_again()
        where = "the beginning" if standing.origin is None else f"step {standing.origin.step}"
        message = f"{why}; training goes on from {where} in a new run"
        await self._context.save(standing.to_json(), events=[JobEvent(kind="message", message=message)])

    async def _open_run(self, generation: int) -> JobRun:
        """The run of a generation; those before it are needed for what the model said before it was trained."""
        standing, spec, door = self._standing, self._spec, self._context.door
        is_first = generation == 0 or standing.origin is None
        metadata = {"job": self._context.job.id}
        if not is_first:
            assert standing.origin is not None
            run = await door.load_adapter(generation, standing.origin.path, with_optimizer=True, metadata=metadata)
        elif spec.begins_anew:
            run = await door.create_adapter(
                generation,
                base_model=self._base_model,
                rank=spec.rank or DEFAULT_RANK,
                seed=self._context.seed_of("lora") if spec.lora_seed is None else spec.lora_seed,
                train_attn=spec.train_attn is not False,
                train_mlp=spec.train_mlp is not False,
                train_unembed=spec.train_unembed is not False,
                metadata=metadata,
            )
        else:
            run = await door.load_adapter(generation, spec.model, with_optimizer=spec.with_optimizer, metadata=metadata)
        await outcome_of(run.begun, "the adapter", self._data)
        return run

    async def _open_steps(self, run: JobRun) -> StepsOfRun:
        """What makes the steps; plans of other kinds have others."""
        spec, standing = self._spec, self._standing
        assert isinstance(spec, SupervisedSpec | PreferenceSpec), "others open their own"
        reference = await self._refer()
        return Steps(spec=spec, course=standing.course, data=self._data, run=run, reference=reference)

    async def _refer(self) -> ReferenceOf | None:
        """What the model said before its first step, where the loss compares with that."""
        standing = self._standing
        if not standing.course.with_reference:
            return None
        await self._context.save(standing.to_json(), phase="asking the reference")
        run = await self._open_run(standing.reference_generation)
        return await refer(run, standing.course, self._data)

    def _must_look(self, submitted: deque[Any]) -> bool:
        """Whether what comes next depends on an evaluation that is still out: it may say that it is enough."""
        return bool(self._spec.patience) and any(one.looks for one in submitted)

    def _out_of_time(self) -> str | None:
        """Whether there is no more time for another step, and by whose word."""
        if self._context.has_expired:
            return EXPIRY
        standing, spec = self._standing, self._spec
        # Where a row is not what is trained, its tokens are known when they have been.
        are_used_up = (
            spec.max_train_tokens is not None
            and standing.budget_step is None
            and standing.tally.num_tokens >= spec.max_train_tokens
        )
        are_over = spec.max_hours is not None and self._ran_s() >= spec.max_hours * _HOUR_S
        return BUDGET if are_used_up or are_over else None

    def _ran_s(self) -> float:
        return self._standing.ran_s + self._context.now() - self._began_at

    async def _end_early(self, run: JobRun, reason: str) -> None:
        """Let training end behind the last step that was begun: its numbers are taken."""
        standing = self._standing
        answer = await self._context.door.request("GET", f"/api/native/v1/runs/{run.id}")
        if not answer.is_success:
            raise JobFailed("internal", f"the run could not be looked up: {answer.text}", is_transient=True)
        numbers = standing.course.first_numbers(standing.from_step)
        begun = standing.from_step + bisect_left(numbers, answer.json()["next_seq"]) - 1
        standing.last_step = min(max(standing.step, begun), standing.end)
        standing.ended_by = reason
        await self._context.save(standing.to_json())

    async def _take_in(self, outcome: Outcome) -> None:
        context, standing, spec, step = self._context, self._standing, self._spec, outcome.step
        now = context.now()
        if standing.course.tells(step):
            self._events.append(metrics_of(standing.course, outcome, seconds=now - self._step_ended_at))
        self._step_ended_at = now
        standing.step = step
        standing.tally = outcome.added_to(standing.tally, min_delta=spec.min_delta)
        if outcome.path is not None:
            kept = self._kept(checkpoint_name(step), outcome.path, outcome.sampler_path)
            standing.keep(kept)
            self._events.append(checkpoint_event(kept))
        if standing.course.samples_after(step):
            model = outcome.sampler_path
            assert model is not None, "prompts are answered by weights that were saved"
            self._events += await answer_prompts(context, spec.samples, run=standing.generation, step=step, model=model)
            if outcome.path is None:
                await self._delete(model)
        for kept in standing.superseded(keep_last=spec.keep_last, keep_best=spec.keep_best):
            await self._delete(kept.path)
            await self._delete(kept.sampler_path)
        is_weighty = outcome.eval_figures is not None or outcome.path is not None
        if is_weighty or now - self._saved_at >= _SAVE_EVERY_S:
            await self._save()

    async def _save(self) -> None:
        standing, events = self._standing, self._events
        self._events, self._saved_at = [], self._context.now()
        standing.ran_s, self._began_at = self._ran_s(), self._context.now()
        await self._look_at_times()
        tally = standing.tally
        figures = {"loss": tally.train_loss, "eval_loss": tally.eval_loss, "eval_accuracy": tally.eval_accuracy}
        await self._context.save(
            standing.to_json(),
            phase="training",
            done=max(standing.step, 0),
            total=standing.course.num_steps,
            unit="steps",
            events=events,
            tokens=tally.num_tokens,
            trained_tokens=tally.num_trained,
            queue_s=round(standing.queue_s, 3),
            compute_s=round(standing.compute_s, 3),
            **{name: value for name, value in figures.items() if value is not None},
        )

    async def _look_at_times(self) -> None:
        """Add what the operations have taken that ended since the last look."""
        standing = self._standing
        run = str(ModelId(await self._context.door.session(), standing.generation))
        path = f"/api/native/v1/runs/{run}/times?after={standing.timed_seq}"
        answer = await self._context.door.request("GET", path)
        if not answer.is_success:
            raise JobFailed("internal", f"the run could not be looked up: {answer.text}", is_transient=True)
        told = answer.json()
        standing.timed_seq = told["last_operation"]
        standing.queue_s += told["queue_s"]
        standing.compute_s += told["compute_s"]

    async def _save_checkpoint(self, name: str) -> Kept:
        """Both forms of a checkpoint behind the last step, which the course has no place for."""
        standing = self._standing
        run = await self._open_run(standing.generation)
        number = standing.first_number(standing.step + 1)
        state = await run.save_weights(number, name)
        weights = await run.save_weights_for_sampler(number + 1, name)
        path = (await outcome_of(state, name, self._data)).path
        return self._kept(name, path, (await outcome_of(weights, name, self._data)).path)

    def _kept(self, name: str, path: str, sampler_path: str | None) -> Kept:
        assert sampler_path is not None, "weights with a name have a path"
        standing = self._standing
        return Kept(name=name, step=standing.step, path=path, sampler_path=sampler_path, tally=standing.tally)

    def _result(self, kept: Kept) -> JsonObject:
        standing, tally = self._standing, self._standing.tally
        return {
            "base_model": self._base_model,
            "run": parse_checkpoint_path(kept.path).run_id,
            "checkpoint": kept.path,
            "sampler_checkpoint": kept.sampler_path,
            "step": kept.step,
            "epochs": round(kept.step / standing.course.steps_per_epoch, 3),
            "stopped_early": kept.step < standing.course.num_steps,
            "stopped_by": standing.stopped_by(kept.step, self._spec.patience),
            "loss": tally.train_loss,
            "eval_loss": tally.eval_loss,
            "eval_accuracy": tally.eval_accuracy,
            "best_step": tally.best_step,
            "best_eval_loss": tally.best_loss,
            "tokens": tally.num_tokens,
            "trained_tokens": tally.num_trained,
            "checkpoints": [
                {"name": one.name, "step": one.step, "path": one.path, "sampler_path": one.sampler_path}
                for one in standing.kept
            ],
        }

    async def _delete(self, path: str) -> None:
        """Delete a checkpoint; that it is gone already is what a second time finds."""
        place = parse_checkpoint_path(path)
        url = f"/api/v1/training_runs/{place.run_id}/checkpoints/{place.checkpoint_id}"
        answer = await self._context.door.request("DELETE", url)
        if not answer.is_success and answer.status_code != _MISSING:
            raise JobFailed("internal", f"{path} could not be deleted: {answer.text}", is_transient=True)
