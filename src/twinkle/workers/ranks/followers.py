"""The processes of ranks 1 and up: started, told what to do, watched, and never outlived by a mesh that lost one."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NoReturn

import structlog

from twinkle.core.settings import Settings
from twinkle.infra.platform import Platform
from twinkle.infra.process_group import join_store, open_store
from twinkle.infra.rank_end import patience_s
from twinkle.infra.rank_group import RankGroup
from twinkle.workers.ranks.commands import RankOrder, Reply
from twinkle.workers.ranks.world import end_process

_MODULE = "twinkle.workers.ranks.follower"
_STOP_S = 10.0

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The first message to a follower: who it is, and where all ranks meet."""

    settings: Settings
    rank: int
    port: int


@dataclass(frozen=True, kw_only=True)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    channel: Connection
    """Over the link."""
    said: queue.SimpleQueue[Reply] = field(default_factory=queue.SimpleQueue)
    """What it has answered, and nobody has looked at yet."""


class Followers:
    """All ranks but the first, children of this process on this machine.

    A follower ends when this process does: the other end of its channel closes, and on Linux the kernel ends it. When
    a follower ends, this process does.
    """

    def __init__(self, settings: Settings, *, give_up: Callable[[str], NoReturn] = end_process) -> None:
        """Start them. To be called by the main thread: the kernel ties them to the thread that starts them."""
        self._settings = settings
        self._give_up = give_up
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._num_sent = self._num_answered = 0
        self._sent_s = 0.0
        self._listeners: list[threading.Thread] = []
        self._timers: list[threading.Timer] = []
        self._store, self._port = open_store(size=settings.ranks, timeout_s=settings.rank_timeout_s)
        self._followers = [self._start(rank) for rank in range(1, settings.ranks)]

    def meet(self) -> RankGroup:
        """Wait for all followers to join; this process's place as rank 0.

        Raises:
            ConfigError: The machine has no device for this rank.
        """
        platform = Platform.named(self._settings.device)
        return join_store(
            platform, self._store, rank=0, size=self._settings.ranks, timeout_s=self._settings.rank_timeout_s
        )

    @property
    def pids(self) -> list[int]:
        """The followers' processes, by rank."""
        return [follower.process.pid for follower in self._followers]

    def send(self, order: RankOrder) -> None:
        """Tell every follower; blocks while a channel is full."""
        message = pickle.dumps(order)
        with self._lock:
            self._num_sent += 1
            self._sent_s = time.monotonic()
        for follower in self._followers:
            try:
                follower.channel.send_bytes(message)
            except OSError as error:
                self.give_up(f"rank {follower.rank} takes no orders: {error}")

    def replies(self) -> list[Reply]:
        """What each follower says about the last order. Blocks until all have answered."""
        replies = [self._reply_of(follower) for follower in self._followers]
        with self._lock:
            self._num_answered = self._num_sent
            timers, self._timers = self._timers, []
        for timer in timers:
            timer.cancel()
            timer.join()
        return replies

    def hasten(self, rank: int, error: str) -> None:
        """A rank has failed with the last order: the others are waited for no longer than they may need themselves."""
        with self._lock:
            left_s = patience_s(time.monotonic() - self._sent_s)
            reason = f"rank {rank} ended an order with {error}, and for {left_s:.0f} s the others have not ended it"
            timer = threading.Timer(left_s, self._give_up_on, (self._num_sent, reason))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    def give_up(self, reason: str) -> NoReturn:
        """The ranks are out of step or incomplete: nothing more can be done together."""
        self._give_up(reason)

    def close(self) -> None:
        """Let them end, or make them."""
        self._closing.set()
        for follower in self._followers:
            with suppress(OSError):  # it has gone already
                follower.link.shutdown(socket.SHUT_RDWR)
        for follower in self._followers:
            try:
                follower.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        for listener in self._listeners:
            listener.join()
        for follower in self._followers:
            follower.channel.close()
            follower.link.close()

    def _start(self, rank: int) -> _Follower:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        follower = _Follower(rank=rank, process=process, link=ours, channel=Connection(os.dup(ours.fileno())))
        threading.Thread(target=self._watch, args=(follower,), name=f"watch rank {rank}", daemon=True).start()
        self._listeners.append(
            threading.Thread(target=self._listen, args=(follower,), name=f"hear rank {rank}", daemon=True)
        )
        self._listeners[-1].start()
        follower.channel.send(Welcome(settings=self._settings, rank=rank, port=self._port))
        _log.info("rank.started", rank=rank, pid=process.pid)
        return follower

    def _watch(self, follower: _Follower) -> None:
        exit_code = follower.process.wait()
        if not self._closing.is_set():
            self.give_up(f"rank {follower.rank} (pid {follower.process.pid}) ended with code {exit_code}")

    def _listen(self, follower: _Follower) -> None:
        """Hear what a follower says also while this rank waits for it in the middle of a collective."""
        while True:
            try:
                reply = follower.channel.recv()
            except (EOFError, OSError) as error:
                if not self._closing.is_set():
                    self.give_up(f"rank {follower.rank} is gone: {error}")
                return
            assert isinstance(reply, Reply)
            if reply.error is not None:
                self.hasten(follower.rank, reply.error)
            follower.said.put(reply)

    def _reply_of(self, follower: _Follower) -> Reply:
        timeout_s = self._settings.rank_timeout_s
        try:
            return follower.said.get(timeout=timeout_s)
        except queue.Empty:
            self.give_up(f"rank {follower.rank} has not answered for {timeout_s:.0f} s")

    def _give_up_on(self, number: int, reason: str) -> None:
        with self._lock:
            is_pending = self._num_sent == number > self._num_answered
        if is_pending and not self._closing.is_set():
            self.give_up(reason)
