"""In which order a tenant wants its own adapters served: a whole number in the metadata of a run or of its session."""

from __future__ import annotations

from collections.abc import Mapping

from twinkle.core.errors import InvalidInput

PRIORITY_KEY = "twinkle_priority"
MAX_PRIORITY = 100


def priority_of(*metadata: Mapping[str, str] | None) -> int:
    """The priority in the first of these that has one, else 0; the highest goes first.

    Raises:
        InvalidInput: It is no whole number, or out of range.
    """
    for values in metadata:
        text = (values or {}).get(PRIORITY_KEY)
        if text is None:
            continue
        try:
            priority = int(text)
        except ValueError:
            priority = MAX_PRIORITY + 1
        if abs(priority) > MAX_PRIORITY:
            raise InvalidInput(
                f"user_metadata.{PRIORITY_KEY}",
                f"must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {text[:40]!r}",
            )
        return priority
    return 0
