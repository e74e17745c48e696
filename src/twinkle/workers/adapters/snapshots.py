"""Recovery points, written beside the step loop so that the step loop does not wait for the object store."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.ids import new_id
from twinkle.core.process.crash import crash_point
from twinkle.scheduler.retention import Pace, Retention
from twinkle.storage.adapters.snapshots import Snapshot, SnapshotStore
from twinkle.storage.blobs import SNAPSHOTS, BlobStore, day_of
from twinkle.workers.engine import StateCopy
from twinkle.workers.steps import Steps, Transfers

Writing: TypeAlias = Future[bool]
"""A snapshot under way; its result is whether it is in the object store, and it never raises."""

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """Writes snapshots in order, and drops those that need not stay."""

    store: SnapshotStore
    blobs: BlobStore
    clock: Clock
    pace: Pace
    retention: Retention
    transfers: Transfers
    _under_way: dict[str, list[Writing]] = field(init=False, default_factory=dict)

    def write(self, adapter: str, seq: int, copy: StateCopy) -> Writing:
        """Publish a copy as the adapter's state after operation ``seq``, soon."""
        writing = self.transfers.begin(lambda: self._write(adapter, seq, copy), num_bytes=copy.num_bytes)
        self._under_way[adapter] = [*self._unfinished(adapter), writing]
        return writing

    def store_start(self, adapter: str, seq: int, data: bytes) -> Steps[Snapshot]:
        """Store the state that an operation took from elsewhere, to be committed together with its outcome.

        Raises:
            StorageUnavailable: It could not be stored; the operation has not happened.
        """
        return (
            yield from self.transfers.away(lambda: self._stored(adapter, seq, data, is_start=True), num_bytes=len(data))
        )

    def is_idle(self, adapter: str) -> bool:
        """Whether no snapshot of the adapter is under way: each one handed over is published or has failed."""
        return not self._unfinished(adapter)

    def settled(self, adapter: str) -> Steps[None]:
        """Wait until none is."""
        while not self.is_idle(adapter):
            yield lambda: self.is_idle(adapter)

    def covers(self, adapter: str, seq: int) -> Steps[bool]:
        """Whether the state after operation ``seq`` is in the object store, once what is under way has ended."""
        yield from self.settled(adapter)
        snapshot = self.store.nearest(adapter, at=seq)
        return snapshot is not None and snapshot.seq == seq

    def all_settled(self) -> Steps[None]:
        """Wait until none of any adapter is."""
        while not all(self.is_idle(adapter) for adapter in list(self._under_way)):
            yield lambda: all(self.is_idle(adapter) for adapter in list(self._under_way))

    def _unfinished(self, adapter: str) -> list[Writing]:
        unfinished = [writing for writing in self._under_way.pop(adapter, []) if not writing.done()]
        if unfinished:
            self._under_way[adapter] = unfinished
        return unfinished

    def _write(self, adapter: str, seq: int, copy: StateCopy) -> bool:
        """Whether the state is in the object store now, and published."""
        facts = {"adapter": adapter, "seq": seq}
        try:
            data = copy.data()
            snapshot = self._stored(adapter, seq, data, is_start=False)
            crash_point("snapshot.stored")
            self.store.add(snapshot)
        except StorageUnavailable as error:
            _log.warning("snapshot.failed", **facts, error=error.message, next="a later one covers it")
            return False
        except Exception as error:  # noqa: BLE001 - the border: nobody else would ever hear of it
            _log.error("snapshot.failed", **facts, error=str(error), next="a later one covers it", exc_info=error)
            return False
        crash_point("snapshot.listed")
        _log.debug("snapshot.written", **facts, size_bytes=len(data))
        self._prune(adapter)
        return True

    def _prune(self, adapter: str) -> None:
        try:
            self.store.prune(adapter, self.retention.choose)
        except Exception as error:  # noqa: BLE001 - the border: the snapshot is there, whatever becomes of older ones
            _log.warning("snapshot.prune_failed", adapter=adapter, error=str(error), next="housekeeping prunes it")

    def _stored(self, adapter: str, seq: int, data: bytes, *, is_start: bool) -> Snapshot:
        """The key is this copy's alone: a holder that has lost its mesh and writes late replaces nobody's bytes.

        Nor does what it wrote go where the same bytes of somebody else are given up.
        """
        now = self.clock.now()
        key = f"{SNAPSHOTS}{day_of(now)}/{adapter.replace(':', '/')}/{seq}-{new_id()}.safetensors"
        self.blobs.put(key, data)
        self._read_back(key, data)
        return Snapshot(adapter=adapter, seq=seq, blob=key, size_bytes=len(data), created_at=now, is_start=is_start)

    def _read_back(self, key: str, data: bytes) -> None:
        """Older ones are deleted once this one is published, so it had better be whole."""
        try:
            found = self.blobs.get(key)
        except KeyError:
            found = b""
        if found != data:
            raise StorageUnavailable(f"{key} is not what was written: {len(found)} of {len(data)} bytes")
