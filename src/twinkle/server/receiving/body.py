"""Request bodies, read within bounds: of one body, of all bodies held at once, and of time."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from fastapi import Request

from twinkle.core.errors import InvalidInput, Overloaded, TooLarge, TransientError, UserError
from twinkle.server.connections.free_memory import FreedMemory
from twinkle.server.threads import Threads
from twinkle.wire.compression import decompress, decompress_prefix, opened_size

_READ_TIMEOUT_S = 120.0
# Enough to find the address of a training request that is not read further.
_PREFIX_BYTES = 64 * 1024
# A refused body is still read on (a client in the middle of sending would not see the answer), but not for ever.
_MAX_DRAINED_BODIES = 16
_IDENTITY = {"", "identity"}
_SCOPE_KEY = "twinkle.body_budget"
# Anything but tensors and prompts. These are parsed on the event loop, so they must be quick to parse.
_MAX_SMALL_BYTES = 2**20


class BodyTimedOut(TransientError):
    """A client stopped sending in the middle of its request."""

    code = "body_timeout"


@dataclass(frozen=True)
class Body:
    """What arrived, decompressed. With a ``refusal``, ``data`` is only the beginning."""

    data: bytes
    refusal: UserError | None = None
    refused_digest: str = ""
    """Tells a resend of a refused body from a different one."""

    def complete(self) -> bytes:
        """All of it.

        Raises:
            TooLarge: It was over the limit.
            InvalidInput: It could not be decompressed.
        """
        if self.refusal is not None:
            raise self.refusal
        return self.data


class ByteBudget:
    """Counts the bytes that are held, up to a limit."""

    def __init__(self, limit_bytes: int, *, of: str = "everybody's", freed: FreedMemory | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._freed = freed
        self._of = of
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What is held now."""
        return self._held_bytes

    def take(self, num_bytes: int, *, is_only: bool = False) -> None:
        """Hold more.

        Args:
            num_bytes: So many.
            is_only: What is only held where nothing else is, however much, may be.

        Raises:
            Overloaded: That would be too much.
        """
        if self._held_bytes + num_bytes > self.limit_bytes and not (is_only and self._held_bytes == 0):
            raise Overloaded(
                f"the server holds {self._held_bytes} bytes of request bodies and results ({self._of}) right now, and"
                f" {self.limit_bytes} may be; send it again in a moment"
            )
        self._held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Hold less."""
        self._held_bytes -= num_bytes
        if self._freed is not None:
            self._freed.note(num_bytes)


def charge_to(budget: ByteBudget, request: Request) -> None:
    """Name whose budget the bytes of a request's body are counted against, beside everybody's."""
    request.scope[_SCOPE_KEY] = budget


def charged_of(request: Request) -> ByteBudget | None:
    """Whose budget :func:`charge_to` named."""
    budget = request.scope.get(_SCOPE_KEY)
    return budget if isinstance(budget, ByteBudget) else None


def _charged(request: Request) -> ByteBudget:
    budget = charged_of(request)
    if budget is None:
        raise RuntimeError("a route reads a body before it knows whose it is; it must ask for the tenant")
    return budget


class Bodies:
    """Reads bodies and keeps the account of what is held of them."""

    def __init__(self, *, max_bytes: int, budget: ByteBudget, threads: Threads, inline_bytes: int) -> None:
        """Take limits.

        Args:
            max_bytes: Of one body, after decompression.
            budget: For all of them together.
            threads: Where large ones are decompressed and hashed.
            inline_bytes: Up to this size that is done at once.
        """
        self._max_bytes = max_bytes
        self.budget = budget
        self._threads = threads
        self._inline_bytes = inline_bytes

    def receive(self, request: Request, *, max_bytes: int | None = None) -> Received:
        """Read a body; it counts as held until the end of the block, towards the budget of whose it is too.

        Args:
            request: Whose budget was named by :func:`charge_to`.
            max_bytes: Where this route takes less than others do.

        Raises:
            Overloaded: Too many bytes are held already.
            BodyTimedOut: The client stopped sending.
        """
        return Received(self, request, self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes))

    async def read(self, request: Request) -> bytes:
        """A whole body without tensors or prompts; raises what :meth:`receive` and :meth:`Body.complete` raise."""
        async with self.receive(request, max_bytes=_MAX_SMALL_BYTES) as body:
            return body.complete()

    async def take_in(self, request: Request, held: Held, limit_bytes: int) -> Body:
        """Read and open a body of at most so many bytes, all of which are ``held`` from when they are there."""
        raw, is_whole = await self._read_in_time(request, held, limit_bytes)
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if is_whole and encoding in _IDENTITY:
            return Body(raw)
        # What it opens to is charged before it is there.
        room_bytes = opened_size(raw, limit_bytes) if encoding == "zstd" and is_whole else 0
        held.take(room_bytes)
        if max(len(raw), room_bytes) <= self._inline_bytes:
            body = self._open(raw, is_whole, encoding, limit_bytes)
        else:
            body = await self._threads.run(self._open, raw, is_whole, encoding, limit_bytes)
        held.keep(len(body.data))
        return body

    async def drop(self, request: Request) -> None:
        """Read a body and keep nothing of it.

        Raises:
            TooLarge: It has more bytes than any may.
            BodyTimedOut: The client stopped sending.
        """
        size_bytes = 0
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                async for piece in request.stream():
                    size_bytes += len(piece)
                    if size_bytes > self._max_bytes:
                        raise TooLarge(f"the request body has more than {self._max_bytes} bytes")
        except TimeoutError:
            raise _too_slow() from None

    async def _read_in_time(self, request: Request, held: Held, limit_bytes: int) -> tuple[bytes, bool]:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                return await self._read(request, held, limit_bytes)
        except TimeoutError:
            raise _too_slow() from None

    async def _read(self, request: Request, held: Held, limit_bytes: int) -> tuple[bytes, bool]:
        pieces: list[bytes] = []
        size_bytes = 0
        async for piece in request.stream():
            kept = piece[: max(limit_bytes - size_bytes, 0)]
            if kept:
                held.take(len(kept))
                pieces.append(kept)
            size_bytes += len(piece)
            if size_bytes > max(limit_bytes * _MAX_DRAINED_BODIES, self._max_bytes):
                break
        return b"".join(pieces), size_bytes <= limit_bytes

    def _open(self, raw: bytes, is_whole: bool, encoding: str, limit_bytes: int) -> Body:
        refusal: UserError = TooLarge(f"the request body has more than {limit_bytes} bytes; send smaller chunks")
        beginning = raw[:_PREFIX_BYTES]
        if encoding == "zstd":
            beginning = decompress_prefix(raw, min(_PREFIX_BYTES, limit_bytes))
            if is_whole:
                try:
                    return Body(decompress(raw, limit_bytes))
                except (TooLarge, InvalidInput) as error:
                    refusal = error
        elif encoding not in _IDENTITY:
            beginning = b""
            refusal = InvalidInput("content-encoding", f"{encoding!r} is not understood here; send zstd or none")
        return Body(beginning, refusal, hashlib.sha256(raw).hexdigest())


def _too_slow() -> BodyTimedOut:
    return BodyTimedOut(f"the request's body did not arrive within {_READ_TIMEOUT_S:.0f} s")


class Received:
    """A body as the value of a block, at whose end it is let go."""

    def __init__(self, bodies: Bodies, request: Request, limit_bytes: int) -> None:
        self._bodies = bodies
        self._request = request
        self._limit_bytes = limit_bytes
        self._held = Held([bodies.budget, _charged(request)])

    async def __aenter__(self) -> Body:
        try:
            return await self._bodies.take_in(self._request, self._held, self._limit_bytes)
        except BaseException:
            self._held.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._held.release()


class Held:
    """The bytes one request holds."""

    def __init__(self, budgets: list[ByteBudget]) -> None:
        self._num_bytes = [(budget, 0) for budget in budgets]

    def take(self, num_bytes: int) -> None:
        for place, (budget, held) in enumerate(self._num_bytes):
            budget.take(num_bytes)
            self._num_bytes[place] = (budget, held + num_bytes)

    def keep(self, num_bytes: int) -> None:
        """Hold so many, which are no more than are held."""
        for place, (budget, held) in enumerate(self._num_bytes):
            budget.give_back(held - num_bytes)
            self._num_bytes[place] = (budget, num_bytes)

    def release(self) -> None:
        for budget, held in self._num_bytes:
            budget.give_back(held)
        self._num_bytes = []
