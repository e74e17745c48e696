"""Exports as plans see them: what is asked of whoever has the training library, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from twinkle.core.job import JsonObject


@dataclass(frozen=True, kw_only=True)
class ExportOrder:
    """One job's export.

    Args:
        job: Whose folder it is.
        tenant: On whose behalf.
        spec: As it is stored, with its secrets sealed.
        content: What the checkpoint's name meant when the job began; None if it begins now.
    """

    job: str
    tenant: str
    spec: JsonObject
    content: str | None


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """A file of an export, by its path in it; ``file`` is its id where it is kept for download."""

    path: str
    size_bytes: int
    sha256: str
    file: str | None = None


class ExportWork(Protocol):
    """An export that was begun. None of it blocks the event loop; every step may be repeated."""

    @property
    def content(self) -> str:
        """What is exported."""
        ...

    @property
    def facts(self) -> Mapping[str, str]:
        """What is told of it: the base model, its architecture."""
        ...

    @property
    def steps(self) -> tuple[str, ...]:
        """What has to be written, in order."""
        ...

    @property
    def size_bytes(self) -> int:
        """About how much that will be."""
        ...

    async def take(self, step: str) -> list[ExportedFile]:
        """Write what a step writes, unless it lies there whole."""
        ...

    async def verify(self, form: str) -> dict[str, float]:
        """Read one form back and compare it.

        Raises:
            JobFailed: It is not what was meant.
        """
        ...

    async def publish(self, file: ExportedFile) -> ExportedFile:
        """Bring one file to where it is to be; where that is a hub, nothing happens before :meth:`finish`."""
        ...

    async def finish(self, verification: Mapping[str, Mapping[str, float]]) -> str | None:
        """Bring there what goes there as a whole; where to look at it."""
        ...

    async def clear(self) -> None:
        """Remove what lies about: the export has ended, one way or another."""
        ...
