"""Streams of a real model while what carries them is killed, emptied and frozen: each still is its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import redis

from harness.polling import wait_until
from harness.served import Served
from harness.struck import Struck

OPTIONS: dict[str, Any] = {"model": "tiny", "prompt": "two and three?", "max_tokens": 400, "seed": 5}
"""Goes on for so long, with broken characters and whole ones of several bytes."""


@pytest.fixture(scope="module")
def served(struck_model: Struck) -> Served:
    return struck_model.served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    key = served.create_key("streams")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=120) as it:
        yield it


@pytest.fixture(scope="module")
def answer(client: openai.OpenAI) -> str:
    """What everybody must get."""
    text = client.completions.create(**OPTIONS).choices[0].text
    assert len(text) > 100 and any(ord(character) > 0x7F for character in text)
    return text


class Stream:
    """A stream that was begun, with what has come of it."""

    def __init__(self, served: Served, client: openai.OpenAI) -> None:
        self._served = served
        self._chunks = iter(client.completions.create(**OPTIONS, stream=True))
        first = next(self._chunks)
        self.request_id = first.id.removeprefix("cmpl-")
        self.text = first.choices[0].text

    def operation(self) -> tuple[str, int]:
        """Its state in the journal, and how often it was begun."""
        rows = self._served.query("SELECT state, attempts FROM operation WHERE request_id = ?", self.request_id)
        return rows[0]

    def read(self, *, until: int | None = None) -> None:
        """Take in chunks: all, or until so many characters have come."""
        for chunk in self._chunks:
            self.text += chunk.choices[0].text
            if until is not None and len(self.text) >= until:
                return


def test_a_stream_whose_worker_is_killed_goes_on_where_it_was(
    served: Served, client: openai.OpenAI, answer: str
) -> None:
    stream = Stream(served, client)
    # Not much: on a busy machine what is read lags behind what is drawn.
    stream.read(until=len(answer) // 20)
    before, state = stream.text, stream.operation()
    served.kill_engine()
    stream.read()

    assert state == ("running", 1)
    assert before != answer and answer.startswith(before)
    assert stream.text == answer
    assert stream.operation() == ("done", 2)


def test_a_stream_whose_broker_is_emptied_loses_its_listeners_and_freezes_ends_with_the_rest(
    served: Served, client: openai.OpenAI, answer: str
) -> None:
    broker = served.part("the broker")
    with redis.Redis.from_url((served.home / "broker-url").read_text().strip()) as connection:
        stream = Stream(served, client)
        early, state = stream.text, stream.operation()
        connection.flushall()
        connection.client_kill_filter(_type="pubsub")
    broker.suspend()
    try:
        wait_until(lambda: stream.operation()[0] == "done", what="the sample is done", deadline_s=60)
    finally:
        broker.resume()
    stream.read()

    assert state == ("running", 1)
    assert 0 < len(early) < len(answer)
    assert stream.text == answer
