"""Which adapters may leave the device: the queue knows who is needed next, so nothing has to be guessed from the past.

Parking the one that is needed last is optimal for a known future (Belady, "A study of replacement algorithms for a
virtual-storage computer", 1966). The line is known as far as operations wait in it; beyond that the longest unused
leaves first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from twinkle.scheduler.fairness import in_service_order
from twinkle.storage.journal.turns import Head


def places_in_line(heads: Sequence[Head], batch: Collection[Head]) -> dict[str, int]:
    """In which order lanes will be needed after this batch; a lane of which nothing waits has no place.

    What follows an operation of the batch comes after everything that waits now.
    """
    taken = {head.request_id for head in batch}
    waiting = [operation.head for operation in in_service_order(heads) if operation.head.request_id not in taken]
    following = [head for head in batch if head.has_next]
    places: dict[str, int] = {}
    for head in [*waiting, *following]:
        places.setdefault(head.lane, len(places))
    return places


def leaving_first(residents: Iterable[str], places: Mapping[str, int], *, pinned: Collection[str]) -> list[str]:
    """Adapters in the order in which they should leave: those nobody waits for, then those needed last.

    Args:
        residents: What is on the device, the longest unused first.
        places: See ``places_in_line``.
        pinned: What stays, whatever happens.
    """
    free = [adapter for adapter in residents if adapter not in pinned]
    return sorted(free, key=lambda adapter: -places.get(adapter, len(places)))
