"""Recovery points, written in the background so that the step loop never waits for the object store."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import structlog

from twinkle.core.crash import crash_point
from twinkle.core.errors import StorageUnavailable
from twinkle.storage.blobs import BlobStore
from twinkle.storage.catalog import Catalog

_log = structlog.get_logger()


class Snapshots:
    """Writes snapshots in order and deletes those they supersede."""

    def __init__(self, *, catalog: Catalog, blobs: BlobStore, every_ops: int, every_s: float) -> None:
        """Prepare.

        Args:
            catalog: Where snapshots are published.
            blobs: Where their bytes go.
            every_ops: An adapter is due after so many operations,
            every_s: or after so many seconds, whichever comes first. A replay is bounded by the same numbers.
        """
        self._catalog = catalog
        self._blobs = blobs
        self._every_ops = every_ops
        self._every_s = every_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")
        self._pending: set[Future[None]] = set()

    def is_due(self, *, num_ops: int, age_s: float) -> bool:
        """Whether an adapter with so many operations since its last snapshot should get one."""
        return num_ops >= self._every_ops or age_s >= self._every_s

    def write(self, adapter: str, seq: int, data: bytes) -> None:
        """Store ``data`` as the adapter's state after operation ``seq``; returns at once."""
        future = self._thread.submit(self._write, adapter, seq, data)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def wait(self) -> None:
        """Wait until everything handed over is written."""
        wait(list(self._pending))

    def close(self) -> None:
        """Write what is left, then end."""
        self._thread.shutdown(wait=True)

    def _write(self, adapter: str, seq: int, data: bytes) -> None:
        key = f"snapshots/{adapter.replace(':', '/')}/{seq}.safetensors"
        try:
            self._blobs.put(key, data)
            crash_point("snapshot.stored")
            superseded = self._catalog.add_snapshot(adapter, seq, blob=key, size_bytes=len(data))
            crash_point("snapshot.listed")
            for old in superseded:
                self._blobs.delete(old)
        except StorageUnavailable as error:
            _log.warning("snapshot.failed", adapter=adapter, seq=seq, error=error.message, next="a later one covers it")
            return
        _log.debug("snapshot.written", adapter=adapter, seq=seq, size_bytes=len(data))
