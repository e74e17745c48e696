"""Polls that are held until any sample of a sampling client ends: one for a client instead of one for a sample."""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from twinkle.core.errors import StorageUnavailable
from twinkle.server.answering.held_polls import HeldPolls, Waiter
from twinkle.server.threads import Threads
from twinkle.storage.journal.forgotten import SEQS_PER_CLIENT
from twinkle.storage.sampling.sampling_sessions import EndedSample, SamplePoll, SamplingSessions

_SWEEP_S = 1.0
_MAX_ANSWERED = 1000
_MAX_POLLS_PER_QUERY = 500

_log = structlog.get_logger()


class _Client(Waiter):
    """It is woken when one of its samples has ended."""

    def __init__(self, poll: SamplePoll) -> None:
        super().__init__()
        self.poll = poll


class LanePolls(HeldPolls[_Client]):
    """Everyone who waits for samples of a lane's client. Lives on one event loop; only :meth:`notify` is for others."""

    def __init__(self, samples: SamplingSessions, threads: Threads, *, sweep_s: float = _SWEEP_S) -> None:
        super().__init__(sweep_s=sweep_s)
        self._samples = samples
        self._threads = threads

    def notify(self, request_ids: list[str]) -> None:
        """Hear that these futures may be done. Callable from any thread, also when the loop is about to end."""
        parts = [request_id.rpartition(":req:") for request_id in request_ids]
        self._tell({_key(lane, int(seq) // SEQS_PER_CLIENT) for lane, _, seq in parts if seq.isdecimal()})

    async def wait(self, lane: str, *, client: int, after: int, timeout_s: float) -> list[EndedSample]:
        """What of a client's samples ended after number ``after``; nothing when the time is up.

        Raises:
            StorageUnavailable: The journal could not be read.
        """
        ended = await self._held(
            _key(lane, client),
            _Client(SamplePoll(lane=lane, client=client, after=after)),
            read=partial(self._threads.run, self._samples.ended, lane, client=client, after=after, limit=_MAX_ANSWERED),
            is_enough=bool,
            timeout_s=timeout_s,
        )
        return ended or []

    async def _sweep(self) -> None:
        waiters = [waiter for held in self._waiters.values() for waiter in held]
        for start in range(0, len(waiters), _MAX_POLLS_PER_QUERY):
            await self._wake_some(waiters[start : start + _MAX_POLLS_PER_QUERY])

    async def _wake_some(self, waiters: list[_Client]) -> None:
        query = asyncio.create_task(self._threads.run(self._samples.having_ended, [waiter.poll for waiter in waiters]))
        await asyncio.wait([query])
        error = query.exception()
        if isinstance(error, StorageUnavailable):
            _log.warning("lane_polls.read_failed", error=error.message, held=len(waiters), next="the sweep asks again")
        elif error is not None:
            # They read for themselves, and tell their clients what came of it.
            for waiter in waiters:
                waiter.woken.set()
        else:
            for place in query.result():
                waiters[place].woken.set()


def _key(lane: str, client: int) -> str:
    return f"{lane}#{client}"
