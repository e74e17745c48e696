"""Claimed operations into outcomes: adapters brought to the right state, requests read, the engine called.

What waits for the object store, or replays, lets others go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from twinkle.core.adapter import CheckpointKind
from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, InvalidInput, NotFound, UserError, WindowFailed
from twinkle.core.operation import Claim, OperationKind, Payload
from twinkle.scheduler.charges import PassRate, charge_of_time, charge_of_tokens
from twinkle.storage.adapters.ephemeral import NewEphemeralWeights
from twinkle.storage.blobs import BlobStore
from twinkle.storage.checkpoints.catalog import Catalog
from twinkle.storage.journal.records import NewSamplingSession, Records
from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.bodies.runs import BranchResponse
from twinkle.wire.bodies.training import (
    CreateModelResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelResponse,
)
from twinkle.wire.paths import SamplingSessionId
from twinkle.wire.training import ForwardBackwardResult, encode_forward_backward_output
from twinkle.workers.artifacts import Artifacts
from twinkle.workers.endings import Endings, Execution, refuse_rejected
from twinkle.workers.engine import Engine, Pass, State
from twinkle.workers.loss_graphs import LossGraphs
from twinkle.workers.replay import Replay
from twinkle.workers.requests import (
    read_branch,
    read_create,
    read_load,
    read_optim_step,
    read_pass,
    read_save,
    read_save_external,
    read_save_for_sampler,
)
from twinkle.workers.residents import Residents
from twinkle.workers.sampler_weights import SamplerWeights
from twinkle.workers.snapshots import Snapshots
from twinkle.workers.steps import Job, Steps, Transfers

_PASSES = {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD}
_SLICE_S = 0.1
_GATHER_S = 0.01


@dataclass(eq=False)
class _Operation(Generic[State]):
    """An operation under way: the steps of the whole, or those before or after the pass it shares with others."""

    claim: Claim
    started_at: float
    records: Records = field(default_factory=Records)
    job: Job[Pass[State] | Payload] = field(init=False)
    device_s: float = 0.0
    num_tokens: int = 0


_WITHOUT_STATE = {
    OperationKind.CREATE_MODEL,
    OperationKind.UNLOAD_MODEL,
    OperationKind.LOAD_WEIGHTS,
    OperationKind.FORK,
    OperationKind.REWIND,
}
"""What begins anew or ends, whatever the adapter was before."""


@dataclass(frozen=True)
class _Answered:
    """The response to an operation, and what it had to compute once more for it."""

    response: ResponseBody
    num_replayed_tokens: int = 0


class Executor(Generic[State]):
    """Executes operations. Nothing it does is visible to anyone before the outcomes are committed."""

    def __init__(
        self,
        *,
        engine: Engine[State],
        residents: Residents[State],
        artifacts: Artifacts[State],
        catalog: Catalog,
        blobs: BlobStore,
        clock: Clock,
        endings: Endings,
        replay: Replay[State],
        snapshots: Snapshots,
        loss_graphs: LossGraphs,
        sampler_weights: SamplerWeights[State],
        max_ephemeral: int,
        transfers: Transfers,
        max_adapters: int,
        max_tokens: int,
    ) -> None:
        self._engine = engine
        self._residents = residents
        self._artifacts = artifacts
        self._catalog = catalog
        self._blobs = blobs
        self._clock = clock
        self._endings = endings
        self._replay = replay
        self._snapshots = snapshots
        self._loss_graphs = loss_graphs
        self._sampler_weights = sampler_weights
        self._max_ephemeral = max_ephemeral
        self._rate = PassRate()
        self._transfers = transfers
        self._max_adapters = max_adapters
        self._max_tokens = max_tokens
        self._operations: list[_Operation[State]] = []
        self._ready: list[tuple[_Operation[State], Pass[State]]] = []
        self._step_began_at = 0.0

    @property
    def lanes(self) -> set[str]:
        """The adapters whose operations are under way: their next ones wait."""
        return {claim.lane for claim in self.under_way}

    @property
    def under_way(self) -> list[Claim]:
        """What has been begun and has not ended."""
        return [operation.claim for operation in self._operations] + [operation.claim for operation, _ in self._ready]

    @property
    def max_suspicions(self) -> int:
        """How suspect the most suspect of them is."""
        return max((claim.suspicions for claim in self.under_way), default=0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._operations and not self._ready

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to do now, and nothing to wait for first."""
        return bool(self._ready) or any(operation.job.can_go_on for operation in self._operations)

    def begin(self, claims: list[Claim]) -> None:
        """Take operations in. Each ends as an outcome or as postponed; one never harms another."""
        now = self._clock.now()
        for claim in claims:
            operation: _Operation[State] = _Operation(claim, now)
            steps = self._prepare_pass(claim) if claim.kind in _PASSES else self._run_single(operation)
            operation.job = Job(steps)
            self._operations.append(operation)

    def go_on(self, execution: Execution) -> None:
        """Do for a while what can be done now: steps of operations in turn, then passes together."""
        self._take_steps(execution)
        if not self._ready:
            return
        batch, num_tokens = [self._ready.pop(0)], 0
        while self._ready and len(batch) < self._max_adapters:
            num_tokens += _num_tokens(batch[-1][1])
            if num_tokens + _num_tokens(self._ready[0][1]) > self._max_tokens:
                break
            batch.append(self._ready.pop(0))
        self._run_passes(batch, execution)

    def drop(self) -> list[Claim]:
        """Stop everything under way; what goes back to the journal. Its adapters may be ahead of that."""
        dropped = self.under_way
        self._operations.clear()
        self._ready.clear()
        for claim in dropped:
            self._residents.forget(claim.lane)
        return dropped

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
            self._step_began_at = self._clock.now()
            going.job.go_on()
            going.device_s += self._clock.now() - self._step_began_at
            if going.job.has_ended:
                self._end(going, execution)
            else:
                self._operations.append(going)
            if self._clock.now() >= ends_at:
                return

    def _awaits_passes(self, until: float) -> bool:
        """Whether, for a moment, passes are waited for that were claimed together with those that are ready."""
        left_s = until - time.monotonic()
        if not self._ready or left_s <= 0 or not any(each.claim.kind in _PASSES for each in self._operations):
            return False
        self._transfers.changed.clear()
        if not any(operation.job.can_go_on for operation in self._operations):
            self._transfers.changed.wait(left_s)
        self._transfers.changed.set()
        return True

    def _end(self, operation: _Operation[State], execution: Execution) -> None:
        claim, job = operation.claim, operation.job
        if job.error is None and isinstance(job.result, Pass):
            self._ready.append((operation, job.result))
            return
        execution.begun[claim.request_id] = (claim, operation.started_at)
        if job.error is not None:
            self._end_badly(execution, claim, job.error)
            return
        assert isinstance(job.result, Payload)
        execution.records[claim.request_id] = operation.records
        if claim.kind in _PASSES:
            charge = charge_of_tokens(operation.num_tokens)
        else:
            charge = charge_of_time(
                operation.device_s, tokens_per_s=self._rate.tokens_per_s, num_replayed=operation.num_tokens
            )
        self._endings.succeed(
            execution,
            claim,
            job.result,
            device_s=operation.device_s,
            num_tokens=operation.num_tokens,
            charge=charge,
        )

    # -- forward and forward_backward ---------------------------------------------------------------------------------

    def _run_passes(self, ready: list[tuple[_Operation[State], Pass[State]]], execution: Execution) -> None:
        started = self._clock.now()
        answers = self._answer_passes([item for _, item in ready])
        elapsed_s = self._clock.now() - started
        total_tokens = max(sum(_num_tokens(item) for _, item in ready), 1)
        self._rate.note(total_tokens, elapsed_s)
        for (operation, item), answer in zip(ready, answers, strict=True):
            operation.num_tokens = _num_tokens(item)
            operation.device_s += elapsed_s * operation.num_tokens / total_tokens
            operation.job = Job(self._finish_pass(operation.claim, answer))
            operation.job.go_on()
            if operation.job.has_ended:
                self._end(operation, execution)
            else:
                self._operations.append(operation)

    def _answer_passes(self, passes: list[Pass[State]]) -> Sequence[ForwardBackwardResult | Exception]:
        try:
            return self._engine.run_passes(passes)
        except Exception as error:  # noqa: BLE001 - the border: the device failed, so every pass of the batch did
            return [error] * len(passes)

    def _prepare_pass(self, claim: Claim) -> Steps[Pass[State] | Payload]:
        refuse_rejected(claim)
        payload = yield from self._transfers.read(self._blobs, claim.payload)
        body = self._loss_graphs.complete(claim.lane, read_pass(payload))
        state = yield from self._residents.state_before(claim.lane, claim.seq)
        return Pass(state=state, body=body)

    def _finish_pass(self, claim: Claim, answer: ForwardBackwardResult | Exception) -> Steps[Pass[State] | Payload]:
        if isinstance(answer, Exception):
            raise answer
        result = encode_forward_backward_output(answer.logprobs, answer.metrics, answer.elementwise_loss)
        return (yield from self._endings.store(claim, result))

    # -- everything else ----------------------------------------------------------------------------------------------

    def _run_single(self, operation: _Operation[State]) -> Steps[Pass[State] | Payload]:
        claim = operation.claim
        refuse_rejected(claim)
        payload = yield from self._transfers.read(self._blobs, claim.payload)
        if claim.kind not in _WITHOUT_STATE:
            # If it has to be rebuilt, that is the service's doing and not this operation's.
            yield from self._residents.state_before(claim.lane, claim.seq)
            operation.device_s = self._step_began_at - self._clock.now()
        answered = yield from self._answer(claim, payload, operation.records)
        operation.num_tokens = answered.num_replayed_tokens
        return (yield from self._endings.store(claim, answered.response.to_json()))

    def _answer(self, claim: Claim, payload: bytes, records: Records) -> Steps[_Answered]:
        if claim.kind in {OperationKind.FORK, OperationKind.REWIND}:
            return (yield from self._take_up(claim, payload, records))
        return _Answered((yield from self._respond(claim, payload, records)))

    def _respond(self, claim: Claim, payload: bytes, records: Records) -> Steps[ResponseBody]:
        match claim.kind:
            case OperationKind.CREATE_MODEL:
                self._residents.put(claim.lane, claim.seq, self._engine.create(read_create(payload)))
                return CreateModelResponse(model_id=claim.lane)
            case OperationKind.OPTIM_STEP:
                return (yield from self._optim_step(claim, payload))
            case OperationKind.SAVE_WEIGHTS:
                return (yield from self._save(claim, payload, records))
            case OperationKind.SAVE_WEIGHTS_FOR_SAMPLER:
                return (yield from self._save_for_sampler(claim, payload, records))
            case OperationKind.SAVE_WEIGHTS_EXTERNAL:
                return (yield from self._save_external(claim, payload, records))
            case OperationKind.LOAD_WEIGHTS:
                return (yield from self._load(claim, payload, records))
            case OperationKind.UNLOAD_MODEL:
                self._residents.forget(claim.lane)
                return UnloadModelResponse(model_id=claim.lane)
            case _:
                raise InvalidInput("kind", f"{claim.kind} is not something this worker executes")

    def _optim_step(self, claim: Claim, payload: bytes) -> Steps[OptimStepResponse]:
        request = read_optim_step(payload)
        if request.adam_params is None:
            raise InvalidInput("optimizer_params", "only AdamW is offered here; send adam_params")
        state = yield from self._residents.state_before(claim.lane, claim.seq)
        if claim.failed_window_seq is not None:
            self._engine.clear_gradients(state)
            raise WindowFailed(
                f"optim_step {claim.seq} was not applied: operation {claim.failed_window_seq} of its accumulation"
                " window failed, so the gradients would have been incomplete; they were cleared. Send the batch again."
            )
        return OptimStepResponse(metrics=self._engine.optim_step(state, request.adam_params))

    def _save(self, claim: Claim, payload: bytes, records: Records) -> Steps[SaveWeightsResponse]:
        request = read_save(payload)
        state = yield from self._residents.state_before(claim.lane, claim.seq)
        checkpoint = yield from self._artifacts.save(
            state,
            adapter=claim.lane,
            seq=claim.seq,
            kind=CheckpointKind.TRAINING,
            name=request.path or f"{claim.seq:06d}",
            overwrite=request.overwrite,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        records.checkpoints.append(checkpoint)
        return SaveWeightsResponse(path=checkpoint.path)

    def _save_for_sampler(self, claim: Claim, payload: bytes, records: Records) -> Steps[SaveWeightsForSamplerResponse]:
        request = read_save_for_sampler(payload)
        if request.path is None:
            return (yield from self._open_sampler(claim, request, records))
        state = yield from self._residents.state_before(claim.lane, claim.seq)
        checkpoint = yield from self._artifacts.save(
            state,
            adapter=claim.lane,
            seq=claim.seq,
            kind=CheckpointKind.SAMPLER,
            name=request.path,
            overwrite=False,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        records.checkpoints.append(checkpoint)
        return SaveWeightsForSamplerResponse(path=checkpoint.path)

    def _open_sampler(
        self, claim: Claim, request: SaveWeightsForSamplerRequest, records: Records
    ) -> Steps[SaveWeightsForSamplerResponse]:
        """A sampling session on weights without a name: a copy in memory, and a promise to make it anew."""
        assert request.sampling_session_seq_id is not None, "the body names one of the two"
        owner = self._catalog.adapter(claim.lane)
        session_id = str(SamplingSessionId(owner.session, request.sampling_session_seq_id))
        self._refuse_taken(session_id)
        state = yield from self._residents.state_before(claim.lane, claim.seq)
        now = self._clock.now()
        weights = NewEphemeralWeights(
            adapter=claim.lane,
            seq=claim.seq,
            size_bytes=self._sampler_weights.keep(session_id, claim.lane, claim.seq, state),
            opened_at=now,
            expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
            max_open=self._max_ephemeral,
        )
        records.sampling_sessions.append(
            NewSamplingSession(
                id=session_id,
                tenant=claim.tenant,
                session=owner.session,
                mesh=owner.mesh,
                base_model=owner.config.base_model,
                weights=weights,
                like=claim.lane,
            )
        )
        return SaveWeightsForSamplerResponse(sampling_session_id=session_id)

    def _refuse_taken(self, sampling_session: str) -> None:
        try:
            self._catalog.sampling_session(sampling_session)
        except NotFound:
            return
        raise Conflict(f"sampling session {sampling_session} already samples from something else; use the next number")

    def _save_external(self, claim: Claim, payload: bytes, records: Records) -> Steps[SaveWeightsExternalResponse]:
        request = read_save_external(payload)
        state = yield from self._residents.state_before(claim.lane, claim.seq)
        checkpoint = yield from self._artifacts.save(
            state,
            adapter=claim.lane,
            seq=claim.seq,
            kind=CheckpointKind.EXTERNAL,
            name=request.path,
            overwrite=False,
            ttl_s=request.ttl_seconds,
            user_metadata=None,
            age_recipients=request.age_encryption_recipients or (),
        )
        records.checkpoints.append(checkpoint)
        return SaveWeightsExternalResponse(path=checkpoint.path, size_bytes=checkpoint.size_bytes)

    def _load(self, claim: Claim, payload: bytes, records: Records) -> Steps[LoadWeightsResponse]:
        request = read_load(payload)
        config = self._catalog.adapter(claim.lane).config
        state = yield from self._artifacts.load(
            config,
            request.path,
            adapter=claim.lane,
            content=request.content,
            with_optimizer=request.optimizer,
            trainable=True,
        )
        yield from self._start_from(claim, state, records)
        return LoadWeightsResponse(path=request.path, model_id=claim.lane)

    def _take_up(self, claim: Claim, payload: bytes, records: Records) -> Steps[_Answered]:
        request = read_branch(payload)
        rebuilt = yield from self._replay.state_after(request.source, request.at)
        yield from self._start_from(claim, rebuilt.state, records)
        response = BranchResponse(
            run_id=claim.lane, source=request.source, operation=request.at, num_replayed=rebuilt.num_replayed
        )
        return _Answered(response, num_replayed_tokens=rebuilt.num_tokens)

    def _start_from(self, claim: Claim, state: State, records: Records) -> Steps[None]:
        """Go on with a state from elsewhere, which is recorded with the outcome: what it came from may change or go."""
        yield from self._transfers.room()
        snapshot = yield from self._snapshots.store_start(claim.lane, claim.seq, self._engine.snapshot(state))
        records.snapshots.append(snapshot)
        self._residents.put(claim.lane, claim.seq, state, snapshot_seq=claim.seq)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end_badly(self, execution: Execution, claim: Claim, error: Exception) -> None:
        """Fail it or postpone it. Unless its user is to blame the adapter is rebuilt: it may have been touched."""
        self._endings.fail(execution, claim, error)
        if not isinstance(error, UserError):
            self._residents.forget(claim.lane)


def _num_tokens(item: Pass[State]) -> int:
    return sum(len(datum.tokens) for datum in item.body.data)
