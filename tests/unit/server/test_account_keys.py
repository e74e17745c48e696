"""Looking up API keys: seldom, once for many, and also while the database is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest

from harness.clock import HandClock
from twinkle.core.errors import StorageUnavailable, Unauthenticated
from twinkle.server.auth import Keys
from twinkle.server.threads import Threads
from twinkle.storage.directory import Directory


class MemoryDirectory:
    """Keys in a dictionary; counts who asks."""

    def __init__(self) -> None:
        self.tenants = {"tml-a": "t"}
        self.num_lookups = 0
        self.is_away = False

    def tenant_of(self, key: str) -> str | None:
        self.num_lookups += 1
        if self.is_away:
            raise StorageUnavailable("away")
        return self.tenants.get(key)


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads("keys", 2)
    yield threads
    threads.stop()


async def test_many_requests_with_one_key_ask_once(threads: Threads) -> None:
    directory = MemoryDirectory()
    keys = Keys(cast(Directory, directory), HandClock(), threads)

    tenants = await asyncio.gather(*(keys.tenant_of("tml-a") for _ in range(100)))
    tenants.append(await keys.tenant_of("tml-a"))

    assert set(tenants) == {"t"}
    assert directory.num_lookups == 1


async def test_a_revoked_key_ends_soon_and_a_new_one_begins_sooner(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    keys = Keys(cast(Directory, directory), clock, threads)
    await keys.tenant_of("tml-a")
    with pytest.raises(Unauthenticated):
        await keys.tenant_of("tml-b")
    directory.tenants = {"tml-b": "t"}

    clock.move(3)
    assert await keys.tenant_of("tml-b") == "t"
    clock.move(30)
    with pytest.raises(Unauthenticated):
        await keys.tenant_of("tml-a")


async def test_a_key_that_was_right_goes_on_being_right_while_the_database_is_away(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    keys = Keys(cast(Directory, directory), clock, threads)
    await keys.tenant_of("tml-a")
    directory.is_away = True

    clock.move(120)
    assert await keys.tenant_of("tml-a") == "t"
    with pytest.raises(StorageUnavailable):
        await keys.tenant_of("tml-b")
    clock.move(3600)
    with pytest.raises(StorageUnavailable):
        await keys.tenant_of("tml-a")


@pytest.mark.parametrize("key", [None, "", "sk-other", "tml-" + "x" * 1000])
async def test_what_is_no_key_is_not_even_looked_up(threads: Threads, key: str | None) -> None:
    directory = MemoryDirectory()

    with pytest.raises(Unauthenticated):
        await Keys(cast(Directory, directory), HandClock(), threads).tenant_of(key)
    assert directory.num_lookups == 0
