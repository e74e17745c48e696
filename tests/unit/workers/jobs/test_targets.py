"""A container of Azure's takes what is exported; what is told of an export that failed holds no secret."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from harness.azurite import CONTAINER, azurite
from twinkle.core.errors import StorageUnavailable
from twinkle.storage.blobs import open_blob_store
from twinkle.workers.jobs.export.targets import put_in_bucket, without_secret

SMALL, IN_PARTS = 2**20, 2**20 * 12 + 5


@pytest.mark.soak
def test_a_container_of_azures_gets_files_of_any_size_and_whoever_reads_them_finds_them_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, source = f"az://{CONTAINER}/exported", tmp_path / "file"
    with azurite(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        blobs = open_blob_store(bucket)
        for size in (SMALL, IN_PARTS):
            source.write_bytes(content := bytes(range(251)) * (size // 251 + 1))
            put_in_bucket(bucket, "folder/model.safetensors", source, None)

            assert blobs.get("folder/model.safetensors") == content
            assert [blob.key for blob in blobs.scan(after="", limit=10)] == ["folder/model.safetensors"]
            blobs.delete("folder/model.safetensors")
            assert blobs.scan(after="", limit=10) == []
        with pytest.raises(StorageUnavailable, match="the bucket could not be written"):
            put_in_bucket("az://another", "file", source, None)


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
