"""What all parts of one client share: the event loop, the way to the server, the collector, background work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import httpx

from twinkle.client.backoff import RetryPolicy
from twinkle.client.bodies import read_answer, to_json
from twinkle.client.collector import Collector, is_sample
from twinkle.client.endpoint import Endpoint
from twinkle.client.errors import ClientClosed, TwinkleError
from twinkle.client.future import Future
from twinkle.client.promise import Promise
from twinkle.client.transport import NATIVE_PREFIX, TINKER_PREFIX, Request, Transport
from twinkle.core.ids import new_id
from twinkle.wire.bodies.base import RequestBody, ResponseBody
from twinkle.wire.bodies.futures import CancelFutureRequest, FutureResponse
from twinkle.wire.bodies.native import StandingResponse

P = ParamSpec("P")
ResponseT = TypeVar("ResponseT", bound=ResponseBody)


class Connection:
    """One client's connection. Lives on the event loop it is made on; only :meth:`call_soon` is for other threads."""

    def __init__(
        self, endpoint: Endpoint, policy: RetryPolicy, *, carrier: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Connect nothing yet; ``carrier`` is how requests travel, over the network if nothing is said."""
        self.loop = asyncio.get_running_loop()
        self.transport = Transport(endpoint, policy, carrier=carrier)
        self.collector = Collector(self.transport)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_unsent = 0
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._is_closed = False

    @property
    def num_unsent(self) -> int:
        """How many operations were handed over and are not accepted yet."""
        return self._num_unsent

    def call_soon(self, callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have something called on the loop, in the order of the calls of this method. Callable from any thread.

        Raises:
            ClientClosed: It is too late.
        """
        if self._is_closed or self.loop.is_closed():
            raise ClientClosed("the client is closed")
        self.loop.call_soon_threadsafe(lambda: callback(*args, **kwargs))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin something in the background."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def new_future(self, *, for_sample: bool = False) -> Future[Any]:
        """A future of this client's loop. Callable from any thread."""
        ask_to_cancel = self._ask_to_cancel if for_sample else None
        return Future(self.loop, ask_status=self._ask_status, ask_to_cancel=ask_to_cancel)

    def follow(self, request_id: str) -> Future[Any]:
        """A future for an operation that was accepted earlier. Callable from any thread."""
        future = self.new_future(for_sample=is_sample(request_id))
        future.begin()
        future.set_accepted(request_id)
        self.call_soon(self.collector.add, request_id, future)
        return future

    async def ask(
        self,
        path: str,
        answer_class: type[ResponseT],
        body: RequestBody | None = None,
        *,
        method: str = "GET",
        key: str | None = None,
    ) -> ResponseT:
        """One call that is answered at once, done once however often it is sent; raises as :meth:`Transport.send`.

        The ``method`` is that of a call without a body; one with a body is a POST. With a ``key`` of one's own it is
        the same call whoever sends it.
        """
        if body is None:
            request = Request(path=path, method=method)
        else:
            request = Request(path=path, content=to_json(body), headers={"X-Idempotency-Key": key or new_id()})
        return read_answer(answer_class, await self.transport.send(request))

    async def submit(self, request: Request, future: Future[Any]) -> None:
        """Hand one operation over; the future is accepted then, and collected from then on.

        Raises:
            TwinkleError: It was refused, or could not be handed over; the future is left as it is.
        """
        ticket = read_answer(FutureResponse, await self.transport.submit(request))
        future.set_accepted(ticket.request_id)
        self.collector.add(ticket.request_id, future)

    def note_unsent(self, number: int) -> None:
        """Count operations that are on their way, for :meth:`flush`."""
        self._num_unsent += number
        if self._num_unsent:
            self._all_sent.clear()
        else:
            self._all_sent.set()

    async def flush(self) -> None:
        """Return when everything that was handed over so far is accepted or has failed."""
        await self._all_sent.wait()

    async def close(self) -> None:
        """End all background work; what is open fails with ``ClientClosed``."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.collector.close()
        await self.transport.close()

    def _ask_status(self, future: Future[Any]) -> Promise[StandingResponse]:
        status: Promise[StandingResponse] = Promise(self.loop)
        self.call_soon(lambda: self.spawn(self._look_up(future, status)))
        return status

    async def _look_up(self, future: Future[Any], status: Promise[StandingResponse]) -> None:
        try:
            request_id = await future.accepted()
            status.set_result(await self.ask(f"{NATIVE_PREFIX}/futures/{request_id}", StandingResponse))
        except Exception as error:  # noqa: BLE001 - the border: whoever waits hears of it, or would wait for ever
            status.set_exception(error)
        except asyncio.CancelledError:
            status.set_exception(ClientClosed("closed before the server answered"))
            raise

    def _ask_to_cancel(self, future: Future[Any]) -> None:
        self.call_soon(lambda: self.spawn(self._cancel(future)))

    async def _cancel(self, future: Future[Any]) -> None:
        try:
            request_id = await future.accepted()
            body = CancelFutureRequest(request_id=request_id)
            await self.transport.send(Request(path=f"{TINKER_PREFIX}/cancel_future", content=to_json(body)))
        except TwinkleError:
            # Nobody waits for this; the future ends with the outcome, as if it had not been asked.
            return
