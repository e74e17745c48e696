"""SIGKILL to the API in the middle of an upload: its client goes on, and the file is the one that was sent."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import openai

from harness.struck import Struck
from twinkle.client import Client
from twinkle.client.files import PART_BYTES

_PARTS = 5


def test_a_killed_api_costs_an_upload_nothing_but_a_pause(struck: Struck, tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    data = os.urandom(_PARTS * PART_BYTES + 12_345)
    path.write_bytes(data)
    key = struck.served.create_key("uploader")
    told: list[int] = []

    def kill(num_bytes: int, _: int) -> None:
        told.append(num_bytes)
        if len(told) in (2, 4):
            struck.served.part("the API").kill()

    with Client(struck.served.url, key) as client:
        file = client.files.upload(path, purpose="user_data", progress=kill)
        client.files.download(file.id, tmp_path / "back.bin")

    assert file.sha256 == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "back.bin").read_bytes() == data
    # No part was sent twice for the sake of another one.
    assert told == [min(number * PART_BYTES, len(data)) for number in range(_PARTS + 2)]
    whole = openai.OpenAI(base_url=f"{struck.served.url}/v1", api_key=key).files.content(file.id).content
    assert whole == data
    kept = """
        SELECT COUNT(*) FROM file_content JOIN tenant ON tenant.id = file_content.tenant
        WHERE tenant.name = 'uploader' AND file_content.ended_at IS NULL"""
    ((num_contents,),) = struck.served.query(kept)
    assert num_contents == 1
