"""What Flower is to the service."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import redis
from celery import Celery

from harness.polling import wait_until


class Watcher:
    """What Flower is to the service: an event receiver that keeps what it sees, until its broker dies."""

    def __init__(self, app: Celery, redis_url: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._app = app
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: _num_subscribers(redis_url), what="the watcher has subscribed")

    def _run(self) -> None:
        with suppress(redis.RedisError, OSError), self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self.events.append})
            receiver.capture(limit=None, timeout=None, wakeup=False)

    def kinds(self, request_id: str) -> list[str]:
        return [event["type"] for event in self.events if event.get("uuid") == request_id]


def _num_subscribers(redis_url: str) -> int:
    with redis.Redis.from_url(redis_url) as client:
        return int(client.pubsub_numpat()) + len(client.pubsub_channels())
