"""One claimed batch into outcomes: adapters brought to the right state, requests read, the engine called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from twinkle.core.adapter import CheckpointKind
from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, InvalidInput, NotFound, StorageUnavailable, UserError, WindowFailed
from twinkle.core.operation import Claim, OperationKind
from twinkle.scheduler.charges import PassRate, charge_of_time, charge_of_tokens
from twinkle.storage.adapters.ephemeral import NewEphemeralWeights
from twinkle.storage.blobs import BlobStore
from twinkle.storage.checkpoints.catalog import Catalog
from twinkle.storage.journal.records import NewSamplingSession, Records
from twinkle.storage.payloads import read_payload
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

_PASSES = {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD}


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
    """Executes batches. Nothing it does is visible to anyone before the outcomes are committed."""

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

    def execute(self, claims: list[Claim], execution: Execution) -> None:
        """Run a batch. Every claim ends as an outcome or as postponed; one never harms another."""
        passes = [claim for claim in claims if claim.kind in _PASSES]
        if passes:
            self._run_passes(passes, execution)
        for claim in claims:
            if claim.kind not in _PASSES:
                self._run_single(claim, execution)

    # -- forward and forward_backward ---------------------------------------------------------------------------------

    def _run_passes(self, claims: list[Claim], execution: Execution) -> None:
        ready: list[tuple[Claim, Pass[State]]] = []
        for claim in claims:
            try:
                ready.append((claim, self._prepare_pass(claim)))
            except Exception as error:  # noqa: BLE001 - the border: whatever it is, it is this operation's
                self._end_badly(execution, claim, error)
        if not ready:
            return
        started = self._clock.now()
        answers = self._answer_passes([item for _, item in ready])
        elapsed_s = self._clock.now() - started
        total_tokens = max(sum(_num_tokens(item) for _, item in ready), 1)
        self._rate.note(total_tokens, elapsed_s)
        for (claim, item), answer in zip(ready, answers, strict=True):
            if isinstance(answer, Exception):
                self._end_badly(execution, claim, answer)
                continue
            num_tokens = _num_tokens(item)
            result = encode_forward_backward_output(answer.logprobs, answer.metrics, answer.elementwise_loss)
            share_s = elapsed_s * num_tokens / total_tokens
            charge = charge_of_tokens(num_tokens)
            self._end_well(execution, claim, result, device_s=share_s, num_tokens=num_tokens, charge=charge)

    def _answer_passes(self, passes: list[Pass[State]]) -> Sequence[ForwardBackwardResult | Exception]:
        try:
            return self._engine.run_passes(passes)
        except Exception as error:  # noqa: BLE001 - the border: the device failed, so every pass of the batch did
            return [error] * len(passes)

    def _prepare_pass(self, claim: Claim) -> Pass[State]:
        refuse_rejected(claim)
        body = self._loss_graphs.complete(claim.lane, read_pass(read_payload(self._blobs, claim.payload)))
        return Pass(state=self._residents.state_before(claim.lane, claim.seq), body=body)

    # -- everything else ----------------------------------------------------------------------------------------------

    def _run_single(self, claim: Claim, execution: Execution) -> None:
        records = Records()
        try:
            refuse_rejected(claim)
            payload = read_payload(self._blobs, claim.payload)
            if claim.kind not in _WITHOUT_STATE:
                # If it has to be rebuilt, that is the service's doing and not this operation's.
                self._residents.state_before(claim.lane, claim.seq)
            started = self._clock.now()
            answered = self._answer(claim, payload, records)
        except Exception as error:  # noqa: BLE001 - the border: whatever it is, it is this operation's
            self._end_badly(execution, claim, error)
            return
        elapsed_s = self._clock.now() - started
        execution.records[claim.request_id] = records
        replayed = answered.num_replayed_tokens
        charge = charge_of_time(elapsed_s, tokens_per_s=self._rate.tokens_per_s, num_replayed=replayed)
        result = answered.response.to_json()
        self._end_well(execution, claim, result, device_s=elapsed_s, num_tokens=replayed, charge=charge)

    def _answer(self, claim: Claim, payload: bytes, records: Records) -> _Answered:
        if claim.kind in {OperationKind.FORK, OperationKind.REWIND}:
            return self._take_up(claim, payload, records)
        return _Answered(self._respond(claim, payload, records))

    def _respond(self, claim: Claim, payload: bytes, records: Records) -> ResponseBody:
        match claim.kind:
            case OperationKind.CREATE_MODEL:
                self._residents.put(claim.lane, claim.seq, self._engine.create(read_create(payload)))
                return CreateModelResponse(model_id=claim.lane)
            case OperationKind.OPTIM_STEP:
                return self._optim_step(claim, payload)
            case OperationKind.SAVE_WEIGHTS:
                return self._save(claim, payload, records)
            case OperationKind.SAVE_WEIGHTS_FOR_SAMPLER:
                return self._save_for_sampler(claim, payload, records)
            case OperationKind.SAVE_WEIGHTS_EXTERNAL:
                return self._save_external(claim, payload, records)
            case OperationKind.LOAD_WEIGHTS:
                return self._load(claim, payload, records)
            case OperationKind.UNLOAD_MODEL:
                self._residents.forget(claim.lane)
                return UnloadModelResponse(model_id=claim.lane)
            case _:
                raise InvalidInput("kind", f"{claim.kind} is not something this worker executes")

    def _optim_step(self, claim: Claim, payload: bytes) -> OptimStepResponse:
        request = read_optim_step(payload)
        if request.adam_params is None:
            raise InvalidInput("optimizer_params", "only AdamW is offered here; send adam_params")
        state = self._residents.state_before(claim.lane, claim.seq)
        if claim.failed_window_seq is not None:
            self._engine.clear_gradients(state)
            raise WindowFailed(
                f"optim_step {claim.seq} was not applied: operation {claim.failed_window_seq} of its accumulation"
                " window failed, so the gradients would have been incomplete; they were cleared. Send the batch again."
            )
        return OptimStepResponse(metrics=self._engine.optim_step(state, request.adam_params))

    def _save(self, claim: Claim, payload: bytes, records: Records) -> SaveWeightsResponse:
        request = read_save(payload)
        checkpoint = self._artifacts.save(
            self._residents.state_before(claim.lane, claim.seq),
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

    def _save_for_sampler(self, claim: Claim, payload: bytes, records: Records) -> SaveWeightsForSamplerResponse:
        request = read_save_for_sampler(payload)
        if request.path is None:
            return self._open_sampler(claim, request, records)
        checkpoint = self._artifacts.save(
            self._residents.state_before(claim.lane, claim.seq),
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
    ) -> SaveWeightsForSamplerResponse:
        """A sampling session on weights without a name: a copy in memory, and a promise to make it anew."""
        assert request.sampling_session_seq_id is not None, "the body names one of the two"
        owner = self._catalog.adapter(claim.lane)
        session_id = str(SamplingSessionId(owner.session, request.sampling_session_seq_id))
        self._refuse_taken(session_id)
        state = self._residents.state_before(claim.lane, claim.seq)
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

    def _save_external(self, claim: Claim, payload: bytes, records: Records) -> SaveWeightsExternalResponse:
        request = read_save_external(payload)
        checkpoint = self._artifacts.save(
            self._residents.state_before(claim.lane, claim.seq),
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

    def _load(self, claim: Claim, payload: bytes, records: Records) -> LoadWeightsResponse:
        request = read_load(payload)
        config = self._catalog.adapter(claim.lane).config
        state = self._artifacts.load(
            config,
            request.path,
            adapter=claim.lane,
            content=request.content,
            with_optimizer=request.optimizer,
            trainable=True,
        )
        self._start_from(claim, state, records)
        return LoadWeightsResponse(path=request.path, model_id=claim.lane)

    def _take_up(self, claim: Claim, payload: bytes, records: Records) -> _Answered:
        request = read_branch(payload)
        rebuilt = self._replay.state_after(request.source, request.at)
        self._start_from(claim, rebuilt.state, records)
        response = BranchResponse(
            run_id=claim.lane, source=request.source, operation=request.at, num_replayed=rebuilt.num_replayed
        )
        return _Answered(response, num_replayed_tokens=rebuilt.num_tokens)

    def _start_from(self, claim: Claim, state: State, records: Records) -> None:
        """Go on with a state from elsewhere, which is recorded with the outcome: what it came from may change or go."""
        snapshot = self._snapshots.store_start(claim.lane, claim.seq, self._engine.snapshot(state))
        records.snapshots.append(snapshot)
        self._residents.put(claim.lane, claim.seq, state, snapshot_seq=claim.seq)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end_well(
        self, execution: Execution, claim: Claim, result: bytes, *, device_s: float, num_tokens: int, charge: int
    ) -> None:
        """Record its result; when that cannot be stored, the operation has not happened."""
        try:
            self._endings.succeed(execution, claim, result, device_s=device_s, num_tokens=num_tokens, charge=charge)
        except StorageUnavailable as error:
            self._end_badly(execution, claim, error)

    def _end_badly(self, execution: Execution, claim: Claim, error: Exception) -> None:
        """Fail it or postpone it. Unless its user is to blame the adapter is rebuilt: it may have been touched."""
        self._endings.fail(execution, claim, error)
        if not isinstance(error, UserError):
            self._residents.forget(claim.lane)


def _num_tokens(item: Pass[State]) -> int:
    return sum(len(datum.tokens) for datum in item.body.data)
