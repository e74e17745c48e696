"""The documents of the repository, and the pieces of them that can be checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
)

_FENCE = re.compile(r"^(?:<!-- (run|run: server) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A fenced block. ``needs`` is what its mark says: ``run``, ``run: server``, or empty."""

    document: str
    needs: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.text.strip().splitlines()[0][:40]}"


def snippets(*, language: str) -> Iterator[Snippet]:
    """All blocks of a language."""
    for path in DOCUMENTS:
        for match in _FENCE.finditer(path.read_text()):
            if match[2] == language:
                yield Snippet(path.relative_to(ROOT).as_posix(), match[1] or "", match[2], match[3])


def in_backticks(path: Path) -> Iterator[str]:
    """Everything in single backticks outside of fenced blocks."""
    text = _FENCE.sub("", path.read_text())
    yield from (match[1] for match in re.finditer(r"`([^`\n]+)`", text))
