"""Payloads and results: small ones inline in the journal, large ones as content-addressed blobs."""

from __future__ import annotations

import hashlib

from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import Payload
from twinkle.storage.blobs import BlobStore, content_key


def write_payload(blobs: BlobStore, data: bytes, *, inline_bytes: int) -> Payload:
    """Store ``data`` where its size says; the blob is durable before the journal can mention it."""
    if len(data) <= inline_bytes:
        return Payload(inline=data)
    key = content_key(data)
    blobs.put(key, data)
    return Payload(blob=key)


def write_result(blobs: BlobStore, request_id: str, data: bytes, *, inline_bytes: int) -> Payload:
    """Store an operation's result where its size says.

    A blob is the operation's own, though another's result may have the same bytes: the two expire at different times.
    """
    if len(data) <= inline_bytes:
        return Payload(inline=data)
    key = f"results/{request_id.replace(':', '/')}/{hashlib.sha256(data).hexdigest()}"
    blobs.put(key, data)
    return Payload(blob=key)


def read_payload(blobs: BlobStore, payload: Payload) -> bytes:
    """The bytes of a payload or a result.

    Raises:
        StorageUnavailable: The object store did not answer, or lacks the blob.
    """
    if payload.inline is not None:
        return payload.inline
    assert payload.blob is not None, "a payload is inline or a blob"
    try:
        return blobs.get(payload.blob)
    except KeyError:
        raise StorageUnavailable(f"blob {payload.blob} is not in the object store") from None
