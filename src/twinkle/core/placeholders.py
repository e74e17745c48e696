"""Texts with places to fill in, ``{{item.answer}}``: names and numbers lead to a value, and nothing is ever run.

A text is read in one pass, in time in proportion to its length. What is filled in is not read again, so a value that
holds braces stays what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from twinkle.core.errors import InvalidInput

MAX_TEMPLATE_CHARACTERS = 65_536
MAX_PLACES = 100
MAX_PATH_CHARACTERS = 200
MAX_FILLED_CHARACTERS = 262_144

_OPEN, _CLOSE = "{{", "}}"
_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*(?:\.[A-Za-z0-9_\-]+|\[[0-9]{1,6}\])*")
_STEP = re.compile(r"[^.\[\]]+")


class PlaceMissing(Exception):
    """There is nothing to fill in, or what there is makes the text too long."""


@dataclass(frozen=True)
class ValuePlace:
    """Where a value comes from: the name it begins with, and the steps from there."""

    path: str
    root: str
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Placeholders:
    """A text that was read: plain pieces and places in turn."""

    pieces: tuple[str | ValuePlace, ...]

    @property
    def places(self) -> tuple[ValuePlace, ...]:
        """Those to fill in."""
        return tuple(piece for piece in self.pieces if isinstance(piece, ValuePlace))

    def fill(self, values: Mapping[str, object]) -> str:
        """The text with its values.

        Raises:
            PlaceMissing: A place leads nowhere, or the text gets too long.
        """
        written: list[str] = []
        length = 0
        for piece in self.pieces:
            text = piece if isinstance(piece, str) else _written(_find(values, piece))
            length += len(text)
            if length > MAX_FILLED_CHARACTERS:
                raise PlaceMissing(f"filled in, it has more than {MAX_FILLED_CHARACTERS} characters")
            written.append(text)
        return "".join(written)


@lru_cache(maxsize=256)
def _read(text: str, roots: frozenset[str], field: str) -> Placeholders:
    pieces: list[str | ValuePlace] = []
    position = num_places = 0
    while (start := text.find(_OPEN, position)) >= 0:
        end = text.find(_CLOSE, start)
        if end < 0:
            raise InvalidInput(field, f"has {_OPEN} at character {start + 1} without {_CLOSE}")
        if start > position:
            pieces.append(text[position:start])
        pieces.append(_place(text[start + len(_OPEN) : end].strip(), roots, field))
        position = end + len(_CLOSE)
        num_places += 1
        if num_places > MAX_PLACES:
            raise InvalidInput(field, f"has more than {MAX_PLACES} places to fill in")
    if position < len(text):
        pieces.append(text[position:])
    return Placeholders(tuple(pieces))


def read_placeholders(text: str, *, field: str, roots: frozenset[str]) -> Placeholders:
    """Reads a text whose places begin with one of ``roots``.

    Raises:
        InvalidInput: A place is no path of names and numbers, or begins with another name.
    """
    if len(text) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidInput(field, f"has {len(text)} characters, more than {MAX_TEMPLATE_CHARACTERS}")
    return _read(text, roots, field)


def _place(path: str, roots: frozenset[str], field: str) -> ValuePlace:
    if len(path) > MAX_PATH_CHARACTERS or not _PATH.fullmatch(path):
        raise InvalidInput(
            field, f"has {_OPEN}{path[:60]}{_CLOSE}; between the braces stands a path like item.answer or item.rows[0]"
        )
    root, *steps = _STEP.findall(path)
    if root not in roots:
        raise InvalidInput(field, f"asks for {path!r}; a path begins with {' or '.join(sorted(roots))}")
    return ValuePlace(path, root, tuple(steps))


def _find(values: Mapping[str, object], place: ValuePlace) -> object:
    value: object = values.get(place.root)
    for step in place.steps:
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, Sequence) and not isinstance(value, str) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            raise PlaceMissing(f"there is no {place.path}")
    return value


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
