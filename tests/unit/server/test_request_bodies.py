"""Request bodies are read within bounds, and the account of held bytes always comes back to zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import zstandard
from fastapi import Request
from starlette.types import Message

from twinkle.core.errors import InvalidInput, Overloaded, TooLarge
from twinkle.server.receiving.body import Bodies, ByteBudget, charge_to
from twinkle.server.threads import Threads

MAX_BYTES = 1000
MIB = 2**20


def _request(pieces: Sequence[bytes], encoding: str = "", *, budget: ByteBudget | None = None) -> Request:
    left = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    left.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        return left.pop(0)

    headers = [(b"content-encoding", encoding.encode())] if encoding else []
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    charge_to(budget or ByteBudget(1_000_000, of="yours"), request)
    return request


@pytest.fixture
def budget() -> ByteBudget:
    return ByteBudget(3000)


@pytest.fixture
def bodies(budget: ByteBudget) -> Iterator[Bodies]:
    threads = Threads("bodies", 1)
    yield Bodies(max_bytes=MAX_BYTES, budget=budget, threads=threads, inline_bytes=100)
    threads.stop()


@pytest.mark.parametrize("encoding", ["", "zstd"])
async def test_a_body_is_held_until_the_end_of_the_block(bodies: Bodies, budget: ByteBudget, encoding: str) -> None:
    raw = zstandard.compress(b"a" * 900) if encoding else b"a" * 900

    async with bodies.receive(_request([raw[:10], raw[10:]], encoding)) as body:
        assert body.complete() == b"a" * 900
        assert budget.held_bytes == 900
    assert budget.held_bytes == 0


@pytest.mark.parametrize("pieces", [[b"a" * 5000], [b"a" * 100] * 50])
async def test_of_too_large_a_body_the_same_beginning_is_seen_however_it_arrives(
    bodies: Bodies, budget: ByteBudget, pieces: list[bytes]
) -> None:
    async with bodies.receive(_request(pieces)) as body:
        assert body.data == b"a" * MAX_BYTES
        assert isinstance(body.refusal, TooLarge)
        digest = body.refused_digest
        with pytest.raises(TooLarge):
            body.complete()
    async with bodies.receive(_request([b"a" * 2500] * 2)) as again:
        assert again.refused_digest == digest
    assert budget.held_bytes == 0


async def test_of_a_bomb_only_the_beginning_is_opened(bodies: Bodies) -> None:
    raw = zstandard.compress(b"a" * 10_000_000)

    async with bodies.receive(_request([raw], "zstd")) as body:
        assert isinstance(body.refusal, TooLarge)
        assert body.data == b"a" * len(body.data)
        assert len(body.data) == MAX_BYTES


@pytest.mark.parametrize(("raw", "encoding"), [(b"no frame", "zstd"), (b"x", "gzip"), (b"x", "br")])
async def test_what_cannot_be_opened_is_refused(bodies: Bodies, raw: bytes, encoding: str) -> None:
    with pytest.raises(InvalidInput):
        await bodies.read(_request([raw], encoding))


async def test_too_many_bytes_at_once_are_turned_away(bodies: Bodies, budget: ByteBudget) -> None:
    async with bodies.receive(_request([b"a" * 1000])), bodies.receive(_request([b"a" * 1000])):
        async with bodies.receive(_request([b"a" * 900])):
            with pytest.raises(Overloaded):
                await bodies.read(_request([b"a" * 101]))
        await bodies.read(_request([b"a" * 101]))
    assert budget.held_bytes == 0


async def test_of_one_tenant_no_more_is_held_than_may_and_of_others_it_is(bodies: Bodies, budget: ByteBudget) -> None:
    own, other = ByteBudget(1000, of="yours"), ByteBudget(1000, of="yours")

    async with bodies.receive(_request([b"a" * 900], budget=own)):
        with pytest.raises(
            Overloaded, match=r"900 bytes of request bodies and results \(yours\) right now, and 1000 may be"
        ):
            async with bodies.receive(_request([b"a" * 101], budget=own)):
                pass
        async with bodies.receive(_request([b"a" * 900], budget=other)):
            assert (own.held_bytes, other.held_bytes, budget.held_bytes) == (900, 900, 1800)

    assert (own.held_bytes, other.held_bytes, budget.held_bytes) == (0, 0, 0)


async def test_a_route_of_small_bodies_stops_reading_at_its_limit_however_large_others_may_be() -> None:
    budget, own = ByteBudget(50 * MIB), ByteBudget(50 * MIB)
    threads = Threads("bodies", 1)
    bodies = Bodies(max_bytes=16 * MIB, budget=budget, threads=threads, inline_bytes=100)
    most = 0

    async def receive() -> Message:
        nonlocal left, most
        most = max(most, budget.held_bytes, own.held_bytes)
        left -= 1
        return {"type": "http.request", "body": b"a" * (MIB // 4), "more_body": left > 0}

    left = 40
    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    charge_to(own, request)
    with pytest.raises(TooLarge, match="more than 1048576 bytes"):
        await bodies.read(request)
    threads.stop()

    assert most == MIB
    assert (budget.held_bytes, own.held_bytes) == (0, 0)


@pytest.mark.parametrize("declares", [True, False])
async def test_a_small_route_opens_no_more_of_a_frame_than_it_takes_and_charges_it_before(declares: bool) -> None:
    budget, own = ByteBudget(200 * MIB), ByteBudget(200 * MIB)
    threads = Threads("bodies", 1)
    bodies = Bodies(max_bytes=64 * MIB, budget=budget, threads=threads, inline_bytes=100)
    compressor = zstandard.ZstdCompressor(write_content_size=declares)

    with pytest.raises(TooLarge, match="opens to more than 1048576 bytes"):
        await bodies.read(_request([compressor.compress(bytes(60 * MIB))], "zstd", budget=own))
    tight = ByteBudget(MIB // 2, of="yours")
    with pytest.raises(Overloaded):
        await bodies.read(_request([compressor.compress(bytes(MIB * 3 // 4))], "zstd", budget=tight))
    threads.stop()

    assert (budget.held_bytes, own.held_bytes, tight.held_bytes) == (0, 0, 0)


async def test_a_body_whose_owner_is_not_known_is_not_read(bodies: Bodies) -> None:
    nobodys = _request([b"a"])
    del nobodys.scope["twinkle.body_budget"]

    with pytest.raises(RuntimeError, match="before it knows whose it is"):
        await bodies.read(nobodys)
