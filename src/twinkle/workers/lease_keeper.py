"""Holds a mesh's lease: takes it, renews it from a thread of its own, and knows when it is gone."""

from __future__ import annotations

import threading

import structlog

from twinkle.core.errors import LeaseLost, StorageUnavailable
from twinkle.core.lease import Lease, ProcessIdentity
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.process.crash import crash_point
from twinkle.storage.journal.meshes import Meshes

_RENEWALS_PER_LEASE = 3

_log = structlog.get_logger()


class LeaseKeeper:
    """One mesh, one process. ``current()`` is what every write of the worker carries."""

    def __init__(
        self,
        *,
        meshes: Meshes,
        mesh: str,
        identity: ProcessIdentity,
        capabilities: MeshCapabilities | None,
        lease_s: float,
    ) -> None:
        """Hold nothing yet. A mesh without ``capabilities`` serves no model, and nobody is told that it does."""
        self._meshes = meshes
        self._mesh = mesh
        self._identity = identity
        self._capabilities = capabilities
        self._lease_s = lease_s
        self._is_outdated = False
        self._lease: Lease | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._renew_forever, name="lease", daemon=True)

    def start(self) -> None:
        """Begin to renew whatever lease is held."""
        self._thread.start()

    def current(self) -> Lease | None:
        """The lease as far as this process knows; the fence in the journal knows better."""
        return self._lease

    def try_acquire(self) -> Lease | None:
        """Take the mesh if it is free; ``None`` while another holder's lease runs."""
        lease = self._meshes.acquire(self._mesh, self._identity, lease_s=self._lease_s)
        if lease is not None:
            crash_point("lease.acquired")
            if self._capabilities is not None:
                self._meshes.publish(lease, self._capabilities)
            self._lease = lease
            _log.info("lease.acquired", mesh=self._mesh, epoch=lease.epoch)
        return lease

    def note_memory(self, held: dict[str, int]) -> None:
        """Say with the next renewal who holds how much of the device's memory, where that has changed."""
        if self._capabilities is not None and held != self._capabilities.memory_held:
            self._capabilities = self._capabilities.model_copy(update={"memory_held": held})
            self._is_outdated = True

    def give_up(self) -> None:
        """Another epoch has begun: forget ours."""
        if self._lease is not None:
            _log.warning("lease.lost", mesh=self._mesh, epoch=self._lease.epoch)
        self._lease = None

    def stop(self) -> None:
        """Stop renewing and release the mesh, so that a successor need not wait."""
        self._stopping.set()
        self._thread.join()
        if self._lease is not None:
            self._meshes.release(self._lease)

    def _renew_forever(self) -> None:
        while not self._stopping.wait(self._lease_s / _RENEWALS_PER_LEASE):
            lease = self._lease
            if lease is None:
                continue
            try:
                self._meshes.renew(lease, lease_s=self._lease_s)
                self._publish_changes(lease)
            except LeaseLost:
                if self._lease is lease:
                    self.give_up()
            except StorageUnavailable as error:
                _log.warning("lease.renewal_failed", mesh=self._mesh, error=error.message)
            except Exception as error:  # noqa: BLE001 - a keeper that ends would let the lease of a live worker run out
                _log.error("lease.renewal_failed", mesh=self._mesh, error=str(error), exc_info=error)

    def _publish_changes(self, lease: Lease) -> None:
        """Say what has changed since it was said last; with the next renewal, where the journal is away."""
        if not self._is_outdated or self._capabilities is None:
            return
        self._is_outdated = False
        try:
            self._meshes.publish(lease, self._capabilities)
        except BaseException:
            self._is_outdated = True
            raise
