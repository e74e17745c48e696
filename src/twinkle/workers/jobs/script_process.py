"""One script under its launcher: what it prints is taken off as it comes, and the last of it kept."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from twinkle.core.process.background import say_if_it_ends
from twinkle.jobs.script_tools import EndedBy, ScriptEnd, ScriptNews, ScriptOutput

MAX_TEXT_BYTES = 4096
"""Of one stream between two looks."""
_READ_BYTES = 64 * 1024
_STOP_S = 15.0
_FOLDER_LOOK_S = 5.0
_LAUNCHER = Path(__file__).with_name("script_launcher.py")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What the launcher is told, field by field as it reads it."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    uid: int | None
    gid: int | None
    wall_s: float
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    num_processes: int


class _Tail:
    """The last of what came."""

    def __init__(self) -> None:
        self._held = b""
        self._num_left_out = 0

    def add(self, piece: bytes) -> None:
        held = self._held + piece
        self._num_left_out += max(len(held) - MAX_TEXT_BYTES, 0)
        self._held = held[-MAX_TEXT_BYTES:]

    def take(self, stream: Literal["stdout", "stderr"], *, is_last: bool) -> ScriptOutput | None:
        """What may be told: whole lines, unless there is one that is very long or nothing more comes."""
        end = len(self._held) if is_last else self._held.rfind(b"\n") + 1
        if not end and len(self._held) >= MAX_TEXT_BYTES:
            end = len(self._held)
        # PostgreSQL stores no NUL.
        text = self._held[:end].decode(errors="replace").replace("\x00", "\N{REPLACEMENT CHARACTER}").rstrip("\n")
        if not text:
            return None
        output = ScriptOutput(stream=stream, text=text, num_left_out=self._num_left_out)
        self._held, self._num_left_out = self._held[end:], 0
        return output


class ScriptProcess:
    """See :class:`twinkle.jobs.script_tools.RunningScript`."""

    def __init__(self, process: asyncio.subprocess.Process, report_fd: int, folder: Path, *, folder_bytes: int) -> None:
        self._process = process
        self._report_fd = report_fd
        self._folder = folder
        self._folder_bytes = folder_bytes
        self._tails: dict[Literal["stdout", "stderr"], _Tail] = {"stdout": _Tail(), "stderr": _Tail()}
        self._is_folder_full = False
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            asyncio.create_task(self._drain(process.stdout, self._tails["stdout"])),
            asyncio.create_task(self._drain(process.stderr, self._tails["stderr"])),
        ]
        self._watcher = asyncio.create_task(self._watch_folder(), name="script folder")
        say_if_it_ends(self._watcher)
        self._ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, plan: LaunchPlan, folder: Path, *, folder_bytes: int) -> ScriptProcess:
        """Start a script."""
        report_fd, their_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(_LAUNCHER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[their_fd],
                env={},
                cwd="/",
            )
        except BaseException:
            os.close(report_fd)
            raise
        finally:
            os.close(their_fd)
        assert process.stdin is not None
        process.stdin.write(json.dumps({**asdict(plan), "report_fd": their_fd}).encode() + b"\n")
        return cls(process, report_fd, folder, folder_bytes=folder_bytes)

    async def news(self, *, timeout_s: float) -> ScriptNews:
        """See :meth:`twinkle.jobs.script_tools.RunningScript.news`."""
        await asyncio.wait([self._ended], timeout=timeout_s)
        end = self._ended.result() if self._ended.done() else None
        taken = [tail.take(stream, is_last=end is not None) for stream, tail in self._tails.items()]
        return ScriptNews(output=[one for one in taken if one is not None], end=end)

    async def stop(self) -> None:
        """End it with everything that it started, if it has not ended."""
        self._let_go()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._ended), _STOP_S)
        if not self._ended.done():
            # The kernel ends the script with its launcher.
            self._process.kill()
            await self._ended
        os.close(self._report_fd)

    def _let_go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def _wait(self) -> ScriptEnd:
        await self._process.wait()
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        # Nothing holds the other ends any more.
        await asyncio.gather(*self._readers)
        report = await asyncio.to_thread(os.read, self._report_fd, 1024)
        if not report:
            # The launcher itself was killed.
            return ScriptEnd(code=-signal.SIGKILL, ended_by="stop")
        told = json.loads(report)
        ended_by: EndedBy = "folder" if self._is_folder_full else told["ended_by"]
        return ScriptEnd(code=told["code"], ended_by=ended_by)

    async def _drain(self, stream: asyncio.StreamReader, tail: _Tail) -> None:
        while piece := await stream.read(_READ_BYTES):
            tail.add(piece)

    async def _watch_folder(self) -> None:
        while True:
            await asyncio.sleep(_FOLDER_LOOK_S)
            if await asyncio.to_thread(size_of, self._folder) > self._folder_bytes:
                self._is_folder_full = True
                self._let_go()
                return


def size_of(folder: Path) -> int:
    """What a folder takes up on its disk. What goes while it is looked at counts as nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total
