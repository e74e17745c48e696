"""The client for plain scripts: the asynchronous one, run by a thread of its own."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from twinkle.client.async_client import AsyncClient
from twinkle.client.facade import Facade, LoopThread, blocking, direct
from twinkle.client.files import Files
from twinkle.client.jobs import Jobs

_EXIT_FLUSH_S = 30.0


class Client(Facade[AsyncClient]):
    """A tenant's way to a Twinkle server. Blocks only to ask; operations return futures at once.

    A context manager, and safe to use from any thread, also from one whose event loop runs. A script that ends without
    closing it still hands over what it has submitted.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        tags: Sequence[str] = (),
        session_key: str | None = None,
        give_up_after_s: float = 300.0,
    ) -> None:
        """As :class:`AsyncClient`."""

        async def make() -> AsyncClient:
            return AsyncClient(base_url, api_key, tags=tags, session_key=session_key, give_up_after_s=give_up_after_s)

        thread = LoopThread("twinkle-client")
        try:
            super().__init__(thread, thread.run(make()))
        except BaseException:
            thread.stop()
            raise
        self._is_closed = False
        self.jobs = Jobs(thread, self._inner.jobs)
        self.files = Files(thread, self._inner.files)
        atexit.register(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    create_run = blocking(AsyncClient.create_run)
    resume_run = blocking(AsyncClient.resume_run)
    attach = blocking(AsyncClient.attach)
    fork_run = blocking(AsyncClient.fork_run)
    rewind_run = blocking(AsyncClient.rewind_run)
    history = blocking(AsyncClient.history)
    sampler = blocking(AsyncClient.sampler)
    future = direct(AsyncClient.future)
    models = blocking(AsyncClient.models)
    runs = blocking(AsyncClient.runs)
    checkpoints = blocking(AsyncClient.checkpoints)
    create_access_token = blocking(AsyncClient.create_access_token)
    access_tokens = blocking(AsyncClient.access_tokens)
    revoke_access_token = blocking(AsyncClient.revoke_access_token)
    flush = blocking(AsyncClient.flush)

    def close(self, *, flush_timeout_s: float = 60.0) -> None:
        """As :meth:`AsyncClient.close`; doing it again changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        self._thread.run(self._inner.close(flush_timeout_s=flush_timeout_s))
        self._thread.stop()

    def _close_at_exit(self) -> None:
        self.close(flush_timeout_s=_EXIT_FLUSH_S)
