"""What an API that cannot start says."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.core.settings import Settings
from twinkle.server.run import serve_api


@pytest.mark.parametrize(
    ("database_url", "redis_url", "kind", "words"),
    [
        ("", "", ConfigError, "TWINKLE_REDIS_URL"),
        ("postgresql://u@127.0.0.1:1/name", "redis://127.0.0.1:1", StorageUnavailable, "did not answer"),
        ("sqlite:////no/such/folder/journal.db", "redis://127.0.0.1:1", StorageUnavailable, "did not answer"),
    ],
)
def test_a_wrong_start_ends_at_once_and_says_why(
    tmp_path: Path, database_url: str, redis_url: str, kind: type[Exception], words: str
) -> None:
    settings = Settings.model_validate({"home": tmp_path, "database_url": database_url, "redis_url": redis_url})

    with pytest.raises(kind, match=words):
        serve_api(settings)
