"""What a heavy process is asked of an export, and what it answers: who asks loads nothing of what that takes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

ExportForm = Literal["peft", "merged", "gguf", "gguf-q8_0", "gguf-adapter", "ollama"]

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What is to be exported.

    Args:
        base: The folder of the base model.
        adapter: The folder with the adapter as PEFT has it.
        folder: Where to write.
        forms: What to write.
        name: What the model is called in files that name it.
        memory_bytes: What reading it back may take.
        compares_logits: Whether it is read back whole and computed with.
    """

    base: str
    adapter: str
    folder: str
    forms: tuple[ExportForm, ...]
    name: str
    memory_bytes: int
    compares_logits: bool


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file of an export, by its path in the export's folder."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ExportOutline:
    """What an export consists of, known before any work.

    Args:
        architecture: What the base model calls itself.
        steps: What to do, in order.
        size_bytes: About how much will be written.
    """

    architecture: str
    steps: tuple[str, ...]
    size_bytes: int


def outline_of(request: ExportRequest) -> ExportOutline:
    """See :func:`twinkle.workers.jobs.export.build.outline_of`, which is loaded where this is called."""
    outline: ExportOutline = _build().outline_of(request)
    return outline


def take_step(request: ExportRequest, step: str) -> list[WrittenFile]:
    """See :func:`twinkle.workers.jobs.export.build.take_step`."""
    written: list[WrittenFile] = _build().take_step(request, step)
    return written


def verify_form(request: ExportRequest, form: ExportForm) -> dict[str, float]:
    """See :func:`twinkle.workers.jobs.export.build.verify_form`."""
    figures: dict[str, float] = _build().verify_form(request, form)
    return figures


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _build() -> ModuleType:
    return import_module("twinkle.workers.jobs.export.build")
