"""Payloads and results: small ones inline in the journal, large ones as blobs, each its operation's own."""

from __future__ import annotations

import hashlib

from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import Payload
from twinkle.storage.blobs import PAYLOADS, RESULTS, BlobStore, day_of


def write_payload(blobs: BlobStore, request_id: str, data: bytes, *, inline_bytes: int, now: float) -> Payload:
    """Store ``data`` where its size says; the blob is durable before the journal can mention it.

    A resend on the same day writes the same bytes to the same place. What another operation was given is kept apart,
    though it may be the same: the two are given up at different times.
    """
    if len(data) <= inline_bytes:
        return Payload(inline=data)
    # Whether there is such a lane is not known yet, nor what its name is made of.
    key = f"{PAYLOADS}{day_of(now)}/{_sha256(request_id.encode())}/{_sha256(data)}"
    blobs.put(key, data)
    return Payload(blob=key, blob_bytes=len(data))


def write_result(blobs: BlobStore, request_id: str, data: bytes, *, inline_bytes: int, now: float) -> Payload:
    """Store an operation's result where its size says.

    A blob is the operation's own, as a payload's is.
    """
    if len(data) <= inline_bytes:
        return Payload(inline=data)
    key = f"{RESULTS}{day_of(now)}/{request_id.replace(':', '/')}/{_sha256(data)}"
    blobs.put(key, data)
    return Payload(blob=key, blob_bytes=len(data))


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


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
