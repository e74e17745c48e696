"""A tenant over plain HTTP who never gives up and writes down what it saw.

It sends a request again, same number and same body, until it is answered, and polls until its future ends: what the
SDK does, with shorter pauses.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from harness.calls import PROTOBUF, optim_step, passes
from harness.history import History

PATIENCE_S = 90.0
_PAUSE_S = 0.05
_POLL_TIMEOUT_S = 30.0
_NOT_READY = 408


class Impatient(AssertionError):
    """Nobody has answered for too long."""


@dataclass
class Run:
    """One adapter, and the number its next operation gets."""

    tenant: Tenant
    id: str
    next_seq: int = 1

    def submit(self, path: str, content: bytes | None = None, json: object = None) -> str:
        """Send the next operation; its future once it is accepted."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        return self.tenant.submit(self.id, seq, path, content=content, json=json)

    def step(self, *, length: int = 4) -> list[tuple[int, str]]:
        """A forward_backward and an optim_step, both under way."""
        first = self.next_seq
        fb = self.submit("/forward_backward", passes(self.id, first, length=length, token=first))
        step = self.submit("/optim_step", json=optim_step(self.id, first + 1, learning_rate=0.001 * first))
        return [(first, fb), (first + 1, step)]

    def save(self, name: str) -> tuple[int, str]:
        """Write a training checkpoint."""
        seq = self.next_seq
        body = {"model_id": self.id, "seq_id": seq, "path": name}
        return seq, self.submit("/save_weights", json=body)

    def train(self, steps: int, *, window: int = 3, save_every: int = 4, long_every: int = 3) -> None:
        """Pipelined steps, now and then with a large payload or a checkpoint; returns when all have ended."""
        open_futures: deque[tuple[int, str]] = deque()
        for number in range(1, steps + 1):
            open_futures += self.step(length=600 if number % long_every == 0 else 4)
            if number % save_every == 0:
                open_futures.append(self.save(f"at-{number}"))
            while len(open_futures) > 2 * window:
                self.tenant.collect(self.id, *open_futures.popleft())
        for seq, request_id in open_futures:
            self.tenant.collect(self.id, seq, request_id)


class Tenant:
    """See the module's docstring. Used from several threads."""

    def __init__(self, url: str, key: str, history: History) -> None:
        self.history = history
        self._http = httpx.Client(
            base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=_POLL_TIMEOUT_S, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def new_session(self) -> str:
        return str(self.post("/create_session", json={})["session_id"])

    def new_run(self, session: str, number: int, *, base_model: str = "null", rank: int = 4) -> Run:
        """A new adapter, created."""
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": base_model,
            "lora_config": {"rank": rank, "seed": number},
        }
        model_id = f"{session}:train:{number}"
        self.collect(model_id, 0, self.submit(model_id, 0, "/create_model", json=body))
        return Run(self, model_id)

    def new_sampler(self, session: str, number: int, *, base_model: str = "null") -> str:
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": base_model}
        return str(self.post("/create_sampling_session", json=body)["sampling_session_id"])

    def sample(self, sampler: str, seq: int) -> str:
        """A sample under way."""
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "num_samples": 1,
            "prompt": prompt,
            "sampling_params": {"max_tokens": 2, "seed": seq},
        }
        return self.submit(sampler, seq, "/asample", json=body)

    def submit(self, lane: str, seq: int, path: str, *, content: bytes | None = None, json: object = None) -> str:
        """Send one operation until it is accepted; its future."""
        ends_at = time.monotonic() + PATIENCE_S
        while True:
            self.history.note("invoke", lane, seq)
            response = self._try(path, content=content, json=json)
            if response is not None:
                _require_answer(response)
                request_id = str(response.json()["request_id"])
                self.history.note("accepted", lane, seq, request_id.encode())
                return request_id
            self.history.note("unknown", lane, seq)
            _pause(ends_at, f"{path} {lane} {seq}")

    def collect(self, lane: str, seq: int, request_id: str) -> bytes:
        """Poll until the future ends, and write its outcome down; the answer's body."""
        ends_at = time.monotonic() + PATIENCE_S
        while True:
            response = self._try("/retrieve_future", json={"request_id": request_id})
            if response is None or response.status_code == _NOT_READY:
                _pause(ends_at, f"the end of {request_id}")
                continue
            _require_answer(response)
            has_failed = response.content.startswith(b'{"error"')
            self.history.note("fail" if has_failed else "ok", lane, seq, response.content)
            return response.content

    def post(self, path: str, *, json: object) -> dict[str, object]:
        """What is not an operation: sent until it is answered."""
        ends_at = time.monotonic() + PATIENCE_S
        while (response := self._try(path, json=json)) is None:
            _pause(ends_at, path)
        _require_answer(response)
        answer: dict[str, object] = response.json()
        return answer

    def _try(self, path: str, *, content: bytes | None = None, json: object = None) -> httpx.Response | None:
        """``None`` when nobody answered, or only that it cannot be done now."""
        try:
            if content is None:
                response = self._http.post(path, json=json)
            else:
                response = self._http.post(path, content=content, headers=PROTOBUF)
        except httpx.TransportError:
            return None
        return None if response.status_code >= 500 or response.status_code == 429 else response


def burst(tenant: Tenant, *, runs: int = 2, steps: int = 6, samples: int = 3) -> list[str]:
    """Some runs side by side and some samples, in a session of their own; the adapters once all have ended."""
    session = tenant.new_session()
    ids: list[str] = []

    def train(number: int) -> None:
        run = tenant.new_run(session, number)
        ids.append(run.id)
        run.train(steps)

    def draw() -> None:
        sampler = tenant.new_sampler(session, 0)
        futures = [(seq, tenant.sample(sampler, seq)) for seq in range(samples)]
        for seq, request_id in futures:
            tenant.collect(sampler, seq, request_id)

    with ThreadPoolExecutor(runs + 1) as threads:
        jobs = [threads.submit(train, number) for number in range(runs)]
        if samples:
            jobs.append(threads.submit(draw))
        _raise_first([job.exception() for job in jobs])
    return ids


def _raise_first(errors: Sequence[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def _require_answer(response: httpx.Response) -> None:
    assert response.is_success, f"{response.request.url.path}: {response.status_code} {response.text}"


def _pause(ends_at: float, what: str) -> None:
    if time.monotonic() > ends_at:
        raise Impatient(f"not within {PATIENCE_S:.0f} s: {what}")
    threading.Event().wait(_PAUSE_S)
