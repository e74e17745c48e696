"""SIGKILL while a script of the Twinkle dialect trains over HTTP: a call sent again under its key is the same call."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from harness.struck import Struck

MODEL = "/api/v1/model/null/twinkle"
PATIENCE_S = 60.0


class Script:
    """A training script whose client sends a call again, under its key, until it is answered."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=20)
        session = self._http.post("/api/v1/twinkle/create_session", json={}).json()["session_id"]
        self._http.headers["X-Twinkle-Session-Id"] = session
        self._num_calls = 0
        self.answers = [self.call("add_adapter_to_model", config={"r": 4}, seed=1)["status"]]

    def call(self, method: str, **arguments: Any) -> Any:
        self._num_calls += 1
        headers = {"x-idempotency-key": f"call-{self._num_calls}"}
        ends_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends_at:
            try:
                answer = self._http.post(f"{MODEL}/{method}", json={"adapter_name": "a", **arguments}, headers=headers)
            except httpx.TransportError:
                continue
            if answer.status_code < 500:
                assert answer.status_code == 200, answer.text
                return answer.json()
        raise AssertionError(f"{method} was not answered within {PATIENCE_S} s")

    def train(self, first: int, last: int) -> None:
        """Steps whose results show everything that was done before them, in order."""
        for step in range(first, last):
            rows = [{"input_ids": [step] * 400, "labels": [step] * 400}]
            self.answers += [self.call("forward_backward", inputs=rows)["result"]["loss"], self.call("step")]
            self.answers.append(self.call("calculate_metric", is_training=True))


# Before a call is in the journal, behind that, and behind its outcome; at the others of an operation's life the same
# kills are those of test_crash_points.py.
POINTS = [
    "journal.append",
    "api.committed",
    "worker.committed",
    *[pytest.param(point, marks=pytest.mark.soak) for point in ("api.payload_stored", "api.nudged", "worker.claimed")],
]


@pytest.mark.parametrize("point", POINTS)
def test_a_script_struck_anywhere_trains_as_one_that_was_left_in_peace(struck: Struck, point: str) -> None:
    in_peace, struck_one = (Script(struck.served.url, struck.served.create_key(name)) for name in ("calm", "struck"))
    in_peace.train(0, 6)

    struck_one.train(0, 3)
    struck.crashes.arm(point, count=2)
    struck_one.train(3, 6)

    assert struck.crashes.has_fired(point)
    assert struck_one.answers == in_peace.answers
