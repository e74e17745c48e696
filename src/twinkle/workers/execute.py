"""Claimed operations into outcomes: adapters brought to the right state, requests read, the engine called.

What waits for the object store, or replays, lets others go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Generic

from twinkle.core.clock import Clock
from twinkle.core.errors import CallFailed, UserError
from twinkle.core.operation import Claim, OperationKind, Payload
from twinkle.core.process.crash import crash_point
from twinkle.scheduler.fairness import PassRate, charge_of_time, charge_of_tokens
from twinkle.storage.blobs import BlobStore
from twinkle.storage.journal.turns import Followed
from twinkle.wire.bodies.training import OptimStepRequest
from twinkle.wire.calls import is_call
from twinkle.wire.training_result import ForwardBackwardResult
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.endings import Endings, Execution, of_a_batch, refuse_rejected
from twinkle.workers.engine import CallAnswer, Engine, Pass, PassAnswer, State
from twinkle.workers.requests import ReadAhead, Requests
from twinkle.workers.sampling.sampling import CacheGroups
from twinkle.workers.singles import Singles
from twinkle.workers.steps import Job, Steps, Transfers, timed, with_turns
from twinkle.workers.under_way import PASSES, Batch, Lanes, Operation

_SLICE_S = 0.1
_GATHER_S = 0.01

_WITHOUT_STATE = {
    OperationKind.CREATE_MODEL,
    OperationKind.UNLOAD_MODEL,
    OperationKind.LOAD_WEIGHTS,
    OperationKind.FORK,
    OperationKind.REWIND,
}
"""What begins anew or ends, whatever the adapter was before."""


class Executor(Generic[State]):
    """Executes operations. Nothing it does is visible to anyone before the outcomes are committed."""

    def __init__(
        self,
        *,
        engine: Engine[State],
        residents: Residents[State],
        blobs: BlobStore,
        clock: Clock,
        endings: Endings,
        requests: Requests,
        singles: Singles[State],
        rate: PassRate,
        transfers: Transfers,
        cache_groups: CacheGroups,
        max_adapters: int,
        max_tokens: int,
    ) -> None:
        self._engine = engine
        self._residents = residents
        self._blobs = blobs
        self._clock = clock
        self._endings = endings
        self._requests = requests
        self._singles = singles
        self._rate = rate
        self._transfers = transfers
        self._cache_groups = cache_groups
        self._max_adapters = max_adapters
        self._max_tokens = max_tokens
        self._lanes: Lanes[State] = Lanes()
        self._operations: list[Operation[State]] = []
        self._ready: list[tuple[Operation[State], Pass[State]]] = []
        self._batches: list[Batch[State]] = []

    @property
    def lanes(self) -> set[str]:
        """The adapters whose operations are under way: their next ones wait."""
        return self._lanes.names

    @property
    def under_way(self) -> list[Claim]:
        """What has been begun and has not ended."""
        return [operation.claim for operation in self._lanes]

    @property
    def passing(self) -> list[Claim]:
        """What is to go through the model, or is half through it."""
        batched = [one for batch in self._batches for one in batch.ready]
        return [operation.claim for operation, _ in (*self._ready, *batched)]

    @property
    def max_suspicions(self) -> int:
        """How suspect the most suspect of them is."""
        return max((claim.suspicions for claim in self.under_way), default=0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._lanes

    @property
    def is_half_through(self) -> bool:
        """Whether passes are between two slices."""
        return bool(self._batches)

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to do now, and nothing to wait for first."""
        is_passing = bool(self._ready or self._batches)
        return is_passing or any(operation.job.can_go_on for operation in self._operations)

    @property
    def _has_steps_before_passes(self) -> bool:
        """Whether passes that go with those that are ready wait for their adapters' steps, which can be made now."""
        waiting = {each.claim.lane for each in self._operations if each.claim.kind in PASSES and not each.is_done}
        return any(
            each.claim.kind is OperationKind.OPTIM_STEP and each.claim.lane in waiting and each.job.can_go_on
            for each in self._operations
        )

    def followed(self) -> list[Followed]:
        """The adapters whose operations are under way, and how many of their next ones may be claimed ahead."""
        return self._lanes.followed(self._residents.room_ahead)

    def begin(self, claims: list[Claim], bodies: Mapping[str, ReadAhead] | None = None) -> None:
        """Take operations in. Each ends as an outcome, as postponed or returned; one never harms another.

        Args:
            claims: Of each lane the next ones, behind those that are under way.
            bodies: The requests that were read already, by their futures.
        """
        now = self._clock.now()
        for claim in claims:
            operation: Operation[State] = Operation(claim, now)
            operation.body = (bodies or {}).get(claim.request_id)
            self._lanes.add(operation)
            steps = self._prepare_pass(operation) if claim.kind in PASSES else self._run_single(operation)
            operation.job = Job(steps)
            self._operations.append(operation)

    def go_on(self, execution: Execution) -> None:
        """Do for a while what can be done now: steps of operations in turn, then a slice of passes together.

        Two batches have a slice: the one that has had fewest, so that small ones overtake large ones, and the oldest,
        so that none waits for ever.
        """
        self._take_steps(execution)
        if self._ready and not self._has_steps_before_passes:
            self._batches.append(self._next_batch())
        if not self._batches:
            return
        oldest = self._batches[0]
        newest = min(reversed(self._batches), key=lambda batch: batch.num_slices)
        for batch in dict.fromkeys((newest, oldest)):
            self._run_slice(batch, execution)

    def drop(self) -> list[Claim]:
        """Stop everything under way; what goes back to the journal. Its adapters may be ahead of that."""
        dropped = self.under_way
        for batch in self._batches:
            batch.job.drop()
        self._batches.clear()
        self._operations.clear()
        self._ready.clear()
        self._lanes.clear()
        for claim in dropped:
            self._residents.forget(claim.lane)
        return dropped

    def return_lane(self, lane: str, execution: Execution) -> None:
        """Give back what is under way in a lane, whose adapter is not what it was to follow on.

        What is half through the model goes back when it is through.
        """
        batched = {operation for batch in self._batches for operation, _ in batch.ready}
        self._ready = [one for one in self._ready if one[0].claim.lane != lane]
        for operation in self._lanes.of(lane):
            if operation in batched:
                operation.is_unwanted = True
                continue
            if operation in self._operations:
                self._operations.remove(operation)
            if not operation.job.has_ended:
                operation.job.drop()
            self._lanes.remove(operation)
            execution.returned.append(operation.claim)

    def _take_steps(self, execution: Execution) -> None:
        """Let operations go on one after the other until the time is over, or all of them wait for something."""
        ends_at = self._clock.now() + _SLICE_S
        gathers_until = time.monotonic() + _GATHER_S
        while True:
            going = next((operation for operation in self._operations if operation.job.can_go_on), None)
            if going is None:
                if not self._awaits_passes(gathers_until):
                    return
                continue
            self._operations.remove(going)
            going.job.go_on()
            if going.job.has_ended:
                self._end(going, execution)
            else:
                self._operations.append(going)
            if self._clock.now() >= ends_at:
                return

    def _awaits_passes(self, until: float) -> bool:
        """Whether, for a moment, passes are waited for that were claimed together with those that are ready."""
        left_s = until - time.monotonic()
        if not self._ready or left_s <= 0:
            return False
        if not any(each.claim.kind in PASSES and each.may_begin and not each.is_done for each in self._operations):
            return False
        self._transfers.changed.clear()
        if not any(operation.job.can_go_on for operation in self._operations):
            self._transfers.changed.wait(left_s)
        self._transfers.changed.set()
        return True

    def _end(self, operation: Operation[State], execution: Execution) -> None:
        """Steps of it have ended: it is ready for the model, or has come to its end, as then others of its lane may."""
        if not operation.has_ended:
            assert isinstance(operation.job.result, Pass)
            self._ready.append((operation, operation.job.result))
            return
        lane = operation.claim.lane
        while (ended := self._lanes.take_ended(lane)) is not None:
            self._record(ended, execution)

    def _record(self, operation: Operation[State], execution: Execution) -> None:
        claim, job = operation.claim, operation.job
        execution.begun[claim.request_id] = (claim, operation.started_at)
        if job.error is not None:
            self._end_badly(execution, claim, job.error)
            return
        result = job.result
        assert not isinstance(result, Pass)
        execution.records[claim.request_id] = operation.records
        if claim.kind in PASSES:
            charge = charge_of_tokens(operation.passed_tokens)
        else:
            charge = charge_of_time(
                operation.device_s, tokens_per_s=self._rate.tokens_per_s, num_replayed=operation.num_tokens
            )
        self._endings.succeed(
            execution,
            claim,
            result,
            device_s=operation.device_s,
            num_tokens=operation.num_tokens,
            charge=charge,
            clears_gradients=operation.clears_gradients,
        )

    # -- forward and forward_backward ---------------------------------------------------------------------------------

    def _next_batch(self) -> Batch[State]:
        """Some of what is ready, as much as goes together."""
        ready, num_tokens = [self._ready.pop(0)], 0
        while self._ready and len(ready) < self._max_adapters:
            (last, its_pass), (following, its) = ready[-1], self._ready[0]
            num_tokens += last.expected_tokens(its_pass)
            if num_tokens + following.expected_tokens(its) > self._max_tokens:
                break
            ready.append(self._ready.pop(0))
        return Batch(ready, Job(timed(self._answer([item for _, item in ready]), self._clock)))

    def _answer(self, passes: list[Pass[State]]) -> Steps[Sequence[PassAnswer]]:
        try:
            return (yield from with_turns(self._engine.start_passes(passes)))
        except Exception as error:  # noqa: BLE001 - the border: the device failed, so every pass of the batch did
            return [of_a_batch(error, len(passes))] * len(passes)

    def _run_slice(self, batch: Batch[State], execution: Execution) -> None:
        """Go on with a batch until it ends or has had its time; where it ends, so do its operations, or nearly."""
        ends_at = self._clock.now() + _SLICE_S
        batch.num_slices += 1
        while not batch.job.has_ended:
            batch.job.go_on()
            if self._clock.now() >= ends_at:
                break
        if not batch.job.has_ended:
            return
        self._batches.remove(batch)
        answers, elapsed_s = batch.job.result
        for (operation, item), answer in zip(batch.ready, answers, strict=True):
            operation.note(item, answer)
        total_tokens = max(sum(operation.passed_tokens for operation, _ in batch.ready), 1)
        self._rate.note(total_tokens, elapsed_s)
        for (operation, _), answer in zip(batch.ready, answers, strict=True):
            if operation.is_unwanted:
                self._lanes.remove(operation)
                execution.returned.append(operation.claim)
                continue
            operation.device_s = elapsed_s * operation.passed_tokens / total_tokens
            if not isinstance(answer, Exception):
                self._note_done(operation)
            operation.job = Job(self._finish_pass(operation.claim, answer))
            operation.job.go_on()
            if operation.job.has_ended:
                self._end(operation, execution)
            else:
                self._operations.append(operation)

    def _prepare_pass(self, operation: Operation[State]) -> Steps[Pass[State] | Payload | ForwardBackwardResult]:
        claim, body = operation.claim, operation.body
        if body is None:
            body = yield from self._requests.read(claim)
        yield from self._in_turn(operation)
        if isinstance(body, Exception):
            raise body
        assert not isinstance(body, OptimStepRequest), "that is no pass's"
        state = yield from self._residents.state_before(claim.lane, claim.seq)
        return Pass(state=state, body=body, cache_group=self._cache_groups.of(claim.tenant))

    def _in_turn(self, operation: Operation[State]) -> Steps[None]:
        """Wait until the adapter in memory is as the operation is to find it."""
        if operation.previous is None:
            return
        if not operation.may_begin:
            yield lambda: operation.may_begin
        if operation.previous is not None:
            crash_point("worker.overtaking")

    def _note_done(self, operation: Operation[State]) -> None:
        """What follows in its lane may be begun, though its result is neither stored nor committed."""
        operation.is_done = True
        self._residents.note_done(operation.claim.lane, operation.claim.seq)

    def _finish_pass(self, claim: Claim, answer: PassAnswer) -> Steps[Pass[State] | Payload | ForwardBackwardResult]:
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, CallAnswer):
            return (yield from self._endings.store(claim, answer.body))
        return (yield from self._endings.store_pass(claim, answer))

    # -- everything else ----------------------------------------------------------------------------------------------

    def _run_single(self, operation: Operation[State]) -> Steps[Pass[State] | Payload | ForwardBackwardResult]:
        claim = operation.claim
        refuse_rejected(claim)
        payload = yield from self._transfers.read(self._blobs, claim.payload)
        yield from self._in_turn(operation)
        if claim.kind not in _WITHOUT_STATE or is_call(payload):
            # If it has to be rebuilt, that is the service's doing and not this operation's.
            yield from self._residents.state_before(claim.lane, claim.seq)
        answering = self._singles.answer(claim, payload, operation.records, operation.body)
        answered, operation.device_s = yield from timed(answering, self._clock)
        operation.num_tokens = answered.num_replayed_tokens
        operation.clears_gradients = answered.clears_gradients
        if claim.kind is OperationKind.OPTIM_STEP:
            self._note_done(operation)
        return (yield from self._endings.store(claim, answered.result))

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end_badly(self, execution: Execution, claim: Claim, error: Exception) -> None:
        """Fail it or postpone it. Unless its user is to blame the adapter is rebuilt: it may have been touched."""
        self._endings.fail(execution, claim, error)
        if isinstance(error, UserError) and not isinstance(error, CallFailed):
            self._residents.note_failure(claim.lane)
        else:
            self._residents.forget(claim.lane)
        self.return_lane(claim.lane, execution)
