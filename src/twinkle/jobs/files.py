"""Files as plans see them: those of the job's tenant, read line by line, written once however often that is tried."""

from __future__ import annotations

from collections.abc import AsyncIterator
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
