"""Large answers are written piece by piece, each in a turn of its own; what is small does not wait behind them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import httpx
from starlette.types import Message

from twinkle.server.answering.turns import PIECE_BYTES, Turns, name_flow
from twinkle.server.openapi import Api as App

if TYPE_CHECKING:
    from conftest import Api

NUM_ANSWERS = 50


class ReadSlowly:
    """A connection whose client reads when it is told to."""

    def __init__(self) -> None:
        self.write_paused = False
        self._is_read = asyncio.Event()
        self._is_read.set()

    def stop(self) -> None:
        self.write_paused = True
        self._is_read.clear()

    def read(self) -> None:
        self.write_paused = False
        self._is_read.set()

    async def drain(self) -> None:
        await self._is_read.wait()


async def test_the_loop_comes_round_between_the_pieces_of_all_answers() -> None:
    turns, written_in, is_over, num_rounds = Turns(), list[int](), False, 0

    async def go_round() -> None:
        nonlocal num_rounds
        while not is_over:
            num_rounds += 1
            await asyncio.sleep(0)

    async def send(message: Message) -> None:
        del message
        written_in.append(num_rounds)

    rounds = asyncio.create_task(go_round())
    body: Message = {"type": "http.response.body", "body": bytes(PIECE_BYTES)}
    await asyncio.gather(*(turns.writing({}, send)(body) for _ in range(NUM_ANSWERS)))
    is_over = True
    await rounds

    assert len(written_in) == NUM_ANSWERS
    assert all(before < after for before, after in pairwise(written_in))


async def test_a_large_body_leaves_in_pieces_and_a_small_one_at_once() -> None:
    turns, sent = Turns(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    large = bytes(range(256)) * (PIECE_BYTES // 100)
    write = turns.writing({}, send)
    start: Message = {"type": "http.response.start", "status": 200, "headers": []}
    await write(start)
    await write({"type": "http.response.body", "body": b"small", "more_body": True})
    num_before = turns.num_taken
    await write({"type": "http.response.body", "body": large})

    assert sent[0] is start and num_before == 0
    assert [message["more_body"] for message in sent[1:]] == [True, True, True, False]
    assert max(len(message["body"]) for message in sent[1:]) == PIECE_BYTES
    assert b"".join(message["body"] for message in sent[1:]) == b"small" + large


async def test_who_does_not_read_stands_in_nobodys_way() -> None:
    turns, sent, slow, begun = Turns(), list[str](), ReadSlowly(), asyncio.Event()

    async def answer(name: str, flow: ReadSlowly) -> None:
        async def send(message: Message) -> None:
            sent.append(name)
            begun.set()
            if flow is slow and message["more_body"]:
                flow.stop()

        scope: dict[str, object] = {}
        name_flow(scope, flow)
        await turns.writing(scope, send)({"type": "http.response.body", "body": bytes(2 * PIECE_BYTES)})

    waiting = asyncio.create_task(answer("slow", slow))
    await begun.wait()
    await answer("other", ReadSlowly())
    while_it_waits = list(sent)
    slow.read()
    await waiting

    assert while_it_waits == ["slow", "other", "other"]
    assert sent == ["slow", "other", "other", "slow"]


def test_what_a_served_app_answers_at_length_takes_turns(api: Api) -> None:
    turns = cast(App, api.app).turns
    httpx.get(f"{api.url}/openapi.json", timeout=60)
    before = turns.num_taken
    document = httpx.get(f"{api.url}/openapi.json", timeout=60)

    assert turns.num_taken - before == -(-len(document.content) // PIECE_BYTES)
    assert document.json()["openapi"]
