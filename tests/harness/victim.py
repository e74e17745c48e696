"""A tenant that owns one of everything, for tests that send a served app what nobody should send."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL
from harness.hostile import Json

if TYPE_CHECKING:
    from conftest import Api

ANSWER_S = 20.0
"""Far beyond what an answer takes, on a machine that does much else."""
REVOKE = ("DELETE", "/api/v1/auth/apikey/me")
"""It would end the key with which everything else is sent."""

# What is found under these names in paths, queries and bodies.
_ID_OF_NAME = {
    "session_id": "$session",
    "model_id": "$run",
    "run_id": "$run",
    "sampler_id": "$sampler",
    "sampling_session_id": "$sampler",
    "request_id": "$request",
    "tinker_path": "$path",
    "twinkle_path": "$path",
    "source_path": "$path",
    "model_path": "$path",
    "base_model": "$model",
    "model": "$model",
    "method": "$method",
    "adapter_name": "$adapter",
    "processor_id": "$processor",
    "mesh": "$mesh",
    "segment": "$segment",
    "name": "$name",
}


@dataclass(frozen=True)
class Victim:
    """A served app whose worker rests, and a tenant's client; ``ids`` are the tenant's by placeholder."""

    client: httpx.Client
    home: str
    key: str
    ids: dict[str, str]
    new_key: Callable[[], str]
    """Makes the key of a tenant of its own."""

    @property
    def base_url(self) -> str:
        """Where the app is served."""
        return str(self.client.base_url).rstrip("/")

    def filled(self, template: Json) -> Json:
        """``template`` with ids in the place of their placeholders."""
        if isinstance(template, dict):
            return {key: self.filled(value) for key, value in template.items()}
        if isinstance(template, list):
            return [self.filled(value) for value in template]
        return self.ids.get(template, template) if isinstance(template, str) else template

    def aimed(self, drawn: Json, name: str = "") -> Json:
        """``drawn`` with most texts under an id's name replaced by that id, so that it meets what exists."""
        if isinstance(drawn, dict):
            return {key: self.aimed(value, key) for key, value in drawn.items()}
        if isinstance(drawn, list):
            return [self.aimed(value, name.removesuffix("s")) for value in drawn]
        if isinstance(drawn, str) and name in _ID_OF_NAME and zlib.crc32(drawn.encode("utf-8", "replace")) % 4:
            return self.ids[_ID_OF_NAME[name]]
        return drawn


@contextmanager
def attacked(api: Api, *, resting: bool = True) -> Iterator[Victim]:
    """A tenant of ``api`` that owns one of everything; then the worker rests, unless it is to answer the attacks."""
    key = api.new_key()
    with httpx.Client(base_url=api.url, headers={"X-API-Key": key}, timeout=ANSWER_S) as client:
        ids = _own_everything(client)
        with api.worker.paused() if resting else nullcontext():
            yield Victim(client, str(api.settings.home), key, ids, api.new_key)


def _own_everything(client: httpx.Client) -> dict[str, str]:
    session = client.post("/api/v1/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    run = client.post("/api/v1/create_model", json=body).json()["model_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler = client.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]
    save = {"model_id": run, "seq_id": 1, "path": "kept"}
    saved = client.post("/api/v1/save_weights", json=save).json()["request_id"]
    with httpx.Client(base_url=f"{client.base_url}/api/v1", headers=client.headers) as tinker:
        path = retrieve(tinker, saved).json()["path"]
    config = {"peft_type": "LORA", "r": 8}
    named = client.post(
        f"/api/v1/model/{BASE_MODEL}/twinkle/add_adapter_to_model",
        json={"adapter_name": "a", "config": config},
        headers={"X-Twinkle-Session-Id": session},
    )
    made = client.post(
        "/api/v1/processor/twinkle/create",
        json={"processor_type": "dataset", "class_type": "Dataset", "dataset_meta": "org/name"},
        headers={"X-Twinkle-Session-Id": session, "Prefer": "respond-async"},
    )
    return {
        "$session": session,
        "$run": run,
        "$sampler": sampler,
        "$request": saved,
        "$path": path,
        "$segment": "weights",
        "$name": "kept",
        "$model": BASE_MODEL,
        "$adapter": named.json()["adapter_name"],
        "$processor": made.json()["request_id"].removesuffix(":req:0"),
        "$method": "forward_backward",
        "$mesh": "default",
    }
