"""A pytest plugin: whoever starts a client or a thread ends it.

A client that is left behind beats on after its server is gone: it takes time from the tests that follow, and complains
in their output. A thread ends with the fixture or the test that started it, our own client's among them. A session of
the SDK, which no thread stands for, ends with its module: what :func:`sdk_client` gave is closed then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Generator
from functools import partial
from typing import Any

import pytest
import tinker
from tinker.lib import internal_client_holder

_GRACE_INI = "leftovers_grace"
_DEFAULT_GRACE_S = 5.0
_POLL_S = 0.01
_LOOP_ANSWERS_S = 60.0
_HEARTBEAT = "InternalClientHolder._session_heartbeat"
# Pools of servers that outlive a test, and of libraries: they grow when they are asked, and end with what has them.
_POOLS = (
    "AnyIO worker thread",
    "tqdm_monitor",
    "tinker-custom-loss",
    "asyncio_",
    "uvloop_",
    "append_",
    "futures_",
    "sql_",
    "jobs-sql_",
    "objects_",
    "listings_",
    "texts_",
    "traces_",
    "question-answers",
    "push_",
    "rewards_",
)
# By what they run: the one thread in which all clients of the SDK live, and connections, which end with their clients.
_SHARED = ("(_background_thread_func)", "(process_request_thread)")

_lent: list[tinker.ServiceClient] = []

Threads = set[threading.Thread]


def sdk_client(url: str, key: str, **options: Any) -> tinker.ServiceClient:
    """The official client. Whoever asks for it need not close it."""
    client = tinker.ServiceClient(base_url=url, api_key=key, **options)
    _lent.append(client)
    return client


def close_sdk_clients(clients: Collection[tinker.ServiceClient]) -> None:
    """Let go of their sessions without a word to the server, which may be gone."""
    for client in clients:
        for holder in (client._session_holder, client._rest_holder):
            if holder is not None:
                holder.close()


class Leftovers:
    """The threads there are, and which of them a fixture answers for."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._known = _threads()
        self._of_fixtures: Threads = set()
        self._known_sessions: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        before = _threads()
        own: Threads = set()
        fixturedef.addfinalizer(partial(self._end_fixture, fixturedef, own))  # the first to be added is called last
        try:
            return (yield)
        finally:
            own |= _threads() - before - self._of_fixtures
            self._of_fixtures |= own

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            left = self._left(lambda: _threads() - self._known - self._of_fixtures)
            self._known = _threads()
            if nextitem is None or nextitem.path != item.path:
                self._end_sdk_sessions(item)
            _require_none(left, f"the test {item.name!r}")

    def _end_fixture(self, fixturedef: pytest.FixtureDef[object], own: Threads) -> None:
        left = self._left(lambda: own & _threads())
        self._of_fixtures -= own
        self._known |= left
        _require_none(left, f"the fixture {fixturedef.argname!r}")

    def _end_sdk_sessions(self, item: pytest.Item) -> None:
        close_sdk_clients(_lent)
        _lent.clear()
        left = self._left(lambda: _beating_sessions() - self._known_sessions)
        self._known_sessions |= left
        if left:
            pytest.fail(f"{item.path.name} leaves sessions of the SDK open: {', '.join(sorted(left))}", pytrace=False)

    def _left(self, look: Callable[[], set[Any]]) -> set[Any]:
        """What is there still after the time it takes to end."""
        ends_at = time.monotonic() + self._grace_s
        while (left := look()) and time.monotonic() < ends_at:
            time.sleep(_POLL_S)
        return left


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(_GRACE_INI, "seconds that what is left behind has to end", default=str(_DEFAULT_GRACE_S))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Leftovers(float(config.getini(_GRACE_INI))))


def _threads() -> Threads:
    return {
        thread
        for thread in threading.enumerate()
        if not thread.name.startswith(_POOLS) and not thread.name.endswith(_SHARED)
    }


def _beating_sessions() -> set[str]:
    """The sessions that are kept alive: their tasks run on the one loop that all clients of the SDK share."""
    loop = internal_client_holder._internal_client_holder_thread_singleton.loop_if_started()
    return set() if loop is None else asyncio.run_coroutine_threadsafe(_beating(), loop).result(_LOOP_ANSWERS_S)


async def _beating() -> set[str]:
    """Looks on the loop itself, where none of them ends meanwhile.

    One that was told to end and beats on is told again: the SDK loses what it is told in the midst of a request, once
    in about fifty.
    """
    found = set()
    for task in asyncio.all_tasks():
        coroutine = task.get_coro()
        if coroutine is not None and coroutine.__qualname__ == _HEARTBEAT and coroutine.cr_frame is not None:
            found.add(str(coroutine.cr_frame.f_locals["session_id"]))
            if task.cancelling():
                task.cancel()
    return found


def _require_none(left: Threads, whose: str) -> None:
    if left:
        names = ", ".join(sorted(thread.name for thread in left))
        pytest.fail(f"{whose} leaves threads behind: {names}", pytrace=False)
