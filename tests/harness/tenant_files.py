"""A tenant's files put into a service's stores and read out of them, past the routes."""

from __future__ import annotations

import hashlib

from harness.served import Served
from twinkle.core.clock import SystemClock
from twinkle.core.ids import new_id
from twinkle.storage.blobs import FILES, day_of, open_blob_store
from twinkle.storage.files.records import ContentFacts, FilePiece, NewFile
from twinkle.storage.stores import Stores


class TenantFiles:
    """The files of one tenant of a service on this machine."""

    def __init__(self, served: Served, key: str) -> None:
        self._clock = SystemClock()
        self._stores = Stores.at(f"sqlite:///{served.home / 'journal.db'}", self._clock)
        self._blobs = open_blob_store(str(served.home / "objects"))
        found = self._stores.tenants.key(key)
        assert found is not None
        self._tenant = found.tenant

    def put(self, name: str, content: bytes, *, purpose: str = "fine-tune") -> str:
        """Keep a file; its id."""
        piece = FilePiece(key=f"{FILES}{day_of(self._clock.now())}/{new_id()}", size_bytes=len(content))
        self._blobs.put(piece.key, content)
        facts = ContentFacts(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
        return self._stores.files.add(NewFile(tenant=self._tenant, purpose=purpose, name=name), facts, [piece]).id

    def get(self, file_id: str) -> bytes:
        """The bytes of a file."""
        pieces = self._stores.files.pieces(self._stores.files.find(file_id, self._tenant))
        return b"".join(self._blobs.get(piece.key) for piece in pieces)

    def close(self) -> None:
        """Let go of the stores."""
        self._stores.close()
