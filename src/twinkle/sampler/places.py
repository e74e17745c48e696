"""How many sequences a group of requests may have among all that are drawn at once: some are left to others."""

from __future__ import annotations

GUEST_PART = 4
"""Of so many slots one more is there that no group of requests takes alone."""
GROUP_PART = (4, 5)
"""What one group may have of the places that others leave."""


def with_guests(slots: int) -> int:
    """All places, of which one group has ``slots`` at most."""
    return slots + max(slots // GUEST_PART, 1)


def most_of_group(*, slots: int, places: int, others: int) -> int:
    """How many sequences one group may have in all, while those of ``others`` are so many."""
    left = places - others
    return min(slots, max(left * GROUP_PART[0] // GROUP_PART[1], 1), left)
