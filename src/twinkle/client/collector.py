"""All open futures of a client, collected over a few held polls however many they are.

A run's operations end in order, so a poll watches the first few of a run and whatever comes behind them needs no poll
of its own. Samples end in any order and are watched one by one.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from dataclasses import dataclass, field
from typing import Any

from twinkle.client.bodies import read_answer
from twinkle.client.errors import ClientClosed
from twinkle.client.future import Future
from twinkle.client.results import decode_result, error_of
from twinkle.client.transport import NATIVE_PREFIX, TINKER_PREFIX, Request, Transport
from twinkle.core.operation import OperationKind
from twinkle.wire.bodies.futures import RetrieveFutureRequest
from twinkle.wire.bodies.native import MAX_COLLECTED_FUTURES, CollectedFuture, CollectRequest, CollectResponse

MAX_POLLS = 8
WATCHED_PER_RUN = 32

_HOLD_S = 30.0
# When there are more than all polls can watch, each makes room for others soon.
_CROWDED_HOLD_S = 1.0
_READ_MARGIN_S = 15.0
_MAX_LARGE_FETCHES = 4

_log = logging.getLogger(__name__)


@dataclass
class _Group:
    """The open futures that end in the order of their numbers."""

    futures: dict[int, list[Future[Any]]] = field(default_factory=dict)
    request_ids: dict[int, str] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)

    def add(self, number: int, request_id: str, future: Future[Any]) -> None:
        if number not in self.futures:
            bisect.insort(self.numbers, number)
            self.request_ids[number] = request_id
        self.futures.setdefault(number, []).append(future)

    def remove(self, number: int) -> list[Future[Any]]:
        if number not in self.futures:
            return []
        del self.numbers[bisect.bisect_left(self.numbers, number)]
        del self.request_ids[number]
        return self.futures.pop(number)


@dataclass(eq=False)
class _Poll:
    """A request that is held until one of these ends; the groups with the highest number it watches of each."""

    request_ids: list[str]
    watched_up_to: dict[str, int]
    task: asyncio.Task[None] | None = None


class Collector:
    """Brings outcomes to their futures. Lives on one event loop."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._groups: dict[str, _Group] = {}
        self._poll_of: dict[str, _Poll] = {}
        self._polls: list[_Poll] = []
        self._waiting: dict[str, None] = {}
        self._is_scheduled = False
        self._large = asyncio.Semaphore(_MAX_LARGE_FETCHES)
        self._fetches: set[asyncio.Task[None]] = set()

    @property
    def num_polls(self) -> int:
        """How many requests are held."""
        return len(self._polls)

    def add(self, request_id: str, future: Future[Any]) -> None:
        """Collect an accepted operation's outcome."""
        name, number = _place_of(request_id)
        self._groups.setdefault(name, _Group()).add(number, request_id, future)
        poll = self._poll_of.get(name)
        if poll is None:
            self._want(name)
        elif number < poll.watched_up_to[name]:
            self._drop(poll)

    async def close(self) -> None:
        """End all polls; what is open then fails with ``ClientClosed``."""
        tasks = [poll.task for poll in self._polls if poll.task is not None] + list(self._fetches)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for group in self._groups.values():
            for number, futures in group.futures.items():
                request_id = group.request_ids[number]
                for future in futures:
                    future.set_exception(ClientClosed(f"closed before {request_id} ended; client.future() collects it"))
        self._groups.clear()

    def _want(self, name: str) -> None:
        self._waiting[name] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._start_polls)

    def _start_polls(self) -> None:
        self._is_scheduled = False
        while self._waiting:
            if len(self._polls) == MAX_POLLS:
                smallest = min(self._polls, key=lambda poll: len(poll.request_ids))
                if len(smallest.request_ids) + len(self._waiting) > MAX_COLLECTED_FUTURES:
                    return
                self._drop(smallest)
            poll = self._fill_poll()
            self._polls.append(poll)
            self._poll_of.update(dict.fromkeys(poll.watched_up_to, poll))
            poll.task = self._loop.create_task(self._hold(poll))

    def _fill_poll(self) -> _Poll:
        poll = _Poll([], {})
        while self._waiting and len(poll.request_ids) < MAX_COLLECTED_FUTURES:
            name = next(iter(self._waiting))
            del self._waiting[name]
            group = self._groups[name]
            room = min(WATCHED_PER_RUN, MAX_COLLECTED_FUTURES - len(poll.request_ids))
            watched = group.numbers[:room]
            poll.request_ids += [group.request_ids[number] for number in watched]
            poll.watched_up_to[name] = watched[-1]
        return poll

    def _drop(self, poll: _Poll) -> None:
        """End a poll early; what it watched waits for another."""
        assert poll.task is not None, "a poll in the list has begun"
        poll.task.cancel()
        self._release(poll)

    def _release(self, poll: _Poll) -> None:
        if poll not in self._polls:
            return
        self._polls.remove(poll)
        for name in poll.watched_up_to:
            del self._poll_of[name]
            if name in self._groups:
                self._want(name)
        if self._waiting:
            self._want(next(iter(self._waiting)))

    async def _hold(self, poll: _Poll) -> None:
        hold_s = _CROWDED_HOLD_S if self._waiting else _HOLD_S
        body = CollectRequest(request_ids=tuple(poll.request_ids), timeout_s=hold_s)
        request = Request(
            path=f"{NATIVE_PREFIX}/futures/collect",
            content=body.model_dump_json().encode(),
            read_timeout_s=hold_s + _READ_MARGIN_S,
        )
        try:
            raw = await self._transport.send(request, gives_up=False)
            for ended in read_answer(CollectResponse, raw).ended:
                self._take(ended)
        except Exception as error:  # noqa: BLE001 - the border: whoever waits hears of it, or would wait for ever
            _log.warning("the server does not say what became of %d operations: %s", len(poll.request_ids), error)
            for request_id in poll.request_ids:
                self._fail(request_id, error)
        finally:
            self._release(poll)

    def _take(self, ended: CollectedFuture) -> None:
        error = error_of(ended)
        if error is not None:
            self._fail(ended.request_id, error)
            return
        assert ended.kind is not None, "what has ended is of some kind"
        if ended.result is None:
            fetch = self._loop.create_task(self._fetch(ended.request_id, ended.kind, self._remove(ended.request_id)))
            self._fetches.add(fetch)
            fetch.add_done_callback(self._fetches.discard)
        else:
            _settle(self._remove(ended.request_id), ended.kind, ended.result)

    async def _fetch(self, request_id: str, kind: OperationKind, futures: list[Future[Any]]) -> None:
        """Get one result that was too large to come along."""
        body = RetrieveFutureRequest(request_id=request_id)
        request = Request(path=f"{TINKER_PREFIX}/retrieve_future", content=body.model_dump_json().encode())
        try:
            async with self._large:
                raw = await self._transport.send(request, gives_up=False)
        except Exception as error:  # noqa: BLE001 - the border: whoever waits hears of it, or would wait for ever
            for future in futures:
                future.set_exception(error)
        except asyncio.CancelledError:
            for future in futures:
                future.set_exception(ClientClosed(f"closed before {request_id} was fetched; client.future() gets it"))
            raise
        else:
            _settle(futures, kind, raw)

    def _fail(self, request_id: str, error: Exception) -> None:
        for future in self._remove(request_id):
            future.set_exception(error)

    def _remove(self, request_id: str) -> list[Future[Any]]:
        name, number = _place_of(request_id)
        group = self._groups.get(name)
        if group is None:
            return []
        futures = group.remove(number)
        if not group.numbers:
            del self._groups[name]
        return futures


def is_sample(request_id: str) -> bool:
    """Whether a future is a sample's."""
    return ":sample:" in request_id


def _place_of(request_id: str) -> tuple[str, int]:
    """The group within which futures end in order, and the place in it."""
    lane, separator, number = request_id.rpartition(":req:")
    if separator and number.isdecimal() and not is_sample(request_id):
        return lane, int(number)
    return request_id, 0


def _settle(futures: list[Future[Any]], kind: OperationKind, raw: bytes) -> None:
    for future in futures:
        try:
            result = decode_result(kind, raw)
        except Exception as error:  # noqa: BLE001 - the border: whoever waits hears of it, or would wait for ever
            future.set_exception(error)
        else:
            future.set_result(result)
