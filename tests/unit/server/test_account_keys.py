"""Looking up API keys, and the tokens that stand for them: seldom, once for many, also while the database is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import jwt
import pytest

from harness.clock import HandClock
from twinkle.core.errors import InvalidToken, StorageUnavailable, Unauthenticated
from twinkle.server.access.auth import Keys, Tokens
from twinkle.server.access.signing import Signer
from twinkle.server.threads import Threads
from twinkle.storage.tenants.tenants import Tenants, ValidKey

SECRET = b"of this deployment"
LIFETIME_S = 600


class MemoryDirectory:
    """Keys in a dictionary; counts who asks."""

    def __init__(self) -> None:
        self.tenants = {"tml-a": "t"}
        self.ended: list[str] = []
        self.num_lookups = 0
        self.is_away = False

    def ended_since(self, moment: float) -> list[str]:
        if self.is_away:
            raise StorageUnavailable("away")
        return self.ended

    def key(self, key: str) -> ValidKey | None:
        return self.key_with_id(key.removeprefix("tml-"))

    def key_with_id(self, key_id: str) -> ValidKey | None:
        self.num_lookups += 1
        if self.is_away:
            raise StorageUnavailable("away")
        tenant = self.tenants.get(f"tml-{key_id}")
        return None if tenant is None else ValidKey(id=key_id, tenant=tenant, name="test")


def make_tokens(clock: HandClock, *, secret: bytes = SECRET) -> Tokens:
    return Tokens(Signer(secret), clock, lifetime_s=LIFETIME_S)


def make_keys(directory: MemoryDirectory, clock: HandClock, threads: Threads) -> Keys:
    return Keys(cast(Tenants, directory), clock, threads, make_tokens(clock))


async def tenant_of(keys: Keys, credential: str | None) -> str:
    return (await keys.key_of(credential)).tenant


async def exchange(keys: Keys, clock: HandClock) -> str:
    """A token for the key ``tml-a``."""
    return make_tokens(clock).issue(await keys.key_of("tml-a"), organization="the tenant")


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads("keys", 2)
    yield threads
    threads.stop()


async def test_many_requests_with_one_key_ask_once(threads: Threads) -> None:
    directory = MemoryDirectory()
    keys = make_keys(directory, HandClock(), threads)

    tenants = await asyncio.gather(*(tenant_of(keys, "tml-a") for _ in range(100)))
    tenants.append(await tenant_of(keys, "tml-a"))

    assert set(tenants) == {"t"}
    assert directory.num_lookups == 1


async def test_a_revoked_key_ends_soon_and_a_new_one_begins_sooner(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    keys = make_keys(directory, clock, threads)
    await tenant_of(keys, "tml-a")
    with pytest.raises(Unauthenticated):
        await tenant_of(keys, "tml-b")
    directory.tenants = {"tml-b": "t"}

    clock.move(3)
    assert await tenant_of(keys, "tml-b") == "t"
    clock.move(30)
    with pytest.raises(Unauthenticated):
        await tenant_of(keys, "tml-a")


async def test_a_key_that_is_revoked_elsewhere_ends_within_a_second_and_its_tokens_with_it(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    keys = make_keys(directory, clock, threads)
    token = await exchange(keys, clock)
    await keys.key_of(token)
    directory.tenants, directory.ended = {}, ["a"]

    clock.move(1.01)

    with pytest.raises(Unauthenticated):
        await keys.key_of("tml-a")
    with pytest.raises(InvalidToken):
        await keys.key_of(token)


async def test_a_key_that_was_right_goes_on_being_right_while_the_database_is_away(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    keys = make_keys(directory, clock, threads)
    await tenant_of(keys, "tml-a")
    directory.is_away = True

    clock.move(120)
    assert await tenant_of(keys, "tml-a") == "t"
    with pytest.raises(StorageUnavailable):
        await tenant_of(keys, "tml-b")
    clock.move(3600)
    with pytest.raises(StorageUnavailable):
        await tenant_of(keys, "tml-a")


@pytest.mark.parametrize("key", [None, "", "sk-other", "tml-" + "x" * 1000])
async def test_what_is_no_key_is_not_even_looked_up(threads: Threads, key: str | None) -> None:
    directory = MemoryDirectory()

    with pytest.raises(Unauthenticated):
        await tenant_of(make_keys(directory, HandClock(), threads), key)
    assert directory.num_lookups == 0


async def test_a_token_opens_what_its_key_does_until_its_time_is_over(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    keys = make_keys(directory, clock, threads)
    token = await exchange(keys, clock)

    assert await tenant_of(keys, token) == "t"
    claims = jwt.decode(token, options={"verify_signature": False})
    assert claims == {
        "sub": "tml:apikey:a",
        "org_id": "the tenant",
        "email": "",
        "iat": int(clock.now()),
        "exp": int(clock.now()) + LIFETIME_S,
    }
    clock.move(LIFETIME_S - 1)
    assert await tenant_of(keys, token) == "t"
    clock.move(1)
    with pytest.raises(InvalidToken, match="expired"):
        await tenant_of(keys, token)


async def test_many_requests_with_one_token_ask_once(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    keys = make_keys(directory, clock, threads)
    token = await exchange(keys, clock)
    directory.num_lookups = 0

    assert set(await asyncio.gather(*(tenant_of(keys, token) for _ in range(100)))) == {"t"}
    assert directory.num_lookups == 1


async def test_a_revoked_key_ends_its_tokens_at_once_here_and_soon_elsewhere(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    here, elsewhere = make_keys(directory, clock, threads), make_keys(directory, clock, threads)
    token = await exchange(here, clock)
    key = await here.key_of(token)
    await elsewhere.key_of(token)

    directory.tenants.clear()
    here.forget(key)

    with pytest.raises(InvalidToken, match="revoked"):
        await tenant_of(here, token)
    with pytest.raises(Unauthenticated):
        await tenant_of(here, "tml-a")
    clock.move(30)
    with pytest.raises(InvalidToken, match="revoked"):
        await tenant_of(elsewhere, token)


async def test_a_token_of_a_key_that_was_right_is_right_while_the_database_is_away(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    keys = make_keys(directory, clock, threads)
    token = await exchange(keys, clock)
    await tenant_of(keys, token)
    directory.is_away = True

    clock.move(120)
    assert await tenant_of(keys, token) == "t"


def forged(clock: HandClock) -> Iterator[str]:
    claims = {"sub": "tml:apikey:a", "iat": int(clock.now()), "exp": int(clock.now()) + 60}
    yield make_tokens(clock, secret=b"of another deployment").issue(
        ValidKey(id="a", tenant="t", name="test"), organization="o"
    )
    yield jwt.encode(claims, None, "none")
    yield jwt.encode(claims, SECRET.ljust(32), "HS256")
    genuine = make_tokens(clock).issue(ValidKey(id="b", tenant="t", name="test"), organization="o")
    head, body, signature = genuine.split(".")
    other = make_tokens(clock).issue(ValidKey(id="a", tenant="t", name="test"), organization="o").split(".")[1]
    yield f"{head}.{other}.{signature}"
    yield f"{head}.{body}."
    yield f"{head}.{body}"
    yield "eyJ"
    yield "eyJ" + "x" * 100_000


async def test_what_was_not_issued_here_is_no_token_and_not_even_looked_up(threads: Threads) -> None:
    directory, clock = MemoryDirectory(), HandClock()
    keys = make_keys(directory, clock, threads)

    for token in forged(clock):
        with pytest.raises(InvalidToken):
            await tenant_of(keys, token)
    assert directory.num_lookups == 0
