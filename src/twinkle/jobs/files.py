"""Files as plans see them: those of the job's tenant, read line by line, written once however often that is tried."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol


class JobFiles(Protocol):
    """The files of one job's tenant."""

    def lines(self, file_id: str, *, start: int = 0) -> AsyncIterator[bytes]:
        """The lines of a file from number ``start`` on, without their ends.

        Raises:
            JobFailed: There is no such file, or it is another tenant's.
        """
        ...

    async def read(self, file_id: str) -> bytes:
        """A whole file, which is small.

        Raises:
            JobFailed: There is no such file, or it is another tenant's.
        """
        ...

    async def write(self, name: str, content: bytes, *, purpose: str) -> str:
        """Keep what the job made; the same name gets the same file of this job, whoever asks again. The file's id."""
        ...

    async def write_part(self, name: str, part: str, content: bytes) -> None:
        """Keep a stretch of a file that grows, until it is joined or the job has ended for good.

        The caller sees to it that no two contents have one name and part.
        """
        ...

    async def join(self, name: str, parts: Sequence[str], *, purpose: str, keep_s: float | None = None) -> str:
        """Make one file of parts in this order; the same name gets the same file of this job, whoever asks again.

        Args:
            name: What the file is called.
            parts: Those of this name that it is made of; others are given up.
            purpose: What for, in OpenAI's words.
            keep_s: How long it is kept; without it until it is deleted.
        """
        ...
