"""All ranks of a mesh as its engine sees them: a command goes to each, and comes back once, or the mesh ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import structlog

from twinkle.core.mesh import MeshCapabilities
from twinkle.workers.ranks.commands import Command, RankOrder, Reply
from twinkle.workers.starts import Starts

EXIT_RANK_LOST = 70
"""``EX_SOFTWARE`` of sysexits.h."""

_log = structlog.get_logger()


class RankWorld(Protocol):
    """The ranks of one mesh, wherever their processes are.

    Whoever holds it holds the mesh's lease. When a rank is lost, or the ranks are out of step, this process ends.
    """

    @property
    def capabilities(self) -> MeshCapabilities:
        """What rank 0's engine says of itself."""
        ...

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks that are not this one, by rank."""
        ...

    def together(self, order: RankOrder) -> Any:
        """Have every rank make a call; rank 0's result, or its error raised where all of them ended with it."""
        ...

    def first(self, order: RankOrder) -> Any:
        """Have rank 0 alone make a call; its result, or its error raised."""
        ...

    def close(self) -> None:
        """Let the ranks end, or make them."""
        ...


def end_process(reason: str) -> NoReturn:
    """End this process at once: its memory can no longer be trusted, and the journal knows everything that counts."""
    _log.error("rank.lost", reason=reason, next="this process ends; its successor restores and replays")
    Starts.fail_if_under_way(reason)
    os._exit(EXIT_RANK_LOST)


def disagreement(command: Command, replies: Sequence[Reply]) -> str | None:
    """In what the ranks differ, whose replies are given by rank; ``None`` when they are in step."""
    for rank, theirs in enumerate(replies):
        if theirs != replies[0]:
            name = type(command).__name__
            return f"{name} ended otherwise on rank {rank} ({theirs}) than on rank 0 ({replies[0]})"
    return None
