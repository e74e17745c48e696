"""What an API key may be used for."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from twinkle.core.errors import InvalidInput


class Scope(StrEnum):
    """A part of what a tenant may do. The values are stored and written by people; they never change."""

    TRAIN = "train"
    """Whatever makes, changes or deletes something: runs, checkpoints, jobs, files, other keys' tokens."""
    SAMPLE = "sample"
    """Samples and batches of them, and what they need: sessions, files, the batches themselves."""
    READ = "read"
    """Looking at what there is and collecting results. Every key may do this."""


ALL_SCOPES = frozenset(Scope)


def read_scopes(words: Iterable[str]) -> frozenset[Scope]:
    """The scopes that words name; ``read`` is always among them.

    Raises:
        InvalidInput: A word is none.
    """
    known = {scope.value for scope in Scope}
    for word in words:
        if word not in known:
            raise InvalidInput("scopes", f"{word!r} is none; use some of train, sample and read")
    return frozenset(Scope(word) for word in words) | {Scope.READ}
