"""What the steps of a chat template cost, counted before they are taken: the same on every machine, never time.

A template comes with a model's files, and what it is given comes from whoever asks. A few characters of it can ask for
any amount of work or memory: loops in loops, texts that double, paddings of a gigabyte.
"""

from __future__ import annotations

import re
import threading
from collections.abc import ItemsView, KeysView, Mapping, MappingView, Sequence, Set, ValuesView
from typing import Any, TypeVar

from jinja2 import TemplateError
from jinja2.utils import Namespace

MAX_STEPS = 2**20
"""Of one conversation: two seconds of computing, or 32 million characters, at the very most."""
_CHARACTERS_PER_STEP = 32
_MAX_INTEGER_BITS = 4096
_MAX_WIDTH_DIGITS = 4
_WIDTHS = re.compile(r"\d+")
_WIDTH_FROM_VALUES = re.compile(r"%[^%\s]*\*|\{[^{}]*\{")
_SORTING_STEPS = 16

T = TypeVar("T")
_Scalar = (str, int, float, type(None))


class TooMuchWork(TemplateError):
    """A conversation for which its template would do more than is allowed."""


class Steps(threading.local):
    """What is left of a rendering's steps. Each thread renders one conversation at a time."""

    def __init__(self, most: int = MAX_STEPS) -> None:
        self._most = most
        self.begin()

    def begin(self) -> None:
        """A new conversation."""
        self.left = self._most
        self.spans: list[tuple[int, int]] = []
        self._pieces: list[str] = []
        self._num_written = 0

    def write(self, piece: str) -> None:
        """Append to what comes out."""
        self._pieces.append(piece)
        self._num_written += len(piece)

    def text(self) -> str:
        """What came out."""
        return "".join(self._pieces)

    def note_span(self, num_characters: int) -> None:
        """Remember the place of what is written next."""
        self.spans.append((self._num_written, self._num_written + num_characters))

    def take(self, num_steps: int = 1) -> None:
        """Go so many steps; raises ``TooMuchWork`` when that is too far."""
        self.left -= num_steps
        if self.left < 0:
            raise TooMuchWork(f"it takes more than {self._most} steps for this conversation; shorten it")

    def take_text(self, num_characters: int) -> None:
        """Write or look through so many characters."""
        self.left -= 1 + num_characters // _CHARACTERS_PER_STEP
        if self.left < 0:
            self.take(0)

    def taken(self, result: T) -> T:
        """Something that was just made, as far as it is a text or a list."""
        if isinstance(result, str | list):
            self.take_length(result)
        return result

    def take_whole(self, value: object) -> int:
        """Look through a value and all that it holds, as often as it holds it. How deep it is."""
        if isinstance(value, str):
            self.take_text(len(value))
            return 1
        pending: list[tuple[object, int]] = [(value, 1)]
        deepest = 1
        while pending:
            found, depth = pending.pop()
            deepest = max(deepest, depth)
            if isinstance(found, str):
                self.take_text(len(found))
                continue
            inner = _members(found)
            self.take(1 + len(inner))
            pending.extend((one, depth + 1) for one in inner)
        return deepest

    def take_length(self, value: object) -> None:
        """Look once at each member of a value, or at a text."""
        if isinstance(value, str):
            self.take_text(len(value))
        else:
            self.take(1 + length(value))

    def take_comparison(self, left: object, right: object, *, is_search: bool) -> None:
        """Compare two values, or look for one in the other."""
        if type(left) is str and type(right) is str:
            self.take_text(len(right))
        elif isinstance(left, _Scalar) and isinstance(right, _Scalar):
            self.take(1 + (len(right) // _CHARACTERS_PER_STEP if isinstance(right, str) else 0))
        elif is_search and isinstance(left, _Scalar):
            self.take(1 if isinstance(right, Mapping) else 1 + length(right))
        elif is_search or not (isinstance(left, _Scalar) or isinstance(right, _Scalar)):
            self.take_whole(left)
            self.take_whole(right)
        else:
            self.take()

    def take_operator(self, operator: str, left: object, right: object) -> None:
        """Compute: what a text, a list or a number grows to is taken before it does."""
        if operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(some, str | list | tuple) and isinstance(times, int):
                    return self._take_repeated(some, times)
            _check_integer(_bits(left) + _bits(right))
        elif operator == "**":
            _check_integer(_bits(left) * abs(right) if isinstance(right, int) else 0)
        elif operator == "%" and isinstance(left, str):
            return self.take_format(left, right)
        elif operator == "+":
            self.take_length(left)
            self.take_length(right)
        return self.take()

    def take_joined(self, left: str, right: str) -> None:
        """Put one text behind another."""
        self.left -= 3 + len(left) // _CHARACTERS_PER_STEP + len(right) // _CHARACTERS_PER_STEP
        if self.left < 0:
            self.take(0)

    def take_format(self, form: str, *values: object) -> None:
        """Write values into a text that says how wide they are, each perhaps wherever the text has a place for one."""
        plain = form.replace("{{", "").replace("%%", "")
        widths = [int(width) if len(width) <= _MAX_WIDTH_DIGITS else -1 for width in _WIDTHS.findall(plain)]
        if -1 in widths or _WIDTH_FROM_VALUES.search(plain):
            raise TooMuchWork(f"a format may ask for numbers of {_MAX_WIDTH_DIGITS} digits, not for wider ones")
        self.take_text(len(form) + sum(widths))
        before = self.left
        for value in values:
            self.take_whole(value)
        self.take((before - self.left) * max(plain.count("%") + plain.count("{") - 1, 0))

    def take_sorting(self, value: object) -> None:
        """Compare everything with everything, nearly."""
        for _ in range(_SORTING_STEPS):
            self.take_whole(value)

    def take_width(self, width: object, *, times: int = 1) -> None:
        """Pad to a width."""
        self.take_text(times * max(width, 0) if isinstance(width, int) else times * length(width))

    def _take_repeated(self, some: str | list[Any] | tuple[Any, ...], times: int) -> None:
        grown = len(some) * max(times, 0)
        self.take_text(grown) if isinstance(some, str) else self.take(1 + grown)


def _members(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | Set | KeysView | ValuesView | ItemsView):
        return [*value]
    if isinstance(value, Namespace):
        # Its attributes have no other door; a template reads them by name.
        return list(object.__getattribute__(value, "_Namespace__attrs").values())
    return range(len(value)) if isinstance(value, range) else ()


def length(value: object) -> int:
    """How many members a value has, as far as it has any."""
    return len(value) if isinstance(value, str | Mapping | Sequence | Set | MappingView) else 0


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_integer(num_bits: int) -> None:
    if num_bits > _MAX_INTEGER_BITS:
        raise TooMuchWork(f"a number would have more than {_MAX_INTEGER_BITS} bits")
