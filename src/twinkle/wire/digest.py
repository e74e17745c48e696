"""Fingerprints of JSON bodies, by which a resend is told from a different request under the same number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set

from twinkle.wire.bodies.base import RequestBody

# A resent ephemeral save comes with a new sampling_session_seq_id under its old seq_id.
EPHEMERAL_SAVE_IGNORES = frozenset({"sampling_session_seq_id"})


def body_digest(body: RequestBody, *, ignore: Set[str] = frozenset()) -> str:
    """Fingerprints what the server understood of a body: unknown fields and the order of keys do not count."""
    values = body.model_dump(mode="json", exclude=set(ignore))
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
