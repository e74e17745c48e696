"""Environment variables of the documents' server, which may be set where ours starts: what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_KEPT_IN_SQL = "records are always kept, in the journal's database (TWINKLE_DATABASE_URL)"

FOREIGN_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "TWINKLE_SERVER_CONFIG": "read by `twinkle-server` as its -c",
        "TWINKLE_DEFAULT_SAVE_DIR": "checkpoints lie in the object store (TWINKLE_OBJECT_STORE)",
        "TWINKLE_TOKEN_SALT": "keys are 256 random bits and kept as their hash, which needs no salt",
        "TWINKLE_LONG_POLL_TIMEOUT": "how long a poll is held is TWINKLE_LONG_POLL_S",
        "TWINKLE_POLL_INTERVAL": "nobody polls inside the server: what waits is told",
        "TWINKLE_PER_USER_PROCESSOR_LIMIT": "so many a tenant may have: TWINKLE_TENANT_MAX_PROCESSORS",
        "TWINKLE_FAIL_FAST": "a loss that fails always fails its operation, and nothing else",
        "TWINKLE_PERSISTENCE_MODE": _KEPT_IN_SQL,
        "TWINKLE_PERSISTENCE_FILE_PATH": _KEPT_IN_SQL,
        "TWINKLE_PERSISTENCE_REDIS_URL": "the broker is TWINKLE_REDIS_URL, and no record is kept there",
        "TWINKLE_PERSISTENCE_KEY_PREFIX": _KEPT_IN_SQL,
    }
)
"""By name, what one has to know in the place of it. None of them changes anything here."""
