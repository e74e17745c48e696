"""Files as they come in: written to the object store piece by piece, within bounds of size, time and memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from pathlib import PurePath

from fastapi import Request

from twinkle.core.errors import InvalidInput, TooLarge
from twinkle.core.ids import new_id
from twinkle.core.process.crash import crash_point
from twinkle.server.receiving.body import BodyTimedOut, ByteBudget
from twinkle.server.state import AccountParts, ArtifactParts, CommonParts
from twinkle.storage.blobs import FILES, day_of
from twinkle.storage.files.records import ContentFacts, FilePiece
from twinkle.wire.jsonl import BATCH_MAX_BYTES, BATCH_MAX_LINES, ObjectCheck

_PIECE_BYTES = 8 * 2**20
_SILENT_S = 120.0
_MAX_DRAINED_BYTES = 64 * 2**20
_LINE_SUFFIXES = ("", ".jsonl", ".ndjson", ".json")
_LINE_PURPOSES = ("fine-tune", "batch", "evals")


def holds_lines(name: str, purpose: str) -> bool:
    """Whether a file is to be lines of JSON."""
    return purpose in _LINE_PURPOSES and PurePath(name).suffix.lower() in _LINE_SUFFIXES


class FactsReader:
    """What is found out about a file while it goes by."""

    def __init__(self, *, reads_lines: bool) -> None:
        self._sha256 = hashlib.sha256()
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._size_bytes = 0
        self._lines = ObjectCheck() if reads_lines else None

    def feed(self, data: bytes) -> None:
        """Look at what comes next."""
        self._sha256.update(data)
        self._md5.update(data)
        self._size_bytes += len(data)
        if self._lines is not None:
            self._lines.feed(data)

    @property
    def md5(self) -> str:
        """Of all that went by."""
        return self._md5.hexdigest()

    def finish(self, *, reads_lines: bool = True) -> ContentFacts:
        """What was found out."""
        found = None if self._lines is None or not reads_lines else self._lines.finish()
        problem = None
        if found is not None and (found.num_wrong or not found.num_lines):
            words = [f"{found.num_wrong} of {found.num_lines} lines are no JSON objects", *map(str, found.problems)]
            problem = "\n".join(words) if found.num_lines else "the file has no lines"
        return ContentFacts(
            sha256=self._sha256.hexdigest(),
            size_bytes=self._size_bytes,
            num_lines=None if found is None else found.num_lines,
            problem=problem,
        )


def facts_of(stretches: Iterable[bytes], *, reads_lines: bool) -> tuple[ContentFacts, str]:
    """What a file that lies in the store holds, and its MD5. Blocks for as long as that takes to read."""
    reader = FactsReader(reads_lines=reads_lines)
    for stretch in stretches:
        reader.feed(stretch)
    return reader.finish(), reader.md5


def check_batch(purpose: str, name: str, facts: ContentFacts) -> None:
    """Refuse files of batches that no batch takes.

    Raises:
        TooLarge: It has too many bytes.
        InvalidInput: It has too many lines, or is no JSONL.
    """
    if purpose != "batch":
        return
    if facts.num_lines is None:
        raise InvalidInput("file", f"{name} must be a .jsonl file; a batch's requests are its lines")
    if facts.size_bytes > BATCH_MAX_BYTES:
        raise TooLarge(f"file: has {facts.size_bytes} bytes; a batch's may have {BATCH_MAX_BYTES}; send several")
    if facts.num_lines > BATCH_MAX_LINES:
        raise InvalidInput("file", f"has {facts.num_lines} lines; a batch's may have {BATCH_MAX_LINES}; send several")


def keep_s_of(common: CommonParts, purpose: str, asked_s: float | None) -> float | None:
    """How long a file stays: as OpenAI has it, those of batches end by themselves."""
    return common.settings.batch_file_ttl_s if asked_s is None and purpose == "batch" else asked_s


class IncomingBody:
    """A request's body as it comes; whoever goes silent for two minutes is given up."""

    def __init__(self, request: Request) -> None:
        """Begin.

        Raises:
            InvalidInput: It is compressed: what is stored is what came.
        """
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise InvalidInput("content-encoding", f"{encoding[:64]!r} is not understood here; send none")
        self._stream = request.stream()

    async def stretches(self) -> AsyncIterator[bytes]:
        """What comes.

        Raises:
            BodyTimedOut: Nothing came for a long time.
        """
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    data = await anext(self._stream, None)
            except TimeoutError:
                raise BodyTimedOut(f"nothing of the request's body arrived for {_SILENT_S:.0f} s") from None
            if data is None:
                return
            if data:
                yield data

    async def drain(self) -> None:
        """Read on for a while: a client in the middle of sending would not see that it was refused."""
        num_drained = 0
        async for data in self.stretches():
            num_drained += len(data)
            if num_drained > _MAX_DRAINED_BYTES:
                return


class IncomingFile:
    """Bytes on their way into pieces. What is held of them counts as request bodies do. A context manager."""

    def __init__(
        self,
        common: CommonParts,
        artifacts: ArtifactParts,
        budgets: list[ByteBudget],
        *,
        max_bytes: int,
        reads_lines: bool = False,
    ) -> None:
        """Begin.

        Args:
            common: Threads, and how large a body may be.
            artifacts: The object store.
            budgets: Whose held bytes these are.
            max_bytes: How many may come.
            reads_lines: Whether to look at them as lines of JSON.
        """
        self._common = common
        self._artifacts = artifacts
        self._budgets = budgets
        self._max_bytes = max_bytes
        self._piece_bytes = min(_PIECE_BYTES, common.settings.max_body_bytes)
        self._folder = f"{FILES}{day_of(common.clock.now())}/{new_id()}"
        self._held: list[bytes] = []
        self._num_held = 0
        self._num_pieces = 0
        self.size_bytes = 0
        self.pieces: list[FilePiece] = []
        """Those that lie in the store and are in no row yet."""
        self.facts = FactsReader(reads_lines=reads_lines)

    def __enter__(self) -> IncomingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    async def feed(self, data: bytes) -> None:
        """Take in what comes next.

        Raises:
            TooLarge: That is too much.
            Overloaded: Too many bytes are held already.
            StorageUnavailable: The object store did not take a piece.
        """
        self.size_bytes += len(data)
        if self.size_bytes > self._max_bytes:
            raise TooLarge(f"file: has more than {self._max_bytes} bytes")
        for start in range(0, len(data), self._piece_bytes):
            part = data[start : start + self._piece_bytes]
            if self._num_held + len(part) > self._piece_bytes:
                await self.flush()
            for place, budget in enumerate(self._budgets):
                try:
                    budget.take(len(part))
                except BaseException:
                    for taken in self._budgets[:place]:
                        taken.give_back(len(part))
                    raise
            self._held.append(part)
            self._num_held += len(part)

    async def flush(self) -> None:
        """Write what is held as a piece."""
        if not self._num_held:
            return
        data = b"".join(self._held)
        piece = FilePiece(key=f"{self._folder}/{self._num_pieces:06d}", size_bytes=len(data))
        self._num_pieces += 1
        await self._common.object_io.run(self._write, piece, data)
        self.pieces.append(piece)
        self._release()
        crash_point("file.piece_written")

    def take_pieces(self) -> tuple[FilePiece, ...]:
        """The pieces that are in no row yet; from now on they are the caller's."""
        pieces, self.pieces = tuple(self.pieces), []
        return pieces

    def _write(self, piece: FilePiece, data: bytes) -> None:
        self.facts.feed(data)
        self._artifacts.blobs.put(piece.key, data)

    def _release(self) -> None:
        for budget in self._budgets:
            budget.give_back(self._num_held)
        self._held, self._num_held = [], 0


async def budgets_of(common: CommonParts, accounts: AccountParts, tenant: str) -> list[ByteBudget]:
    """Whose held bytes a request's are."""
    return [common.bodies.budget, await accounts.quotas.bodies_of(tenant)]
