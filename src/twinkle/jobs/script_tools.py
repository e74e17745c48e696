"""What starts scripts, as their plan sees it: what is asked, what they print, how they end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

EndedBy: TypeAlias = Literal["itself", "time", "folder", "stop"]


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script that is to run."""

    job: str
    tenant: str
    attempt: int
    source: bytes
    arguments: tuple[str, ...]
    max_seconds: int | None


@dataclass(frozen=True, kw_only=True)
class ScriptOutput:
    """What a script printed in a while: the last of it, and how many bytes of it were left out before that."""

    stream: Literal["stdout", "stderr"]
    text: str
    num_left_out: int


@dataclass(frozen=True, kw_only=True)
class ScriptEnd:
    """How a script ended: its exit code, negative for a signal, and who ended it."""

    code: int
    ended_by: EndedBy


@dataclass(frozen=True, kw_only=True)
class ScriptNews:
    """What is new of a script; ``end`` is set when nothing more comes."""

    output: Sequence[ScriptOutput]
    end: ScriptEnd | None


class RunningScript(Protocol):
    """A script that runs."""

    async def news(self, *, timeout_s: float) -> ScriptNews:
        """What it printed since the last call; waits so long for its end."""
        ...


class ScriptTools(Protocol):
    """What starts scripts. Nothing of it blocks the event loop."""

    def run_script(self, request: ScriptRequest) -> AbstractAsyncContextManager[RunningScript]:
        """A script that runs until the block ends, with all processes it has started; its key ends with it.

        Raises:
            JobFailed: The operator allows no script of this tenant, or the machine cannot run it as it should.
        """
        ...

    async def forget_script(self, job: str) -> None:
        """Remove a job's working folder."""
        ...
