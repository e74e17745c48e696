"""What many requests want at once is looked up once; what is to run for ever is missed when it ends."""

from __future__ import annotations

import asyncio

import pytest

from twinkle.core.errors import StorageUnavailable
from twinkle.server.threads import Shared


class Source:
    """Answers when it may, with how often it was asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def look_up(self) -> int:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return self.num_asked


async def test_many_at_once_share_a_look_up_and_the_next_one_begins_anew() -> None:
    shared, source = Shared[int](), Source()
    asking = [asyncio.create_task(shared.get("a", source.look_up)) for _ in range(10)]
    await asyncio.sleep(0)
    source.may_answer.set()

    assert await asyncio.gather(*asking) == [1] * 10
    assert await shared.get("a", source.look_up) == 2


async def test_other_names_are_looked_up_beside_it() -> None:
    shared, source = Shared[int](), Source()
    asking = [asyncio.create_task(shared.get(name, source.look_up)) for name in "abab"]
    await asyncio.sleep(0)
    source.may_answer.set()

    await asyncio.gather(*asking)
    assert source.num_asked == 2


async def test_all_are_told_what_went_wrong_and_the_next_one_tries_again() -> None:
    shared, source = Shared[int](), Source()
    source.may_answer.set()
    source.error = StorageUnavailable("away")

    told = await asyncio.gather(*[shared.get("a", source.look_up) for _ in range(3)], return_exceptions=True)
    source.error = None

    assert [type(one) for one in told] == [StorageUnavailable] * 3
    assert await shared.get("a", source.look_up) == 2


async def test_who_leaves_takes_nothing_from_the_others() -> None:
    shared, source = Shared[int](), Source()
    leaver = asyncio.create_task(shared.get("a", source.look_up))
    stayer = asyncio.create_task(shared.get("a", source.look_up))
    await asyncio.sleep(0)
    leaver.cancel()
    source.may_answer.set()

    assert await stayer == 1
    with pytest.raises(asyncio.CancelledError):
        await leaver
