"""Jobs of raw operations: a file's lines are sent in order, so many ahead of their results, which become lines.

An operation's number is that of its line among those of the adapter, so a second runner sends the same ones and is
answered with the first one's outcomes. What is sent never depends on when an answer came: a line goes out behind the
result of the one that is a window before it, and a failed one stops what comes behind that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from pydantic import BaseModel

from twinkle.client.errors import Cancelled, OperationFailed
from twinkle.client.transport import NATIVE_PREFIX
from twinkle.core.errors import InvalidInput, TwinkleError, UserError
from twinkle.core.job import JobCancelled, JobFailed, JobKind, JsonObject
from twinkle.core.operation import OperationKind
from twinkle.jobs.context import JobContext
from twinkle.jobs.estimate import Work
from twinkle.jobs.ops_lines import OpsCheck, OpsCount, datum_of, error_of, outcome_of, result_line
from twinkle.jobs.run import JobRun, JobSampler, Ticket
from twinkle.jobs.training.models import base_model_of, shape_of
from twinkle.wire.bodies.jobs_ops import (
    LoadLine,
    OpsLine,
    OpsSpec,
    OptimStepLine,
    PassLine,
    SampleLine,
    SaveLine,
    parse_line,
)
from twinkle.wire.bodies.native import RunResponse
from twinkle.wire.paths import SCHEME, CheckpointPath

_PART_BYTES = 64 * 2**20
"""Results go into one file up to this size, and what is larger into several."""
_PURPOSE = "user_data"
_CANCELLED = "cancelled"


@dataclass
class _Place:
    """Where the plan stands between two parts: enough to send what comes behind it as it was sent before."""

    num_lines: int = 0
    """Of the file, blank ones too."""
    num_operations: int = 0
    """With results that lie in a part."""
    num_failed: int = 0
    first_error: str = ""
    stop_behind: int = 0
    """The line that was sent last when a failed one was found which stops the rest; 0: none was."""
    seq: int = 0
    """Of the adapter's last operation."""
    num_steps: int = 0
    """Of the optimizer."""
    num_samples: dict[str, int] = field(default_factory=dict)
    """Drawn so far, by source. A source's sampler has the number of its place in here."""
    parts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Sent:
    """An operation under way; one that was refused has no ticket."""

    number: int
    line: OpsLine
    ticket: Ticket[Any] | None
    refusal: TwinkleError | None = None


class OpsPlan:
    """Does a file of operations on one adapter."""

    kind: ClassVar[JobKind] = JobKind.OPS
    spec_class: ClassVar[type[BaseModel]] = OpsSpec

    async def run(self, context: JobContext[OpsSpec]) -> JsonObject:
        """See :class:`twinkle.jobs.plans.Plan`."""
        total = context.saved.get("total")
        if total is None:
            total = await _check(context)
            await context.save({"total": total}, phase="running", done=0, total=total, unit="operations")
        place = _Place(**context.saved.get("place", {}))
        course = _Course(context, await _open_run(context), place, total)
        try:
            await course.run()
            result = await course.end()
        except JobCancelled as error:
            error.result = await course.cut_short()
            raise
        if course.place.stop_behind:
            raise JobFailed("operation_failed", course.place.first_error, field="data", details=result)
        return result

    async def reckon(self, context: JobContext[OpsSpec]) -> Work:
        """Every token that the file names; samples without a limit of tokens have none here either, and are counted."""
        spec, count = context.spec, OpsCount()
        await _check(context, count)
        work = count.work
        begins = OperationKind.LOAD_WEIGHTS if spec.model.startswith(SCHEME) else OperationKind.CREATE_MODEL
        return replace(
            work,
            around={**work.around, begins: work.around.get(begins, 0) + 1},
            base_model=await base_model_of(context, spec.model),
            adapter=await shape_of(context),
        )


async def _check(context: JobContext[OpsSpec], count: OpsCount | None = None) -> int:
    """Look at every line before the first is sent; how many operations there are."""
    await context.save(phase="checking")
    check = OpsCheck(has_base_model=not context.spec.model.startswith(SCHEME))
    async for number, data in _lines(context, 0):
        line = check.look_at(number, data)
        if line is not None and count is not None:
            count.add(line)
    found = check.finish()
    if found.num_wrong:
        raise JobFailed(
            "invalid_data",
            f"{found.num_wrong} of {found.num_lines} lines cannot be done, nothing was; the first: {found.problems[0]}",
            field="data",
            details={"errors": [asdict(problem) for problem in found.problems], "num_errors": found.num_wrong},
        )
    return found.num_lines


async def _open_run(context: JobContext[OpsSpec]) -> JobRun:
    spec = context.spec
    if spec.model.startswith(SCHEME):
        run = await context.door.load_adapter(0, spec.model, with_optimizer=spec.with_optimizer)
    else:
        run = await context.door.create_adapter(
            0,
            base_model=spec.model,
            rank=spec.rank,
            seed=context.seed_of("adapter") if spec.lora_seed is None else spec.lora_seed,
            train_attn=spec.train_attn,
            train_mlp=spec.train_mlp,
            train_unembed=spec.train_unembed,
        )
    await run.begun
    return run


async def _lines(context: JobContext[OpsSpec], start: int) -> AsyncIterator[tuple[int, bytes]]:
    """The lines behind number ``start`` that are not blank, with their numbers from 1."""
    number = start
    async for data in context.files.lines(context.spec.data, start=start):
        number += 1
        if data.strip():
            yield number, data


class _Course:
    """One attempt's way through the file."""

    def __init__(self, context: JobContext[OpsSpec], run: JobRun, place: _Place, total: int) -> None:
        self.place = place
        self._context = context
        self._run = run
        self._total = total
        self._under_way: deque[_Sent] = deque()
        self._results: list[bytes] = []
        self._num_bytes = 0
        self._num_collected = 0
        # What is sent runs ahead of what is put down.
        self._last_line = place.num_lines
        self._seq = place.seq
        self._num_samples = dict(place.num_samples)
        self._samplers: dict[str, JobSampler] = {}

    async def run(self) -> None:
        """Send and collect until the file's end, or the failure behind which nothing is sent."""
        async for number, data in _lines(self._context, self._last_line):
            while len(self._under_way) >= self._context.spec.window:
                await self._collect()
            if self.place.stop_behind and number > self.place.stop_behind:
                break
            await self._send(number, parse_line(data))
        while self._under_way:
            await self._collect()

    async def end(self) -> JsonObject:
        """Put down what there is of results; what the job's owner is told of them."""
        await self._put_down()
        place = self.place
        return {
            "results": place.parts[0] if place.parts else None,
            "files": place.parts,
            "operations": place.num_operations,
            "failed": place.num_failed,
            "run_id": self._run.id,
        }

    async def cut_short(self) -> JsonObject:
        """End in the middle: with the results of all that was ever accepted, and the adapter under a name."""
        accepted = await self._num_accepted()
        async for number, data in _lines(self._context, self._last_line):
            if self._seq >= accepted:
                break
            await self._send(number, parse_line(data))
        while self._under_way:
            await self._take()
        checkpoint = await self._save_cancelled() if self.place.num_steps else None
        result = await self.end()
        return result if checkpoint is None else {**result, "checkpoint": checkpoint}

    async def _collect(self) -> None:
        """Take the oldest result; after a window of them tell how far it is."""
        await self._take()
        self._num_collected += 1
        if self._num_bytes >= _PART_BYTES:
            await self._put_down()
        elif self._num_collected % self._context.spec.window == 0:
            await self._context.save(done=self.place.num_operations, failed=self.place.num_failed)

    async def _take(self) -> None:
        sent = self._under_way.popleft()
        outcome = await _outcome(sent)
        self._results.append(result_line(sent.number, sent.line, outcome))
        self._num_bytes += len(self._results[-1])
        place = self.place
        place.num_lines, place.num_operations = sent.number, place.num_operations + 1
        if isinstance(sent.line, SampleLine):
            source = sent.line.source or ""
            place.num_samples[source] = place.num_samples.get(source, 0) + 1
        elif sent.ticket is not None:
            place.seq += 1
        has_failed = "error" in outcome
        place.num_steps += isinstance(sent.line, OptimStepLine) and not has_failed
        if has_failed:
            place.num_failed += 1
            place.first_error = place.first_error or f"line {sent.number}: {outcome['error']['message']}"
            if self._context.spec.on_error == "stop" and not place.stop_behind:
                place.stop_behind = self._last_line

    async def _put_down(self) -> None:
        if self._results:
            name = f"results-{len(self.place.parts) + 1:04}.jsonl"
            file_id = await self._context.files.write(name, b"".join(self._results), purpose=_PURPOSE)
            self.place.parts.append(file_id)
            self._results, self._num_bytes = [], 0
        saved = {"total": self._total, "place": asdict(self.place)}
        await self._context.save(saved, done=self.place.num_operations, failed=self.place.num_failed)

    async def _send(self, number: int, line: OpsLine) -> None:
        self._last_line = number
        try:
            if isinstance(line, SampleLine):
                ticket = await self._sample(number, line)
            else:
                ticket = await self._submit(self._seq + 1, line)
                self._seq += 1
        except UserError as error:
            self._under_way.append(_Sent(number, line, None, error))
            if not isinstance(line, SampleLine) and not self.place.stop_behind:
                # Its number is missing in the adapter's order now: nothing behind it would be done.
                self.place.stop_behind = number
        else:
            self._under_way.append(_Sent(number, line, ticket))

    async def _submit(self, seq: int, line: OpsLine) -> Ticket[Any]:
        run = self._run
        match line:
            case PassLine():
                send = run.forward_backward if line.op == "forward_backward" else run.forward
                return await send(seq, [datum_of(one) for one in line.data], line.loss_fn, line.loss_fn_config)
            case OptimStepLine():
                return await run.optim_step(seq, line.adam_params)
            case SaveLine(op="save_weights"):
                return await run.save_weights(seq, line.name, ttl_s=line.ttl_seconds)
            case SaveLine():
                return await run.save_weights_for_sampler(seq, line.name, ttl_s=line.ttl_seconds)
            case LoadLine():
                path = line.path if line.path.startswith(SCHEME) else str(CheckpointPath(run.id, "weights", line.path))
                return await run.load_weights(seq, path, with_optimizer=line.with_optimizer)
        raise InvalidInput("op", f"{line.op!r} is no operation of an adapter")

    async def _sample(self, number: int, line: SampleLine) -> Ticket[Any]:
        source = line.source or ""
        seq = self._num_samples.get(source, 0)
        self._num_samples[source] = seq + 1
        params = line.sampling_params
        if params.seed is None:
            params = params.model_copy(update={"seed": self._context.seed_of("line", number)})
        sampler = await self._sampler(source)
        return await sampler.sample(
            seq,
            line.prompt,
            params=params,
            num_samples=line.num_samples,
            prompt_logprobs=line.prompt_logprobs,
            topk_prompt_logprobs=line.topk_prompt_logprobs,
            topk_sample_logprobs=line.topk_sample_logprobs,
        )

    async def _sampler(self, source: str) -> JobSampler:
        """The sampler of a source; a save further up is waited for, since nothing is there to sample from before."""
        if source not in self._samplers:
            for sent in self._under_way:
                if _makes(sent.line, source):
                    await _outcome(sent)
            index = list(self._num_samples).index(source)
            path = source if source.startswith(SCHEME) else str(CheckpointPath(self._run.id, "sampler_weights", source))
            self._samplers[source] = await self._context.door.sampler(
                index,
                base_model=None if source else self._context.spec.model,
                path=path if source else None,
            )
        return self._samplers[source]

    async def _num_accepted(self) -> int:
        """The number of the adapter's last operation that the journal has: an attempt before this one sent more."""
        answer = await self._context.door.request("GET", f"{NATIVE_PREFIX}/runs/{self._run.id}")
        if not answer.is_success:
            raise JobFailed("internal", f"the adapter could not be looked at: {answer.status_code}", is_transient=True)
        return RunResponse.model_validate_json(answer.content).next_seq - 1

    async def _save_cancelled(self) -> str | None:
        """A checkpoint behind all that was done; none where that fails, since the job ends in any case."""
        self._seq += 1
        self.place.seq = self._seq
        try:
            saved = await (await self._run.save_weights(self._seq, _CANCELLED, overwrite=True))
        except (OperationFailed, UserError) as error:
            await self._context.event("message", f"no checkpoint could be saved: {error.message}")
            return None
        await self._context.event("checkpoint", f"saved as {_CANCELLED}", path=saved.path)
        return saved.path


def _makes(line: OpsLine, source: str) -> bool:
    return isinstance(line, SaveLine) and line.op == "save_weights_for_sampler" and line.name == source


async def _outcome(sent: _Sent) -> JsonObject:
    """What came of an operation. What may pass, such as a database that is away, is raised: the job is tried again."""
    if sent.ticket is None:
        assert sent.refusal is not None, "what was not accepted was refused"
        return error_of(sent.refusal.code, sent.refusal.message)
    try:
        return outcome_of(await sent.ticket)
    except OperationFailed as error:
        return error_of(error.code, error.message.removeprefix(f"{error.request_id}: "))
    except Cancelled as error:
        return error_of(error.code, "was cancelled")
