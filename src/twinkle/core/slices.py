"""Work that is done a slice at a time: whoever does it may do something else between two of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")

Slices: TypeAlias = Generator[None, None, Result]


def finished(slices: Slices[Result]) -> Result:
    """What the work comes to, all of it done at once."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: Result = end.value
            return result
