"""Which rows lie together in one of a given length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinkle.core.errors import InvalidInput

TOLD_EVERY = 4096
"""Rows between two words on how far packing is."""


def pack_lengths(
    lengths: Sequence[int], capacity: int, *, advance: Callable[[int], None] | None = None
) -> list[list[int]]:
    """Rows in as few bins as best-fit decreasing makes: longest first, each into the fullest bin it still fits into.

    Args:
        lengths: Tokens of each row.
        capacity: Tokens of a bin.
        advance: Told now and then how many more rows have their bin.

    Returns:
        The numbers of the rows in each bin, ascending; the bins in the order of their first row.

    Raises:
        InvalidInput: A row is longer than a bin.
    """
    open_bins: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    """The bins by the room that is left in them."""
    rooms = 0
    """Bit n is set while there is a bin with room for n; the lowest one at or above a length is the best fit."""
    done: list[list[int]] = []
    for count, number in enumerate(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)), start=1):
        length = lengths[number]
        if not 0 < length <= capacity:
            raise InvalidInput("length", f"of row {number} is {length}; a packed row holds 1 to {capacity} tokens")
        fitting = rooms >> length
        room = (fitting & -fitting).bit_length() - 1 + length if fitting else capacity
        members = open_bins[room].pop() if fitting else []
        if fitting and not open_bins[room]:
            rooms &= ~(1 << room)
        members.append(number)
        if room == length:
            done.append(members)
        else:
            open_bins[room - length].append(members)
            rooms |= 1 << (room - length)
        if advance is not None and count % TOLD_EVERY == 0:
            advance(TOLD_EVERY)
    if advance is not None:
        advance(len(lengths) % TOLD_EVERY)
    done += [members for waiting in open_bins for members in waiting]
    return sorted(sorted(members) for members in done)
