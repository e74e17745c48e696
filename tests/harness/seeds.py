"""The scripts of the documents that the project answers to, read from these when the tests run.

Some copies of the documents lost their indentation. It comes back from another document that shows nearly the same
script with it (`harness.indentation`); not a character but leading spaces is ever added.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from harness.indentation import restore

FOLDER_VARIABLE = "SEEDS_FOLDER"
DEFAULT_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "seeds"
"""Beside the repository."""

MARKS = {
    "ray": re.compile(r"mode='ray'|remote_group="),
    "megatron": re.compile(r"\bMegatronModel\b"),
    "server": re.compile(r"\binit_(twinkle|tinker)\w*client\(|\bServiceClient\("),
}
_ADDRESSES = ("http://localhost:8000", "http://www.modelscope.cn/twinkle")
_MODELS_ELSEWHERE = ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-4B")
_IMPORT = re.compile(r"^(import|from) [a-zA-Z_]")
_LAST_CALL = re.compile(r"^(\w+\(\))(?=\S|$)")
_MAIN = re.compile(r"^if __name__ == ['\"]__main__['\"]:")
_FENCE = "```"


@dataclass(frozen=True)
class Script:
    """One script as a document shows it, ready to be run."""

    document: str
    line: int
    """Of its first line in the document, from 1."""
    text: str
    lines: tuple[str, ...] = field(repr=False)
    """As they stand in the document."""

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def needs(self) -> frozenset[str]:
        """What it takes beyond one machine with the library: Ray, Megatron, a server."""
        return frozenset(need for need, mark in MARKS.items() if mark.search(self.text))

    @property
    def is_whole(self) -> bool:
        """Whether it does something by itself; a fragment goes on from another."""
        return bool(_MAIN.search(self.text) or re.search(r"^for ", self.text, re.MULTILINE)) or any(
            _MAIN.match(line) for line in self.lines
        )

    @property
    def is_distributed(self) -> bool:
        return "mode='local'" in self.text


def at_server(text: str, url: str, served_as: str) -> str:
    """A client's script that asks this server, for the model that it serves."""
    for address in _ADDRESSES:
        text = text.replace(address, url)
    for model in _MODELS_ELSEWHERE:
        text = text.replace(model, served_as)
    return text


def seeds_folder() -> Path | None:
    """Where the documents lie; None where they are not on this machine."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, DEFAULT_FOLDER))
    return folder if folder.is_dir() else None


def scripts_of(folder: Path) -> list[Script]:
    """All Python of all documents, in order: whole scripts and fragments."""
    found = [
        (path.stem[:3], first, lines, is_fenced)
        for path in sorted(folder.glob("*.md"))
        for first, lines, is_fenced in _blocks(path.read_text(encoding="utf-8", errors="replace").splitlines())
    ]
    indented = [lines for _, _, lines, is_fenced in found if is_fenced]
    return [
        Script(document, first, "\n".join(lines if is_fenced else restore(lines, indented)) + "\n", tuple(lines))
        for document, first, lines, is_fenced in found
    ]


def _blocks(lines: list[str]) -> list[tuple[int, list[str], bool]]:
    """The Python of one document: first line, lines, and whether it stands between fences (then it is indented)."""
    if any(line.startswith(_FENCE) for line in lines):
        return _fenced(lines)
    return _bare(lines)


def _fenced(lines: list[str]) -> list[tuple[int, list[str], bool]]:
    blocks, start = [], None
    for number, line in enumerate(lines):
        if line.startswith(_FENCE + "python"):
            start = number + 1
        elif line.startswith(_FENCE) and start is not None:
            blocks.append((start + 1, lines[start:number], True))
            start = None
    return blocks


def _bare(lines: list[str]) -> list[tuple[int, list[str], bool]]:
    """Without fences a script begins with its imports and ends with the call below ``if __name__``.

    The next sentence follows that call on the same line. A fragment ends where a line of prose begins, at the latest
    after the last of its lines that is Python.
    """
    blocks = []
    number = 0
    while number < len(lines):
        if not _IMPORT.match(lines[number]):
            number += 1
            continue
        end, last = _end_of_bare(lines, number)
        blocks.append((number + 1, [*lines[number:end], last], False))
        number = end + 1
    return blocks


def _end_of_bare(lines: list[str], start: int) -> tuple[int, str]:
    """The number of a script's last line, and what of that line belongs to it."""
    for number in range(start, len(lines)):
        glued = _glued(lines[number])
        if glued is not None:
            return number, glued
    return len(lines) - 1, lines[-1]


def _glued(line: str) -> str | None:
    """The call at the beginning of a line that goes on with a sentence, or that ends a script."""
    call = _LAST_CALL.match(line)
    if call:
        return call.group(1)
    statement, bracket, sentence = line.rpartition(")")
    return statement + bracket if bracket and re.match(r"[A-Z]\w+ [a-z]", sentence) else None
