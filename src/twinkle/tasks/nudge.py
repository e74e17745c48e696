"""Nudges: Celery messages that say "look at the journal". Losing, doubling or reordering one is harmless."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import redis
import structlog
from celery import Celery

from twinkle.scheduler.channels import read_answers
from twinkle.tasks.app import mesh_queue

# A bell that nobody takes down (its worker died) comes down by itself; the sweep works meanwhile.
_BELL_TTL_MS = 30_000
_SOCKET_TIMEOUT_S = 5.0
PUMP = "mesh.pump"

_log = structlog.get_logger()


def bell_key(mesh: str) -> str:
    """The flag that is up while a nudge is under way or the worker is awake.

    The worker takes it down before its last look into the journal, so whatever was written while the bell was up is
    seen, whether the worker heard of it or not.
    """
    return f"twinkle.bell.{mesh}"


def ring_channel(mesh: str) -> str:
    """Where rings go while the bell is up: an awake worker hears them without a Celery message."""
    return f"twinkle.ring.{mesh}"


def send_pump(app: Celery, connection: redis.Redis, mesh: str) -> bool:
    """Raise the bell and send the Celery message of a nudge; false when the bell was up already."""
    was_down = bool(_raise_bell(connection, mesh))
    if was_down:
        _send(app, mesh)
    return was_down


def _raise_bell(connection: redis.Redis, mesh: str) -> object:
    return connection.set(bell_key(mesh), 1, nx=True, px=_BELL_TTL_MS)


def _send(app: Celery, mesh: str) -> None:
    app.send_task(PUMP, queue=mesh_queue(mesh), shadow=f"{PUMP}[{mesh}]", retry=False)


def register_pump(app: Celery, pump: Callable[[], None]) -> None:
    """Make ``pump`` what the application does when it is nudged.

    The message is acknowledged before the work (it says nothing that the journal does not), carries no payload and
    leaves no result. It is not shown as a task: the operations are, and there would be as many nudges among them.
    """
    app.task(name=PUMP, shared=False, acks_late=False, ignore_result=True, send_events=False)(pump)


class Nudger:
    """Rings the bell of a mesh. What the broker answers is heard by a thread of its own: no request waits for it.

    The first ring is sent by whoever rings, which spares the worker a change of threads; those that come before it was
    answered are sent by the thread. So what is on its way to the broker is one command at most, and sending never
    waits either.
    """

    def __init__(self, app: Celery, redis_url: str) -> None:
        self._app = app
        # One connection, and its commands as they go over the wire: this happens with every transaction, and a pipeline
        # would cost five times as much.
        pool = redis.Redis.from_url(redis_url, socket_timeout=_SOCKET_TIMEOUT_S).connection_pool
        # redis-py has no types for it.
        self._connection: Any = pool.make_connection()
        self._packed: dict[str, list[bytes]] = {}
        self._is_free = False
        """Whether the connection stands and owes no answer. The thread has it to itself otherwise."""
        self._asked: str | None = None
        """The mesh whose ring was sent and not answered yet."""
        self._wanted: set[str] = set()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="nudger", daemon=True)

    def start(self) -> None:
        """Begin to ring."""
        self._thread.start()

    def stop(self) -> None:
        """Ring what is left, then end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def ring(self, mesh: str) -> None:
        """Wake a mesh, now or soon. Callable from any thread; returns at once and never raises."""
        with self._changed:
            if self._is_free and self._send_now(mesh):
                self._asked, self._is_free = mesh, False
            else:
                self._wanted.add(mesh)
            self._changed.notify()

    def _send_now(self, mesh: str) -> bool:
        try:
            self._connection.send_packed_command(self._pack(mesh))
        except redis.RedisError:
            # The thread connects anew.
            self._is_free = False
            return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._wanted or self._stopping)
                asked, self._asked = self._asked, None
                meshes, self._wanted = self._wanted, set()
                self._is_free = False
                if asked is None and not meshes:
                    self._connection.disconnect()
                    return
            if asked is not None:
                self._ring_now(asked, is_sent=True)
            for mesh in meshes:
                self._ring_now(mesh)
            with self._changed:
                self._is_free = self._connection.is_connected

    def _ring_now(self, mesh: str, *, is_sent: bool = False) -> None:
        """Ring, unless that was sent already; send the Celery message if the bell was down."""

        def ask() -> bool:
            if not is_sent:
                self._connection.send_packed_command(self._pack(mesh))
            return self._was_down()

        def begin_anew(_: Exception) -> None:
            nonlocal is_sent
            is_sent = False
            self._connection.disconnect()

        try:
            if self._connection.retry.call_with_retry(ask, begin_anew):
                _send(self._app, mesh)
        except Exception as error:  # noqa: BLE001 - the border: whatever the broker's client meets, the next ring must work
            _log.warning("nudge.failed", mesh=mesh, error=str(error), next="the sweep nudges again")

    def _pack(self, mesh: str) -> list[bytes]:
        """Raise the bell and tell an awake worker, who is in a hurry, in one round trip."""
        if mesh not in self._packed:
            bell = ("SET", bell_key(mesh), 1, "NX", "PX", _BELL_TTL_MS)
            self._packed[mesh] = self._connection.pack_commands([bell, ("PUBLISH", ring_channel(mesh), "")])
        return self._packed[mesh]

    def _was_down(self) -> bool:
        """Whether the bell was, as the broker answers."""
        raised, _ = read_answers(self._connection, 2)
        return raised is not None
