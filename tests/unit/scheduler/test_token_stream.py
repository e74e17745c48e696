"""Tokens on their way to those who listen, over a real broker: small messages, and nobody waits for it."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from pydantic import ValidationError

from harness.polling import wait_until
from harness.servers import RedisServer
from twinkle.core.ids import new_id
from twinkle.scheduler.channels import ChannelListener
from twinkle.scheduler.token_stream import TokenPiece, TokenPublisher, read_piece, token_channel


@contextmanager
def hearing(url: str, listener_id: str) -> Iterator[queue.Queue[list[str]]]:
    """What is said to one listener, message by message."""
    messages: queue.Queue[list[str]] = queue.Queue()
    listener = ChannelListener(url, token_channel(listener_id), messages.put)
    listener.start()
    with redis.Redis.from_url(url) as client:
        wait_until(lambda: client.pubsub_numsub(token_channel(listener_id))[0][1] == 1, what="somebody listens")
    yield messages
    listener.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server to be killed."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


def read(messages: queue.Queue[list[str]], *, num_tokens: int) -> list[TokenPiece]:
    """The pieces of so many tokens."""
    pieces: list[TokenPiece] = []
    while sum(len(piece.tokens) for piece in pieces) < num_tokens:
        for line in messages.get(timeout=10):
            piece = read_piece(line)
            assert piece is not None
            pieces.append(piece)
    return pieces


def test_a_long_piece_arrives_whole_in_messages_of_bounded_size(redis_url: str) -> None:
    listener_id = new_id()
    long = TokenPiece(
        request_id="s:sample:0:req:1",
        sample=2,
        start=7,
        tokens=list(range(3000)),
        logprobs=[-math.inf, *(-i / 7 for i in range(2999))],
        topk=[[(2**31 - 1, -math.inf)] * 20 for _ in range(3000)],
    )
    publisher = TokenPublisher(redis_url)
    with hearing(redis_url, listener_id) as messages:
        publisher.offer(listener_id, long)
        publisher.start()
        publisher.stop()
        first = messages.get(timeout=10)
        assert len("\n".join(first)) <= 64 * 1024
        messages.put(first)
        pieces = sorted(read(messages, num_tokens=3000), key=lambda piece: piece.start)

    assert [token for piece in pieces for token in piece.tokens] == long.tokens
    assert [score for piece in pieces for score in piece.logprobs or ()] == long.logprobs
    assert [row for piece in pieces for row in piece.topk or ()] == long.topk
    assert [piece.start for piece in pieces] == [7 + sum(len(p.tokens) for p in pieces[:i]) for i in range(len(pieces))]
    assert {(piece.request_id, piece.sample) for piece in pieces} == {(long.request_id, 2)}


def test_each_listener_hears_only_what_is_said_to_it(redis_url: str) -> None:
    one, other = new_id(), new_id()
    publisher = TokenPublisher(redis_url)
    publisher.start()
    with hearing(redis_url, one) as at_one, hearing(redis_url, other) as at_other:
        for listener_id, token in ((one, 1), (other, 2), (one, 3)):
            publisher.offer(listener_id, TokenPiece(request_id="r", sample=0, start=0, tokens=[token]))
        heard = [[piece.tokens for piece in read(at, num_tokens=n)] for at, n in ((at_one, 2), (at_other, 1))]
    publisher.stop()

    assert heard == [[[1], [3]], [[2]]]


def test_offering_neither_waits_nor_piles_up_while_the_broker_is_away_and_is_heard_again_after(
    server: RedisServer,
) -> None:
    listener_id = new_id()
    publisher = TokenPublisher(server.url)
    publisher.start()
    piece = TokenPiece(request_id="r", sample=0, start=0, tokens=[1] * 10_000)
    server.kill()
    for _ in range(1000):
        publisher.offer(listener_id, piece)
        assert publisher.num_cells_waiting <= 300_000
    server.start()
    with hearing(server.url, listener_id) as messages:

        def is_heard() -> bool:
            publisher.offer(listener_id, TokenPiece(request_id="r", sample=0, start=0, tokens=[2]))
            return not messages.empty()

        wait_until(is_heard, what="a piece after the broker came back")
    publisher.stop()


def test_a_message_that_is_no_text_does_not_deafen_the_listener(redis_url: str) -> None:
    listener_id = new_id()
    with hearing(redis_url, listener_id) as messages, redis.Redis.from_url(redis_url) as client:
        client.publish(token_channel(listener_id), b"\xff\xfe\x00")
        client.publish(token_channel(listener_id), "after")

        assert messages.get(timeout=10) == ["after"]


@pytest.mark.parametrize(
    "change",
    [{"logprobs": [0.0]}, {"topk": [[]]}, {"tokens": [-1]}, {"tokens": [2**31]}, {"sample": -1}, {"start": -1}],
)
def test_a_piece_that_does_not_fit_together_is_none(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TokenPiece.model_validate({"request_id": "r", "sample": 0, "start": 0, "tokens": [1, 2]} | change)
