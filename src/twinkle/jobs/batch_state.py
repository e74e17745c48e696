"""Where a batch stands: its small cursor, and the two files that grow part by part while it goes on."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from twinkle.core.job import JsonObject
from twinkle.jobs.files import JobFiles

Ending: TypeAlias = Literal["cancelled", "expired"]

PURPOSE = "batch_output"
MAX_PART_LINES = 256
MAX_PART_BYTES = 4 * 2**20


@dataclass
class BatchCursor:
    """What another runner goes on from. Lines below ``next`` are written; those from ``sent`` on were never asked."""

    total: int = 0
    next: int = 0
    sent: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    ending: Ending | None = None
    """Why it is to end before all lines were asked."""
    answers: list[list[Any]] = field(default_factory=list)
    errors: list[list[Any]] = field(default_factory=list)
    """The parts of a file: under which mark a runner wrote its own, and how many in a row."""

    @classmethod
    def read(cls, saved: JsonObject) -> BatchCursor:
        """The cursor as it was saved; that of a new batch if it never was."""
        return cls(**saved)

    def to_json(self) -> JsonObject:
        """As it is saved."""
        return asdict(self)


class GrowingFile:
    """A file of a job's, written part by part.

    A runner's parts bear a mark of its own: one that lost the job in the middle of writing overwrites nobody's.
    """

    def __init__(self, files: JobFiles, name: str, parts: list[list[Any]]) -> None:
        """Go on behind the parts that are there; those to come are noted in the same list."""
        self._files = files
        self._name = name
        self._parts = parts
        self._mark = secrets.token_hex(4)
        self._lines: list[bytes] = []
        self.num_bytes = 0

    @property
    def num_lines(self) -> int:
        """Those that wait to be written."""
        return len(self._lines)

    def add(self, line: bytes) -> None:
        """Take a line with its end."""
        self._lines.append(line)
        self.num_bytes += len(line)

    async def write(self) -> None:
        """Write what waits as one part. It counts when the list of parts is saved."""
        if not self._lines:
            return
        if not self._parts or self._parts[-1][0] != self._mark:
            self._parts.append([self._mark, 0])
        mark, number = self._parts[-1]
        await self._files.write_part(self._name, f"{mark}-{number}", b"".join(self._lines))
        self._parts[-1][1] = number + 1
        self._lines.clear()
        self.num_bytes = 0

    async def join(self, *, keep_s: float | None) -> str | None:
        """Make a file of all parts, the same however often it is asked for; ``None`` if there are none."""
        names = part_names(self._parts)
        if not names:
            return None
        return await self._files.join(self._name, names, purpose=PURPOSE, keep_s=keep_s)


def part_names(parts: Sequence[Sequence[Any]]) -> list[str]:
    """The parts of a file, first to last."""
    return [f"{mark}-{number}" for mark, count in parts for number in range(count)]
