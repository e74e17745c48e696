"""What the process with the data is asked, and what it answers. Whoever asks loads nothing of what that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from pydantic import BaseModel

from twinkle.core.processors import Effect
from twinkle.storage.files.records import FilePiece

ITERATOR_EXHAUSTED = "exhausted"
"""The code of a refusal that says that there are no more rows."""


class Position(BaseModel, frozen=True):
    """Where an iterator stands: ``taken`` counts what it was asked for, the others are those of a loader."""

    state: Literal["none", "running", "ended"] = "none"
    taken: int = 0
    consumed: int = 0
    in_whole_passes: int = 0
    is_passing: bool = False


class Recipe(BaseModel, frozen=True):
    """How a processor is made anew.

    ``steps`` are the numbers of its calls that changed it, its creation first. ``uses`` are the processors it is made
    of, each as it was after that number. The same recipe makes the same rows in the same order.
    """

    steps: tuple[int, ...] = ()
    uses: dict[str, int] = {}
    position: Position = Position()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A call that the journal holds."""

    seq: int
    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Script:
    """A processor with the calls that made it what it is; ``uses`` as in its recipe."""

    processor_type: str
    class_type: str
    steps: tuple[Step, ...]
    uses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """A tenant's file: its name, which says what it is, and where it lies."""

    name: str
    pieces: tuple[FilePiece, ...]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What calls refer to: files by their ids, and the folders of served models' tokenizers by the models' names.

    ``folders`` are those of this machine that the operator has opened.
    """

    files: Mapping[str, FileSource] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Order:
    """One call to be done.

    Args:
        processor: Whose.
        processor_type: What it is.
        class_type: Which one.
        step: The call.
        effect: What kind of call that is.
        recipe: By which the processor was made, and where it stands.
        uses: What it is made of from now on, unless an iteration is running.
        sources: What this call and, with ``scripts``, those before it refer to.
        scripts: By processor, where they have to be made anew.
        object_store: The URL of where files lie.
        folder: For files, on this machine.
        disk_bytes: What may be held of files and rows, of all processors of the process together.
    """

    processor: str
    processor_type: str
    class_type: str
    step: Step
    effect: Effect
    recipe: Recipe
    uses: Mapping[str, int]
    sources: Sources
    scripts: Mapping[str, Script] | None = None
    object_store: str
    folder: str
    disk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Done:
    """It was done: the answer as JSON, and the recipe from now on. ``rss_bytes`` is what the process has taken."""

    result: bytes
    recipe: Recipe
    rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """It could not be done, and the caller can tell why; the recipe says where the processor stands all the same."""

    message: str
    code: str
    recipe: Recipe


@dataclass(frozen=True)
class Unknown:
    """These processors are not in memory: the order is to come again, with scripts."""


def perform(order: Order) -> Done | Refused | Unknown:
    """See :meth:`twinkle.workers.processors.room.Room.perform`, which is loaded where this is called."""
    answer: Done | Refused | Unknown = import_module("twinkle.workers.processors.room").the_room().perform(order)
    return answer
