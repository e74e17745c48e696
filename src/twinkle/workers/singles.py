"""What each operation but a pass does: optimizer steps, saves, loads, forks. In steps; see ``workers/steps.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from pydantic import BaseModel

from twinkle.core.adapter import AdapterConfig, Checkpoint, CheckpointKind
from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.operation import Claim, OperationKind
from twinkle.storage.journal.records import NewSamplingSession, Records
from twinkle.storage.sampling.ephemeral import NewEphemeralWeights
from twinkle.storage.stores import Stores
from twinkle.wire.bodies.base import ResponseBody, parse_body
from twinkle.wire.bodies.runs import BranchResponse
from twinkle.wire.bodies.training import (
    CreateModelResponse,
    LoadWeightsResponse,
    OptimStepRequest,
    OptimStepResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
    UnloadModelResponse,
)
from twinkle.wire.calls import Call, decode_call, is_call
from twinkle.wire.paths import SamplingSessionId
from twinkle.workers.adapters.artifacts import Artifacts, CheckpointToSave
from twinkle.workers.adapters.replay import Replay
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.beginnings import Beginnings, LoadRequest
from twinkle.workers.endings import Answered, window_failed
from twinkle.workers.engine import Engine, State
from twinkle.workers.requests import ReadAhead
from twinkle.workers.sampling.weights import SamplerWeights
from twinkle.workers.scripts.calls import Calls
from twinkle.workers.steps import Steps


class BranchRequest(BaseModel, frozen=True):
    """Which past state a fork or a rewind takes up: that of ``source`` after operation ``at``."""

    source: str
    at: int


@dataclass(frozen=True, kw_only=True)
class Singles(Generic[State]):
    """Does with one adapter what its operation says. Nothing is visible to anyone before the outcome is committed."""

    engine: Engine[State]
    residents: Residents[State]
    artifacts: Artifacts[State]
    stores: Stores
    clock: Clock
    replay: Replay[State]
    sampler_weights: SamplerWeights[State]
    beginnings: Beginnings[State]
    calls: Calls[State]
    max_ephemeral: int

    def answer(self, claim: Claim, payload: bytes, records: Records, read: ReadAhead | None = None) -> Steps[Answered]:
        """Do what an operation says. What it brings into being is added to ``records``.

        ``read`` is what was made of its payload already, if anything was.
        """
        if isinstance(read, Exception):
            raise read
        if is_call(payload):
            call = read if isinstance(read, Call) else decode_call(payload)
            return (yield from self.calls.answer(claim, call, records))
        if isinstance(read, OptimStepRequest):
            return Answered((yield from self._optim_step(claim, read)).to_json())
        if claim.kind in {OperationKind.FORK, OperationKind.REWIND}:
            return (yield from self._take_up(claim, payload, records))
        return Answered((yield from self._respond(claim, payload, records)).to_json())

    def _respond(self, claim: Claim, payload: bytes, records: Records) -> Steps[ResponseBody]:
        match claim.kind:
            case OperationKind.CREATE_MODEL:
                self.residents.put(
                    claim.lane, claim.seq, self.engine.create(AdapterConfig.model_validate_json(payload))
                )
                return CreateModelResponse(model_id=claim.lane)
            case OperationKind.OPTIM_STEP:
                return (yield from self._optim_step(claim, parse_body(OptimStepRequest, payload)))
            case OperationKind.SAVE_WEIGHTS:
                return (yield from self._save(claim, payload, records))
            case OperationKind.SAVE_WEIGHTS_FOR_SAMPLER:
                return (yield from self._save_for_sampler(claim, payload, records))
            case OperationKind.SAVE_WEIGHTS_EXTERNAL:
                return (yield from self._save_external(claim, payload, records))
            case OperationKind.LOAD_WEIGHTS:
                return (yield from self._load(claim, payload, records))
            case OperationKind.UNLOAD_MODEL:
                self.residents.forget(claim.lane)
                return UnloadModelResponse(model_id=claim.lane)
            case _:
                raise InvalidInput("kind", f"{claim.kind} is not something this worker executes")

    def _optim_step(self, claim: Claim, request: OptimStepRequest) -> Steps[OptimStepResponse]:
        if request.adam_params is None:
            raise InvalidInput("optimizer_params", "only AdamW is offered here; send adam_params")
        state = yield from self.residents.state_before(claim.lane, claim.seq)
        if claim.failed_window_seq is not None:
            self.engine.clear_gradients(state)
            raise window_failed(claim)
        return OptimStepResponse(metrics=self.engine.optim_step(state, request.adam_params))

    def _save(self, claim: Claim, payload: bytes, records: Records) -> Steps[SaveWeightsResponse]:
        request = parse_body(SaveWeightsRequest, payload)
        save = CheckpointToSave(
            kind=CheckpointKind.TRAINING,
            name=request.path or f"{claim.seq:06d}",
            overwrite=request.overwrite,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        checkpoint = yield from self._save_checkpoint(claim, save, records)
        return SaveWeightsResponse(path=checkpoint.path)

    def _save_for_sampler(self, claim: Claim, payload: bytes, records: Records) -> Steps[SaveWeightsForSamplerResponse]:
        request = parse_body(SaveWeightsForSamplerRequest, payload)
        if request.path is None:
            return (yield from self._open_sampler(claim, request, records))
        save = CheckpointToSave(
            kind=CheckpointKind.SAMPLER,
            name=request.path,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )
        checkpoint = yield from self._save_checkpoint(claim, save, records)
        return SaveWeightsForSamplerResponse(path=checkpoint.path)

    def _save_external(self, claim: Claim, payload: bytes, records: Records) -> Steps[SaveWeightsExternalResponse]:
        request = parse_body(SaveWeightsExternalRequest, payload)
        save = CheckpointToSave(
            kind=CheckpointKind.EXTERNAL,
            name=request.path,
            ttl_s=request.ttl_seconds,
            age_recipients=request.age_encryption_recipients or (),
        )
        checkpoint = yield from self._save_checkpoint(claim, save, records)
        return SaveWeightsExternalResponse(path=checkpoint.path, size_bytes=checkpoint.size_bytes)

    def _save_checkpoint(self, claim: Claim, save: CheckpointToSave, records: Records) -> Steps[Checkpoint]:
        state = yield from self.residents.state_before(claim.lane, claim.seq)
        checkpoint = yield from self.artifacts.save(state, save, adapter=claim.lane, seq=claim.seq)
        records.checkpoints.append(checkpoint)
        return checkpoint

    def _open_sampler(
        self, claim: Claim, request: SaveWeightsForSamplerRequest, records: Records
    ) -> Steps[SaveWeightsForSamplerResponse]:
        """A sampling session on weights without a name: a copy in memory, and a promise to make it anew."""
        assert request.sampling_session_seq_id is not None, "the body names one of the two"
        owner = self.stores.adapters.find(claim.lane)
        session_id = str(SamplingSessionId(owner.session, request.sampling_session_seq_id))
        self._refuse_taken(session_id)
        state = yield from self.residents.state_before(claim.lane, claim.seq)
        now = self.clock.now()
        weights = NewEphemeralWeights(
            adapter=claim.lane,
            seq=claim.seq,
            size_bytes=self.sampler_weights.keep(session_id, claim.lane, claim.seq, state),
            opened_at=now,
            expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
            max_open=self.max_ephemeral,
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
            self.stores.sampling_sessions.find(sampling_session)
        except NotFound:
            return
        raise Conflict(f"sampling session {sampling_session} already samples from something else; use the next number")

    def _load(self, claim: Claim, payload: bytes, records: Records) -> Steps[LoadWeightsResponse]:
        request = LoadRequest.model_validate_json(payload)
        config = self.stores.adapters.find(claim.lane).config
        state = yield from self.artifacts.load(
            config,
            request.path,
            adapter=claim.lane,
            content=request.content,
            with_optimizer=request.optimizer,
            trainable=True,
        )
        yield from self.beginnings.start_from(claim, state, records)
        return LoadWeightsResponse(path=request.path, model_id=claim.lane)

    def _take_up(self, claim: Claim, payload: bytes, records: Records) -> Steps[Answered]:
        request = BranchRequest.model_validate_json(payload)
        rebuilt = yield from self.replay.state_after(request.source, request.at)
        state = self.engine.adopt(rebuilt.state, self.stores.adapters.find(claim.lane).config)
        if self.engine.has_gradients(state):
            # Of a script that had stepped and not cleared: whoever goes on from there sends its next batch.
            self.engine.clear_gradients(state)
        yield from self.beginnings.start_from(claim, state, records)
        response = BranchResponse(
            run_id=claim.lane, source=request.source, operation=request.at, num_replayed=rebuilt.num_replayed
        )
        return Answered(response.to_json(), num_replayed_tokens=rebuilt.num_tokens)
