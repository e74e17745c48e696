"""Long polls: a waiter is registered first, the journal is read second, so no completion falls between the two.

One listener, one query per batch for all waiters, one sweep as safety net. A poll that follows its submission at once
asks the journal nothing: this process has just written the row, and hears when it changes. What is heard goes to the
thread that reads, and only what was read comes to the event loop; an outcome that is there before its poll is kept for
it, for a moment.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

import structlog

from twinkle.core.errors import NotFound, StorageUnavailable
from twinkle.core.operation import Accepted, FutureStatus, OperationState, Submission
from twinkle.core.process.background import say_if_it_ends
from twinkle.storage.journal.answers import OwnedStatus
from twinkle.storage.journal.journal import Journal

_SWEEP_S = 1.0
_MAX_IDS_PER_QUERY = 500
_MAX_KEPT_BYTES = 4 * 2**20
"""Of outcomes that nobody has asked for yet."""

_log = structlog.get_logger()


class _Waiter:
    """One held poll, for one future or for several."""

    def __init__(self, tenant: str, request_ids: Iterable[str]) -> None:
        self.tenant = tenant
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.statuses: dict[str, OwnedStatus | None] = {}
        self._unseen = set(request_ids)
        self._has_news = False

    def see(self, request_id: str, status: OwnedStatus | None) -> None:
        """Take note of how one stands; the wait ends with one that is final, missing or somebody else's.

        But not before all were looked at: whoever asks for several gets all that have ended.
        """
        mine = status if status is not None and status.tenant == self.tenant else None
        self.statuses[request_id] = mine
        self._unseen.discard(request_id)
        self._has_news |= mine is None or mine.status.state.is_final
        if self._has_news and not self._unseen:
            self.settle()

    def settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the wait: what went wrong will not pass."""
        if not self.settled.done():
            self.settled.set_exception(error)


@dataclass
class _Noted:
    """One operation that was sent to this process a moment ago."""

    at: float
    owned: OwnedStatus | None = None
    """How it stands, once that is known: as it was accepted, or as it ended."""
    has_ended: bool = False

    @property
    def held_bytes(self) -> int:
        """What it holds of an outcome."""
        result = None if self.owned is None else self.owned.status.result
        return 0 if result is None or result.inline is None else len(result.inline)


class _JustAccepted:
    """What this process accepted a moment ago: that it waits, and once somebody has called it done what came of it.

    An id is noted before its transaction begins, so that a notice which overtakes the answer of the commit counts. It
    is forgotten after one sweep: a notice that was lost costs what it costs everybody else. Notices come on a thread of
    their own, and outcomes on the reader's.
    """

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._lock = threading.Lock()
        self._noted: dict[str, _Noted] = {}
        self._held_bytes = 0

    def expect(self, request_id: str, now: float) -> None:
        """It may be accepted soon."""
        with self._lock:
            self._drop(request_id)
            self._noted[request_id] = _Noted(now)
            self._drop_old(now)

    def accept(self, owned: OwnedStatus) -> None:
        """It is written, as new."""
        with self._lock:
            noted = self._noted.get(owned.status.request_id)
            if noted is not None and not noted.has_ended:
                noted.owned = owned

    def end(self, request_ids: Iterable[str]) -> None:
        """They are done: nothing is known of them until it is read."""
        with self._lock:
            for request_id in request_ids:
                noted = self._noted.get(request_id)
                if noted is not None and not noted.has_ended:
                    noted.owned, noted.has_ended = None, True

    def is_to_read(self, request_id: str) -> bool:
        """Whether it is done, and whoever submitted it here will ask for it in a moment."""
        with self._lock:
            noted = self._noted.get(request_id)
            return noted is not None and noted.has_ended and noted.owned is None

    def learn(self, owned: OwnedStatus) -> None:
        """What came of one that is done, kept for whoever asks first, if it is small."""
        with self._lock:
            noted = self._noted.get(owned.status.request_id)
            if noted is None or not noted.has_ended or not owned.status.state.is_final:
                return
            noted.owned = owned
            self._held_bytes += noted.held_bytes
            if self._held_bytes > _MAX_KEPT_BYTES:
                self._drop(owned.status.request_id)

    def forget(self, request_id: str) -> None:
        """It was not new, or whoever wants to know does."""
        with self._lock:
            self._drop(request_id)

    def forget_old(self, now: float) -> None:
        """Keep nothing for longer than it is good for."""
        with self._lock:
            self._drop_old(now)

    def get(self, request_id: str, tenant: str, now: float) -> OwnedStatus | None:
        """How it stands, if that is known without asking; an outcome only once."""
        with self._lock:
            noted = self._noted.get(request_id)
            if noted is None or noted.owned is None or noted.owned.tenant != tenant:
                return None
            if noted.has_ended:
                self._drop(request_id)
            return noted.owned if now - noted.at < self._lifetime_s else None

    def _drop_old(self, now: float) -> None:
        # The oldest first: a dictionary keeps the order.
        while self._noted and (oldest := next(iter(self._noted.items())))[1].at < now - self._lifetime_s:
            self._drop(oldest[0])

    def _drop(self, request_id: str) -> None:
        noted = self._noted.pop(request_id, None)
        if noted is not None and noted.has_ended:
            self._held_bytes -= noted.held_bytes


class Futures:
    """Everyone who waits for an outcome. Lives on one event loop; only :meth:`notify` is for other threads."""

    def __init__(self, journal: Journal, *, sweep_s: float = _SWEEP_S) -> None:
        self._journal = journal
        self._sweep_s = sweep_s
        self._reader = threading.Thread(target=self._read_forever, name="futures", daemon=True)
        # Changed on the event loop only; the reader asks who is in it.
        self._waiters: dict[str, set[_Waiter]] = {}
        self._just_accepted = _JustAccepted(sweep_s)
        self._unread: set[str] = set()
        self._to_read: SimpleQueue[Sequence[str] | None] = SimpleQueue()
        self._released = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read and to sweep. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="futures")
        say_if_it_ends(self._sweeper)
        self._reader.start()

    async def stop(self) -> None:
        """End; nobody may wait any more."""
        assert self._sweeper is not None, "stop() follows start()"
        self._sweeper.cancel()
        await asyncio.wait([self._sweeper])
        self._to_read.put(None)
        await asyncio.to_thread(self._reader.join)

    def release(self) -> None:
        """Let all held polls go, and those to come: the server is about to stop."""
        self._released = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.settle()

    @property
    def num_waiting(self) -> int:
        """How many polls are held."""
        return sum(len(waiters) for waiters in self._waiters.values())

    def notify(self, request_ids: list[str]) -> None:
        """Hear that these futures may be done. Callable from any thread, also when the loop is about to end."""
        # Noted first, looked for among the waiters second; a poll registers first and asks what is known second.
        self._just_accepted.end(request_ids)
        self._to_read.put(request_ids)

    def expect(self, request_ids: Iterable[str]) -> None:
        """Hear that these are about to be accepted here; :meth:`accepted` says whether they were."""
        now = asyncio.get_running_loop().time()
        for request_id in request_ids:
            self._just_accepted.expect(request_id, now)

    def accepted(self, submission: Submission, answer: Accepted) -> None:
        """Hear what became of an expected one: it was written, or it had been before and may be done by now."""
        if not answer.is_new:
            self._just_accepted.forget(answer.request_id)
            return
        status = FutureStatus(
            request_id=answer.request_id,
            kind=submission.kind,
            state=OperationState.QUEUED,
            lane=submission.lane,
            seq=submission.seq,
            attempt=0,
            result=None,
            failure=None,
        )
        self._just_accepted.accept(OwnedStatus(tenant=submission.tenant, mesh=answer.mesh, status=status))

    async def wait(self, request_id: str, tenant: str, timeout_s: float) -> OwnedStatus:
        """The future's status: final, or the latest one when the time is up.

        Raises:
            NotFound: There is no such future, or it is another tenant's.
            StorageUnavailable: The journal could not be read in all this time.
        """
        status = (await self.wait_any([request_id], tenant, timeout_s))[request_id]
        if status is None:
            raise NotFound(f"no future {request_id!r}")
        return status

    async def wait_any(
        self, request_ids: Sequence[str], tenant: str, timeout_s: float
    ) -> dict[str, OwnedStatus | None]:
        """What is known of several futures as soon as one of them is final, or when the time is up.

        ``None`` stands for one that does not exist or is another tenant's, which ends the wait too; one that could not
        be read yet is left out.

        Raises:
            StorageUnavailable: The journal could not be read in all this time.
            StatementFailed: It cannot be read at all.
        """
        loop = asyncio.get_running_loop()
        waiter, now = _Waiter(tenant, request_ids), loop.time()
        for request_id in request_ids:
            self._waiters.setdefault(request_id, set()).add(waiter)
            known = self._just_accepted.get(request_id, tenant, now)
            if known is not None:
                waiter.see(request_id, known)
        self._want(request_id for request_id in request_ids if request_id not in waiter.statuses)
        if self._released:
            waiter.settle()
        alarm = loop.call_later(timeout_s, waiter.settle)
        try:
            await waiter.settled
        finally:
            alarm.cancel()
            for request_id in set(request_ids):
                self._waiters[request_id].discard(waiter)
                if not self._waiters[request_id]:
                    del self._waiters[request_id]
        if not waiter.statuses:
            raise StorageUnavailable("the journal could not be read")
        return waiter.statuses

    def _want(self, request_ids: Iterable[str]) -> None:
        """Have these read, together with all that is wanted before the loop comes round."""
        had_unread = bool(self._unread)
        self._unread.update(request_ids)
        if self._unread and not had_unread:
            asyncio.get_running_loop().call_soon(self._ask)

    def _ask(self) -> None:
        self._to_read.put(list(self._unread))
        self._unread = set()

    def _read_forever(self) -> None:
        """Read what anybody waits for; runs on the reader's thread."""
        while (first := self._to_read.get()) is not None:
            asked = dict.fromkeys(first)
            try:
                while (more := self._to_read.get_nowait()) is not None:
                    asked.update(dict.fromkeys(more))
            except Empty:
                pass
            else:
                return
            wanted = [
                request_id
                for request_id in asked
                if request_id in self._waiters or self._just_accepted.is_to_read(request_id)
            ]
            for start in range(0, len(wanted), _MAX_IDS_PER_QUERY):
                self._look(wanted[start : start + _MAX_IDS_PER_QUERY])

    def _look(self, request_ids: Sequence[str]) -> None:
        try:
            statuses = self._journal.statuses(request_ids)
        except StorageUnavailable as error:
            _log.warning(
                "futures.read_failed", error=error.message, waiting=len(request_ids), next="the sweep asks again"
            )
        except Exception as error:  # noqa: BLE001 - the border: those who wait are told, whatever it is
            self._tell(partial(self._fail, request_ids, error))
        else:
            waiting = [request_id for request_id in request_ids if request_id in self._waiters]
            for request_id in set(request_ids) - set(waiting):
                if request_id in statuses:
                    self._just_accepted.learn(statuses[request_id])
            if waiting:
                self._tell(partial(self._see, waiting, statuses))

    def _tell(self, news: Callable[[], None]) -> None:
        assert self._loop is not None, "the reader begins with start()"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(news)

    def _see(self, request_ids: Sequence[str], statuses: Mapping[str, OwnedStatus]) -> None:
        for request_id in request_ids:
            self._just_accepted.forget(request_id)
            for waiter in self._waiters.get(request_id, ()):
                waiter.see(request_id, statuses.get(request_id))

    def _fail(self, request_ids: Sequence[str], error: Exception) -> None:
        for waiter in {waiter for request_id in request_ids for waiter in self._waiters.get(request_id, ())}:
            waiter.fail(error)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            self._want(tuple(self._waiters))
