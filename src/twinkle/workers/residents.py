"""The adapters in the device's memory: put there by restore and replay, kept current, snapshotted, evicted.

An adapter that has to leave the device is parked in host memory first, from where it comes back without a replay; one
that has to leave that too is left to its snapshot and the journal.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.crash import crash_point
from twinkle.core.errors import StorageUnavailable, TwinkleError
from twinkle.core.operation import OperationKind
from twinkle.storage.blobs import BlobStore
from twinkle.storage.catalog import Catalog
from twinkle.storage.journal import Journal
from twinkle.storage.payloads import read_payload
from twinkle.storage.records import PastOperation
from twinkle.wire.bodies.training import AdamParams, OptimStepRequest
from twinkle.workers.artifacts import Artifacts
from twinkle.workers.engine import Engine, Pass, State
from twinkle.workers.parked import Parked, ParkedAdapter
from twinkle.workers.requests import LoadRequest, read_create, read_load, read_optim_step, read_pass
from twinkle.workers.snapshots import Snapshots

_log = structlog.get_logger()


@dataclass
class Resident(Generic[State]):
    """An adapter in memory, with every operation up to ``applied_seq`` applied."""

    state: State
    applied_seq: int
    snapshot_seq: int
    snapshot_at: float


class Residents(Generic[State]):
    """At most ``limit`` adapters on the device, the longest unused parked first."""

    def __init__(
        self,
        *,
        engine: Engine[State],
        journal: Journal,
        catalog: Catalog,
        blobs: BlobStore,
        artifacts: Artifacts[State],
        snapshots: Snapshots,
        clock: Clock,
        limit: int,
        parked_bytes: int,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._catalog = catalog
        self._blobs = blobs
        self._artifacts = artifacts
        self._snapshots = snapshots
        self._clock = clock
        self._limit = limit
        self._residents: OrderedDict[str, Resident[State]] = OrderedDict()
        self._parked = Parked(parked_bytes)

    def state_before(self, adapter: str, seq: int) -> State:
        """The adapter with exactly the operations below ``seq`` applied, restored and replayed if need be.

        Raises:
            StorageUnavailable: A snapshot or a payload could not be read; worth another attempt.
        """
        resident = self._residents.get(adapter)
        if resident is None or resident.applied_seq != seq - 1:
            resident = self._unpark(adapter, seq) or self._restore(adapter, seq)
            self._residents[adapter] = resident
        self._residents.move_to_end(adapter)
        return resident.state

    def put(self, adapter: str, seq: int, state: State) -> None:
        """Take in the state that operation ``seq`` has made (a creation or a load). It counts once noted."""
        now = self._clock.now()
        self._parked.take(adapter)
        self._residents[adapter] = Resident(state, applied_seq=seq - 1, snapshot_seq=-1, snapshot_at=now)

    def note_applied(self, adapter: str, seq: int, kind: OperationKind) -> None:
        """Operation ``seq`` is committed: the resident is current, and may be due for a snapshot."""
        resident = self._residents.get(adapter)
        if resident is None:
            return
        resident.applied_seq = seq
        if self._engine.has_gradients(resident.state):
            return
        is_due = self._snapshots.is_due(
            num_ops=seq - resident.snapshot_seq, age_s=self._clock.now() - resident.snapshot_at
        )
        if kind is OperationKind.LOAD_WEIGHTS or (kind is OperationKind.OPTIM_STEP and is_due):
            self._save(adapter, resident)

    def forget(self, adapter: str) -> None:
        """Drop what is in memory: it may be ahead of the journal."""
        self._residents.pop(adapter, None)
        self._parked.take(adapter)

    def forget_all(self) -> None:
        """Drop everything: the mesh is somebody else's now."""
        self._residents.clear()
        self._parked.clear()

    def evict_excess(self) -> None:
        """Make room. Called between batches, when every resident is as the journal says."""
        while len(self._residents) > self._limit:
            adapter, resident = self._residents.popitem(last=False)
            _log.info("adapter.parked", adapter=adapter, seq=resident.applied_seq)
            for name, left in self._parked.put(adapter, self._to_host(resident)):
                if left.needs_snapshot:
                    self._snapshots.write(name, left.applied_seq, left.data)
                _log.info("adapter.evicted", adapter=name, seq=left.applied_seq)

    def save_all(self) -> None:
        """Snapshot every adapter in memory that has none of its present state, before the worker ends."""
        for adapter, resident in self._residents.items():
            if resident.applied_seq > resident.snapshot_seq and not self._engine.has_gradients(resident.state):
                self._save(adapter, resident)
        for adapter, parked in self._parked.items():
            if parked.needs_snapshot:
                self._snapshots.write(adapter, parked.applied_seq, parked.data)
        self._snapshots.wait()

    def _to_host(self, resident: Resident[State]) -> ParkedAdapter:
        return ParkedAdapter(
            data=self._engine.snapshot(resident.state),
            applied_seq=resident.applied_seq,
            snapshot_seq=resident.snapshot_seq,
            snapshot_at=resident.snapshot_at,
            has_gradients=self._engine.has_gradients(resident.state),
        )

    def _unpark(self, adapter: str, seq: int) -> Resident[State] | None:
        parked = self._parked.take(adapter)
        if parked is None or parked.applied_seq != seq - 1:
            return None
        _log.info("adapter.unparked", adapter=adapter, seq=parked.applied_seq)
        return Resident(
            self._engine.restore(parked.data),
            applied_seq=parked.applied_seq,
            snapshot_seq=parked.snapshot_seq,
            snapshot_at=parked.snapshot_at,
        )

    def _save(self, adapter: str, resident: Resident[State]) -> None:
        self._snapshots.write(adapter, resident.applied_seq, self._engine.snapshot(resident.state))
        resident.snapshot_seq, resident.snapshot_at = resident.applied_seq, self._clock.now()

    def _restore(self, adapter: str, seq: int) -> Resident[State]:
        self._snapshots.wait()
        snapshot = self._catalog.latest_snapshot(adapter)
        state: State | None = None
        applied = -1
        if snapshot is not None and snapshot.seq < seq:
            state, applied = self._engine.restore(self._read_blob(snapshot.blob)), snapshot.seq
        past = self._journal.history(adapter, after_seq=applied, before_seq=seq)
        _require_unbroken(adapter, past, after_seq=applied, before_seq=seq)
        for operation in past:
            crash_point("worker.replaying")
            state = self._replay(adapter, operation, state)
        if state is None:
            raise TwinkleError(f"{adapter}: neither a snapshot nor its creation is in the journal", adapter=adapter)
        _log.info("adapter.restored", adapter=adapter, snapshot_seq=applied, replayed=len(past))
        return Resident(state, applied_seq=seq - 1, snapshot_seq=applied, snapshot_at=self._clock.now())

    def _replay(self, adapter: str, operation: PastOperation, state: State | None) -> State | None:
        """Do again what the operation did to the adapter; its recorded outcome is not touched."""
        kind = operation.kind
        if not operation.succeeded:
            if kind is OperationKind.OPTIM_STEP and operation.error_code == "window_failed" and state is not None:
                self._engine.clear_gradients(state)
            return state
        if kind is OperationKind.CREATE_MODEL:
            return self._engine.create(read_create(self._payload(operation)))
        if kind is OperationKind.LOAD_WEIGHTS:
            return self._reload(adapter, read_load(self._payload(operation)))
        if state is None:
            raise TwinkleError(f"{adapter}: operation {operation.seq} precedes the adapter's creation")
        if kind is OperationKind.FORWARD_BACKWARD:
            answer = self._engine.run_passes([Pass(state=state, body=read_pass(self._payload(operation)))])[0]
            if isinstance(answer, Exception):
                raise answer
        elif kind is OperationKind.OPTIM_STEP:
            self._engine.optim_step(state, _adam_of(read_optim_step(self._payload(operation))))
        return state

    def _reload(self, adapter: str, request: LoadRequest) -> State:
        config = self._catalog.adapter(adapter).config
        return self._artifacts.load(config, request.path, with_optimizer=request.optimizer, trainable=True)

    def _payload(self, operation: PastOperation) -> bytes:
        return read_payload(self._blobs, operation.payload)

    def _read_blob(self, key: str) -> bytes:
        try:
            return self._blobs.get(key)
        except KeyError:
            raise StorageUnavailable(f"snapshot {key} is not in the object store") from None


def _adam_of(request: OptimStepRequest) -> AdamParams:
    assert request.adam_params is not None, "an optim_step without adam_params is never applied"
    return request.adam_params


def _require_unbroken(adapter: str, past: list[PastOperation], *, after_seq: int, before_seq: int) -> None:
    if [operation.seq for operation in past] != list(range(after_seq + 1, before_seq)):
        raise TwinkleError(
            f"{adapter}: the journal does not hold every operation between {after_seq} and {before_seq}",
            adapter=adapter,
        )
