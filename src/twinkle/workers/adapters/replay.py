"""A past state of an adapter: the nearest recovery point at or before it, and the journal's operations since."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Generic

import structlog

from twinkle.core.adapter import AdapterConfig, Dialect
from twinkle.core.errors import StorageUnavailable, TwinkleError
from twinkle.core.operation import OperationKind
from twinkle.core.process.crash import crash_point
from twinkle.storage.adapters.adapters import Adapters
from twinkle.storage.adapters.snapshots import SnapshotStore
from twinkle.storage.blobs import BlobStore
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.records import PastOperation
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.training import AdamParams, OptimStepRequest
from twinkle.wire.calls import QUESTIONS, decode_call
from twinkle.workers.engine import Engine, Pass, State
from twinkle.workers.requests import Requests
from twinkle.workers.steps import Steps, Transfers, turn, with_turns

_STARTS = {OperationKind.LOAD_WEIGHTS, OperationKind.FORK, OperationKind.REWIND}
"""What takes its state from elsewhere. Each commits a recovery point with its outcome, so none is ever replayed."""

_PASSES = {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD}
_CALLS = {OperationKind.CALL, OperationKind.OPTIM_STEP, OperationKind.SAVE_WEIGHTS}

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Rebuilt(Generic[State]):
    """An adapter as it was after an operation, and what lies between it and the recovery point it was rebuilt from."""

    state: State
    snapshot_seq: int
    num_replayed: int
    num_tokens: int
    """Of the passes among them."""
    num_bytes: int


class Replay(Generic[State]):
    """Rebuilds adapters. Recorded outcomes are not touched."""

    def __init__(
        self,
        *,
        engine: Engine[State],
        journal: Journal,
        adapters: Adapters,
        snapshots: SnapshotStore,
        blobs: BlobStore,
        requests: Requests,
        transfers: Transfers,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._adapters = adapters
        self._snapshots = snapshots
        self._blobs = blobs
        self._requests = requests
        self._transfers = transfers

    def state_after(self, adapter: str, seq: int) -> Steps[Rebuilt[State]]:
        """The adapter with exactly the operations up to ``seq`` applied. Others may go first between any two.

        Raises:
            StorageUnavailable: A snapshot or a payload could not be read; worth another attempt.
            TwinkleError: The journal does not hold what it takes.
        """
        snapshot = self._snapshots.nearest(adapter, at=seq)
        state: State | None = None
        applied = -1
        if snapshot is not None:
            yield from self._transfers.room()
            data = yield from self._transfers.away(
                partial(self._read_snapshot, snapshot.blob), num_bytes=snapshot.size_bytes
            )
            state, applied = self._engine.restore(data), snapshot.seq
        past = self._journal.history(adapter, after_seq=applied, before_seq=seq + 1)
        _require_unbroken(adapter, past, after_seq=applied, last_seq=seq)
        num_tokens = 0
        apply = self._apply_called if self._is_called(adapter, past) else self._apply
        for operation in past:
            crash_point("worker.replaying")
            state = yield from apply(adapter, operation, state)
            if operation.kind is OperationKind.FORWARD_BACKWARD and operation.succeeded:
                num_tokens += operation.num_tokens
            yield turn
        if state is None:
            raise TwinkleError(f"{adapter}: neither a snapshot nor its creation is in the journal", adapter=adapter)
        _log.info("adapter.restored", adapter=adapter, snapshot_seq=applied, replayed=len(past))
        return Rebuilt(
            state=state,
            snapshot_seq=applied,
            num_replayed=len(past),
            num_tokens=num_tokens,
            num_bytes=sum(operation.payload.size_bytes for operation in past),
        )

    def _is_called(self, adapter: str, past: list[PastOperation]) -> bool:
        return bool(past) and self._adapters.find(adapter).config.dialect is Dialect.TWINKLE

    def _apply(self, adapter: str, operation: PastOperation, state: State | None) -> Steps[State | None]:
        """Do again what the operation did to the adapter."""
        kind = operation.kind
        if not operation.succeeded or kind is OperationKind.CREATE_MODEL or kind in _STARTS:
            return (yield from self._begin(adapter, operation, state))
        present = _present(adapter, operation, state)
        if kind is OperationKind.FORWARD_BACKWARD:
            yield from self._run(adapter, present, (yield from self._payload(adapter, operation)))
        elif kind is OperationKind.OPTIM_STEP:
            self._engine.optim_step(
                present, _adam_of(parse_body(OptimStepRequest, (yield from self._payload(adapter, operation))))
            )
        return state

    def _apply_called(self, adapter: str, operation: PastOperation, state: State | None) -> Steps[State | None]:
        """The same in the Twinkle dialect, whose passes leave what the next calls are about."""
        kind = operation.kind
        if not operation.succeeded or kind is OperationKind.CREATE_MODEL or kind in _STARTS:
            return (yield from self._begin(adapter, operation, state))
        present = _present(adapter, operation, state)
        if kind in _PASSES:
            yield from self._run(adapter, present, (yield from self._payload(adapter, operation)))
        elif kind in _CALLS:
            call = decode_call((yield from self._payload(adapter, operation)))
            if call.method not in QUESTIONS:
                self._engine.call(present, call)
        return state

    def _begin(self, adapter: str, operation: PastOperation, state: State | None) -> Steps[State | None]:
        """What begins an adapter, and what failed."""
        kind = operation.kind
        if not operation.succeeded:
            if state is not None:
                if kind is OperationKind.OPTIM_STEP and operation.error_code == "window_failed":
                    self._engine.clear_gradients(state)
                self._engine.note_failure(state)
            return state
        if kind is OperationKind.CREATE_MODEL:
            return self._engine.create(
                AdapterConfig.model_validate_json((yield from self._payload(adapter, operation)))
            )
        raise TwinkleError(f"{adapter}: the snapshot that {kind} {operation.seq} was recorded with is gone")

    def _run(self, adapter: str, state: State, payload: bytes) -> Steps[None]:
        body = self._requests.decoded_for(adapter, payload)
        # Whose it is does not matter: an adapter's replays share what they compute with nobody else.
        again = Pass(state=state, body=body, cache_group=f"replay:{adapter}", is_again=True)
        slices = self._engine.start_passes([again])
        (answer,) = yield from with_turns(slices)
        if isinstance(answer, Exception):
            raise answer

    def _payload(self, adapter: str, operation: PastOperation) -> Steps[bytes]:
        if operation.payload.is_gone:
            raise TwinkleError(f"{adapter}: what operation {operation.seq} was given is no longer kept")
        return (yield from self._transfers.read(self._blobs, operation.payload))

    def _read_snapshot(self, key: str) -> bytes:
        try:
            return self._blobs.get(key)
        except KeyError:
            raise StorageUnavailable(f"snapshot {key} is not in the object store") from None


def _present(adapter: str, operation: PastOperation, state: State | None) -> State:
    if state is None:
        raise TwinkleError(f"{adapter}: operation {operation.seq} precedes the adapter's creation")
    return state


def _adam_of(request: OptimStepRequest) -> AdamParams:
    assert request.adam_params is not None, "an optim_step without adam_params is never applied"
    return request.adam_params


def _require_unbroken(adapter: str, past: list[PastOperation], *, after_seq: int, last_seq: int) -> None:
    if [operation.seq for operation in past] != list(range(after_seq + 1, last_seq + 1)):
        raise TwinkleError(
            f"{adapter}: the journal does not hold every operation between {after_seq} and {last_seq + 1}",
            adapter=adapter,
        )
