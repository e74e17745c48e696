"""What each call of the Twinkle dialect does that is no pass. Its result is the JSON body of the HTTP response."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Generic

from twinkle.core.adapter import WARNINGS, CheckpointKind, Grant
from twinkle.core.errors import InvalidInput
from twinkle.core.operation import Claim, OperationKind
from twinkle.storage.adapters.adapters import Adapters
from twinkle.storage.journal.records import Records
from twinkle.wire.bodies.base import RequestBody, parse_body
from twinkle.wire.calls import Call
from twinkle.wire.paths import OTHER_SCHEME, SCHEME
from twinkle.workers.adapters.artifacts import Artifacts, CheckpointToSave
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.beginnings import Beginnings
from twinkle.workers.endings import Answered, window_failed
from twinkle.workers.engine import Engine, State
from twinkle.workers.steps import Steps


class SaveCall(RequestBody):
    """What a ``save`` says. Its name was judged by the API; without one it is called by its number."""

    name: str | None = None
    save_optimizer: bool = False
    is_sampler: bool = False
    ttl_s: float | None = None


class LoadCall(RequestBody):
    """What a ``load`` or a ``resume_from_checkpoint`` says, its path bound to a content at its acceptance."""

    path: str
    load_optimizer: bool = False
    resume_only_model: bool = False
    content: str | None = None
    grant: Grant | None = None

    def wants_optimizer(self, method: str) -> bool:
        """Whether it wants more than the weights."""
        return self.load_optimizer if method == "load" else not self.resume_only_model


@dataclass(frozen=True, kw_only=True)
class Calls(Generic[State]):
    """Does with one adapter what a call says. Nothing is visible to anyone before the outcome is committed."""

    engine: Engine[State]
    residents: Residents[State]
    artifacts: Artifacts[State]
    adapters: Adapters
    beginnings: Beginnings[State]

    def answer(self, claim: Claim, call: Call, records: Records) -> Steps[Answered]:
        """Do what a call says. What it brings into being is added to ``records``."""
        state = yield from self.residents.state_before(claim.lane, claim.seq)
        match claim.kind:
            case OperationKind.CALL | OperationKind.OPTIM_STEP:
                return self._call(claim, state, call)
            case OperationKind.SAVE_WEIGHTS:
                return Answered((yield from self._save(claim, state, call, records)))
            case OperationKind.LOAD_WEIGHTS:
                return Answered((yield from self._load(claim, state, call, records)))
            case _:
                raise InvalidInput("method", f"{call.method} is not something this worker executes as {claim.kind}")

    def _call(self, claim: Claim, state: State, call: Call) -> Answered:
        if claim.kind is OperationKind.OPTIM_STEP and claim.failed_window_seq is not None:
            self.engine.clear_gradients(state)
            raise window_failed(claim)
        body = self.engine.call(state, call)
        if call.method == "get_train_configs":
            body = self._with_warnings(claim, body)
        return Answered(body, clears_gradients=call.method == "zero_grad" and not self.engine.has_gradients(state))

    def _with_warnings(self, claim: Claim, body: bytes) -> bytes:
        """What people read of a run, and what of its config is not applied: some clients show no other answer."""
        warnings = (self.adapters.find(claim.lane).user_metadata or {}).get(WARNINGS)
        if warnings is None:
            return body
        lines = [json.loads(body)["result"], *(f"warning: {line}" for line in warnings.splitlines())]
        return json.dumps({"result": "\n".join(lines)}).encode()

    def _save(self, claim: Claim, state: State, call: Call, records: Records) -> Steps[bytes]:
        wanted = parse_body(SaveCall, json.dumps(dict(call.arguments)).encode())
        self.engine.call(state, call)
        save = CheckpointToSave(
            kind=CheckpointKind.SAMPLER if wanted.is_sampler else CheckpointKind.TRAINING,
            name=wanted.name or f"checkpoint-{claim.seq}",
            overwrite=True,
            ttl_s=wanted.ttl_s,
            with_optimizer=wanted.save_optimizer,
        )
        checkpoint = yield from self.artifacts.save(state, save, adapter=claim.lane, seq=claim.seq)
        records.checkpoints.append(checkpoint)
        path = OTHER_SCHEME + checkpoint.path.removeprefix(SCHEME)
        return json.dumps({"twinkle_path": path, "checkpoint_dir": path}).encode()

    def _load(self, claim: Claim, state: State, call: Call, records: Records) -> Steps[bytes]:
        wanted = parse_body(LoadCall, json.dumps(dict(call.arguments)).encode())
        files = yield from self.artifacts.files_to_load(
            self.adapters.find(claim.lane).config,
            wanted.path,
            adapter=claim.lane,
            content=wanted.content,
            with_optimizer=wanted.wants_optimizer(call.method),
        )
        loaded, body = self.engine.load_into(state, files, call)
        yield from self.beginnings.start_from(claim, loaded, records)
        return body
