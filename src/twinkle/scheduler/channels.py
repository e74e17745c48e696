"""Messages between our processes over Redis, each heard at most once: a channel, its listeners, its publishers.

Losing one is harmless: whoever waits looks into the journal now and then on its own. Completions are the commonest:
one publish per commit says which futures are done, by their ids only. Rings for workers and tokens of streamed samples
go over channels of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import redis
import structlog
from redis.backoff import NoBackoff
from redis.client import PubSub
from redis.retry import Retry

COMPLETIONS = "twinkle.done"
"""The channel of futures that are done."""
_SOCKET_TIMEOUT_S = 5.0
_PUBLISH_TIMEOUT_S = 0.5
SILENCE_S = 2.0
_RECONNECT_S = 0.5

_log = structlog.get_logger()


def impatient_redis(redis_url: str) -> redis.Redis:
    """A connection for messages that may be lost: whoever publishes on it waits for half a second at most, twice."""
    return redis.Redis.from_url(
        redis_url,
        socket_timeout=_PUBLISH_TIMEOUT_S,
        socket_connect_timeout=_PUBLISH_TIMEOUT_S,
        # One more attempt, for the connection that a restart of the broker has cut.
        retry=Retry(NoBackoff(), 1),
    )


def read_answers(connection: Any, count: int) -> list[Any]:
    """What Redis answers to so many commands sent over a connection, which is broken off if an answer does not come."""
    try:
        return [connection.read_response() for _ in range(count)]
    except BaseException:
        # An answer that is still to come would be taken for the next one's.
        connection.disconnect()
        raise


class CompletionPublisher:
    """The worker's end of the completions. Callable from any thread."""

    def __init__(self, redis_url: str) -> None:
        # One connection and its command as it goes over the wire: the client's own way costs almost three times as
        # much, and a client waits for every one of these. redis-py has no types for it.
        self._connection: Any = impatient_redis(redis_url).connection_pool.make_connection()
        self._lock = threading.Lock()
        self._silent_until = 0.0

    def publish(self, request_ids: Sequence[str]) -> None:
        """Say that these futures are done. Never raises: the broker may be away, the journal is not.

        The step loop waits for it, so a broker that holds the connection and does not answer is left alone for a while.
        """
        if not request_ids or time.monotonic() < self._silent_until:
            return
        packed = self._connection.pack_command("PUBLISH", COMPLETIONS, "\n".join(request_ids))
        try:
            with self._lock:
                self._connection.retry.call_with_retry(
                    lambda: self._send(packed), lambda _: self._connection.disconnect()
                )
        except redis.RedisError as error:
            if isinstance(error, redis.TimeoutError):
                self._silent_until = time.monotonic() + SILENCE_S
            _log.warning("completions.publish_failed", error=str(error), count=len(request_ids))

    def _send(self, packed: object) -> None:
        self._connection.send_packed_command(packed)
        read_answers(self._connection, 1)


class ChannelListener:
    """A thread that calls back with the lines of each message on a channel."""

    def __init__(self, redis_url: str, channel: str, callback: Callable[[list[str]], None]) -> None:
        """Prepare; nothing runs before :meth:`start`.

        Args:
            redis_url: The broker.
            channel: Whose messages.
            callback: Called on the listener's thread with the lines of a message; must not block.
        """
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=_SOCKET_TIMEOUT_S, health_check_interval=10)
        self._callback = callback
        self._channel = channel
        self._subscription: PubSub | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"listen:{channel}", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and wait for the thread."""
        self._stopping.set()
        subscription = self._subscription
        if subscription is not None:
            # The broker's word that there is nothing more to hear wakes the thread; if it is away, time does.
            with suppress(redis.RedisError):
                subscription.unsubscribe()  # type: ignore[no-untyped-call]
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except redis.RedisError as error:
                _log.warning("channel.disconnected", channel=self._channel, error=str(error), retry_s=_RECONNECT_S)
                self._stopping.wait(_RECONNECT_S)
            except Exception as error:  # noqa: BLE001 - the border: a listener that ends leaves its process deaf
                _log.error("channel.failed", channel=self._channel, error=str(error), exc_info=error)
                self._stopping.wait(_RECONNECT_S)

    def _listen(self) -> None:
        with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:  # type: ignore[no-untyped-call]
            subscription.subscribe(self._channel)
            self._subscription = subscription
            try:
                while not self._stopping.is_set():
                    message = subscription.get_message(timeout=0.5)
                    if message is not None:
                        self._call_back(message["data"])
            finally:
                self._subscription = None

    def _call_back(self, data: bytes) -> None:
        try:
            self._callback(data.decode().split("\n"))
        except Exception as error:  # noqa: BLE001 - the border: one bad message must not deafen us to all others
            _log.error("channel.callback_failed", channel=self._channel, error=str(error), exc_info=error)
