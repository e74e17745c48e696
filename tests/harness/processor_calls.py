"""Processors over HTTP, called as a client calls them that sends a call again until it is answered."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import httpx

from harness.polling import wait_for

PATIENCE_S = 90.0


class ProcessorCalls:
    """One tenant's calls, all in one session."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}", "x-request-id": uuid4().hex}

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """One request, once."""
        return httpx.post(
            f"{self._url}/api/v1/processor/twinkle{path}",
            content=body if isinstance(body, bytes) else json.dumps(body),
            headers={**self._headers, "content-type": "application/json", **headers},
            timeout=60,
            trust_env=False,
        )

    def create(self, processor_type: str, class_type: str, **arguments: Any) -> str:
        body = {"processor_type": processor_type, "class_type": class_type, **arguments}
        answer = self._answered("/create", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["processor_id"])

    def call(self, processor: str, function: str, **arguments: Any) -> Any:
        answer = self._answered("/call", {"processor_id": processor, "function": function, **arguments})
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    def delete(self, processor: str) -> None:
        gone = httpx.delete(
            f"{self._url}/api/v1/processor/twinkle/{processor}", headers=self._headers, timeout=60, trust_env=False
        )
        assert gone.status_code == 200, gone.text

    def next(self, processor: str) -> Any:
        """The next one, or None."""
        answer = self._answered("/call", {"processor_id": processor, "function": "__next__"})
        if answer.status_code == 410:
            assert answer.json()["detail"] == "Iterator exhausted"
            return None
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    def rest(self, processor: str) -> list[Any]:
        batches = []
        while (batch := self.next(processor)) is not None:
            batches.append(batch)
        return batches

    def _answered(self, path: str, body: Any) -> httpx.Response:
        """What a request is answered in the end, under one idempotency key."""
        key = uuid4().hex

        def answer() -> httpx.Response | None:
            try:
                found = self.post(path, body, **{"x-idempotency-key": key})
            except httpx.TransportError:
                return None
            return None if found.status_code in {502, 503} else found

        return wait_for(answer, what=f"an answer to {body}", deadline_s=PATIENCE_S)
