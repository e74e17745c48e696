"""What is told of an export that failed holds no secret."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from twinkle.workers.jobs.export.targets import without_secret


@pytest.mark.parametrize(
    ("secret", "message", "told"),
    [
        ("hf_abcdefgh", "401 for https://x:hf_abcdefgh@hub", "401 for https://x:(secret)@hub"),
        ("hf_abcdefgh", "Bearerhf_abcdefgh.", "Bearer(secret)."),
        ("to", "could not connect to the hub, token=to", "could not connect (secret) the hub, token=(secret)"),
        ("a.b", "a.b or axb", "(secret) or axb"),
        ("", "nothing was sent", "nothing was sent"),
    ],
)
def test_a_secret_is_masked_and_ordinary_words_are_left_whole(secret: str, message: str, told: str) -> None:
    assert without_secret(message, SecretStr(secret)) == told
