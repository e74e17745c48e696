"""Walks the raw bytes of a protobuf message without building it.

For the two questions that must be answered before a body is parsed: whose is it, when it is too large to read; and how
many small parts does it claim, because an empty part costs two bytes on the wire and a hundred in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_VARINT, _FIXED64, _BYTES, _GROUP_START, _GROUP_END, _FIXED32 = range(6)


class Field(NamedTuple):
    """One field as it lies in the buffer: ``value`` of a varint, or the bounds of its bytes, or neither."""

    number: int
    value: int
    start: int
    end: int

    @property
    def is_bytes(self) -> bool:
        """Whether the field is a string, bytes, or a message."""
        return self.start >= 0


def scan_fields(raw: bytes | memoryview, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """Yields the fields of one message in order, and stops at the first that is cut off or malformed.

    What is in a group comes as if it were in the message: the parser keeps a group that it does not know.
    """
    end = len(raw) if end is None else end
    position = start
    while position < end:
        tag, position = _varint(raw, position, end)
        if tag < 8:
            return
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, position = _varint(raw, position, end)
            if value < 0:
                return
            yield Field(number, value, -1, -1)
        elif wire_type == _BYTES:
            length, position = _varint(raw, position, end)
            if length < 0 or position + length > end:
                return
            yield Field(number, 0, position, position + length)
            position += length
        elif wire_type in (_FIXED32, _FIXED64):
            position += 4 if wire_type == _FIXED32 else 8
            yield Field(number, 0, -1, -1)
        elif wire_type in (_GROUP_START, _GROUP_END):
            yield Field(number, 0, -1, -1)
        else:
            return


def _varint(raw: bytes | memoryview, position: int, end: int) -> tuple[int, int]:
    """Reads (value, next position); the value is -1 when it is cut off or longer than ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            return -1, position
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    return -1, position
