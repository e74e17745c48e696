"""JSON written piece by piece: what comes of a long array is never there as a whole.

One call of a writer holds the interpreter until it is done, and with it every other request: of a million numbers for a
tenth of a second, of as many pairs for half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias, cast

import orjson

Write: TypeAlias = Callable[[object], bytes]

MEMBERS_AT_ONCE = 4096
"""Of an array that one call writes."""


def in_pieces(value: object, *, write: Write = orjson.dumps) -> Iterator[bytes]:
    """A value's JSON. What has no long array in it, as far as objects lie in objects, is one piece.

    Args:
        value: Of mappings with texts as keys, lists and what ``write`` takes.
        write: Writes values in one go.
    """
    if isinstance(value, Mapping) and any(_is_long(one) for one in value.values()):
        before = b"{"
        for key, one in value.items():
            lead = before + write(key) + b":"
            for piece in in_pieces(one, write=write):
                yield lead + piece
                lead = b""
            before = b","
        yield b"}"
    elif isinstance(value, list) and len(value) > MEMBERS_AT_ONCE:
        before = b"["
        for start in range(0, len(value), MEMBERS_AT_ONCE):
            yield before + write(value[start : start + MEMBERS_AT_ONCE])[1:-1]
            before = b","
        yield b"]"
    else:
        yield write(value)


def with_array(
    head: Mapping[str, object],
    name: str,
    parts: Iterable[object],
    tail: Mapping[str, object],
    *,
    write: Write = orjson.dumps,
) -> Iterator[bytes]:
    """An object's JSON in pieces: what stands in its head, an array whose members are made one by one, and the rest."""
    yield (write(head)[:-1] + b"," if head else b"{") + write(name) + b":["
    for number, part in enumerate(parts):
        lead = b"," if number else b""
        for piece in in_pieces(part, write=write):
            yield lead + piece
            lead = b""
    pieces = in_pieces(tail, write=write) if tail else iter([b"{}"])
    yield b"]" + (b"," if tail else b"") + next(pieces)[1:]
    yield from pieces


def _is_long(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_is_long(one) for one in cast(Mapping[str, object], value).values())
    return isinstance(value, list) and len(value) > MEMBERS_AT_ONCE
