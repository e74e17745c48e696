"""Wake-ups over a real broker, also one that dies and comes back."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from harness.polling import PATIENCE_S, wait_until
from harness.servers import RedisServer
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import COMPLETIONS, ChannelListener, CompletionPublisher
from twinkle.tasks.app import make_app, mesh_queue
from twinkle.tasks.nudge import Nudger, bell_key


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server to be killed."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


def _num_listeners(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.pubsub_numsub("twinkle.done")[0][1])


@pytest.fixture
def heard(server: RedisServer) -> Iterator[queue.Queue[list[str]]]:
    """What a listener has heard, message by message."""
    messages: queue.Queue[list[str]] = queue.Queue()
    listener = ChannelListener(server.url, COMPLETIONS, messages.put)
    listener.start()
    wait_until(lambda: _num_listeners(server.url) == 1, what="the listener has subscribed")
    yield messages
    listener.stop()


def test_one_message_carries_all_ids_of_a_commit(server: RedisServer, heard: queue.Queue[list[str]]) -> None:
    publisher = CompletionPublisher(server.url)

    publisher.publish(["a:req:1", "b:req:2"])
    publisher.publish([])
    publisher.publish(["c:req:3"])

    assert [heard.get(timeout=10) for _ in range(2)] == [["a:req:1", "b:req:2"], ["c:req:3"]]
    assert heard.empty()


def test_publisher_and_listener_outlive_the_broker(server: RedisServer, heard: queue.Queue[list[str]]) -> None:
    publisher = CompletionPublisher(server.url)
    publisher.publish(["before"])
    # A broker that is killed takes along what it has accepted and not passed on.
    assert heard.get(timeout=PATIENCE_S) == ["before"]
    server.kill()
    publisher.publish(["lost"])
    server.start()
    wait_until(lambda: _num_listeners(server.url) == 1, what="the listener has come back")

    publisher.publish(["after"])

    assert heard.get(timeout=PATIENCE_S) == ["after"]


def test_a_callback_that_fails_does_not_deafen_the_listener(server: RedisServer) -> None:
    heard: queue.Queue[list[str]] = queue.Queue()
    failures = iter([True, False])

    def hear(request_ids: list[str]) -> None:
        if next(failures):
            raise RuntimeError("the loop is closed")
        heard.put(request_ids)

    listener = ChannelListener(server.url, COMPLETIONS, hear)
    listener.start()
    publisher = CompletionPublisher(server.url)
    wait_until(lambda: _num_listeners(server.url) == 1, what="the listener has subscribed")
    publisher.publish(["first"])
    publisher.publish(["second"])

    assert heard.get(timeout=10) == ["second"]
    listener.stop()


# -- nudges -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nudger(server: RedisServer) -> Iterator[Nudger]:
    app = make_app(Settings(redis_url=server.url))  # type: ignore[arg-type]
    nudger = Nudger(app, server.url)
    nudger.start()
    yield nudger
    nudger.stop()


def _num_nudges(url: str, mesh: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.llen(mesh_queue(mesh)))


def test_many_rings_are_one_nudge_until_the_bell_is_taken_down(server: RedisServer, nudger: Nudger) -> None:
    for _ in range(20):
        nudger.ring("m0")
        nudger.ring("m1")
    wait_until(lambda: _num_nudges(server.url, "m0") and _num_nudges(server.url, "m1"), what="both meshes are nudged")
    nudger.ring("m0")
    with redis.Redis.from_url(server.url) as client:
        assert 0 < client.pttl(bell_key("m0")) <= 30_000
        client.delete(bell_key("m0"))
    nudger.ring("m0")

    wait_until(lambda: _num_nudges(server.url, "m0") == 2, what="a second nudge after the bell was taken down")
    assert _num_nudges(server.url, "m1") == 1


def test_ringing_neither_blocks_nor_fails_while_the_broker_is_away_and_works_again_after(
    server: RedisServer, nudger: Nudger
) -> None:
    nudger.ring("m0")
    wait_until(lambda: _num_nudges(server.url, "m0") == 1, what="the first nudge")
    server.kill()
    for number in range(3):
        nudger.ring(f"away{number}")
    server.start()

    def is_nudged() -> bool:
        nudger.ring("m1")
        return _num_nudges(server.url, "m1") == 1

    wait_until(is_nudged, what="a nudge after the broker came back")


def test_what_was_rung_before_the_end_is_still_sent(server: RedisServer) -> None:
    app = make_app(Settings(redis_url=server.url))  # type: ignore[arg-type]
    nudger = Nudger(app, server.url)
    nudger.ring("m0")
    nudger.start()

    nudger.stop()

    assert _num_nudges(server.url, "m0") == 1


def test_a_mesh_that_is_rung_is_not_a_payload(server: RedisServer, nudger: Nudger) -> None:
    """Nothing of an operation is in a nudge: an empty body names no tenant and no number."""
    nudger.ring("m0")
    wait_until(lambda: _num_nudges(server.url, "m0") == 1, what="a nudge")
    with redis.Redis.from_url(server.url) as client:
        (message,) = client.lrange(mesh_queue("m0"), 0, -1)

    assert b'"argsrepr": "()"' in message and b'"kwargsrepr": "{}"' in message
