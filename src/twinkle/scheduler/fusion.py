"""Which waiting operations the next device step takes together. Pure decisions; the journal asks, the worker obeys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from twinkle.core.operation import Claim, OperationKind
from twinkle.scheduler.fairness import Tagged, fair_part, in_service_order
from twinkle.storage.journal.turns import Head

_FUSED = {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD}
_LARGE_AT_ONCE = 2
_MOST_GUESTS = 8
_REPLAYING = {OperationKind.FORK, OperationKind.REWIND}


@dataclass(frozen=True, kw_only=True)
class Places:
    """How many adapters may come to those at work on the device, and whether so many fit there together."""

    spare: int
    fit: Callable[[Sequence[str]], bool]


UNLIMITED = Places(spare=1 << 30, fit=lambda _: True)


def alone_from(max_attempts: int) -> int:
    """From how many suspicions on an operation runs alone: after two, and at its last attempt in any case.

    Whatever was under way when a worker died runs together once more, since most workers are killed by something else.
    """
    return max(min(2, max_attempts - 1), 1)


def choose_batch(
    heads: list[Head],
    *,
    max_adapters: int,
    max_tokens: int,
    min_tokens: int,
    previous_was_light: bool,
    suspect_from: int = 2,
    has_suspect: bool = False,
) -> list[Head]:
    """Pick the heads of the next batch.

    A suspect runs alone when its turn comes, so that nobody else is blamed for it, and only while no other suspect is
    in the worker's hands (``has_suspect``): an operation is one from ``suspect_from`` suspicions on. A fork or a rewind
    may replay much, so it runs alone too when its turn comes, and not before. Light operations (optimizer steps, saves,
    loads) go before forward passes, because each one frees a pass that can then be fused; but never twice in a row
    while passes wait, and of no tenant that has had more than all the waiting passes would bring theirs: a stream of
    saves cannot starve training. Passes are fused up to ``max_adapters`` and ``max_tokens``, and always at least one;
    beyond ``min_tokens`` only as far as no tenant is served ahead of another one whose turn it would be.
    """
    order = in_service_order(heads)
    if order and order[0].head.suspicions >= suspect_from and not has_suspect:
        return [order[0].head]
    others = [operation for operation in order if operation.head.suspicions < suspect_from]
    if others and others[0].head.kind in _REPLAYING:
        return [others[0].head]
    passes = [operation for operation in others if operation.head.kind in _FUSED]
    horizon = max((operation.finish for operation in passes), default=float("inf"))
    light = [
        operation.head
        for operation in others
        if operation.head.kind not in _FUSED | _REPLAYING and operation.start <= horizon
    ]
    if light and not (previous_was_light and passes):
        return light[:max_adapters]
    replaying = next((operation for operation in others if operation.head.kind in _REPLAYING), None)
    if replaying is not None:
        # Its turn is next: nobody who comes after it goes with those who come before.
        passes = [operation for operation in passes if operation.start <= replaying.start] or passes[:1]
    return _as_fits(fair_part(passes[:max_adapters], min_tokens=min_tokens), max_tokens)


def choose_ahead(
    heads: list[Head],
    followed: Collection[str],
    *,
    max_adapters: int,
    max_tokens: int,
    min_tokens: int = 0,
    suspect_from: int = 2,
    places: Places = UNLIMITED,
) -> list[Head]:
    """Pick what is to be at hand when the device has done what it is at: no more than goes together.

    What is offered are heads of lanes that nobody works on, and what follows in those that are worked on
    (``followed``), whose tokens count as served. For an adapter that is at work alone that is what comes next of it,
    several steps of it. Else it is the next batch as :func:`choose_batch` would choose it when the device comes to
    rest, of each lane the light operations and the pass behind them: whoever goes through the model together stays
    together. From a suspect on, or from what runs alone, nothing is taken; beside others nothing at all, since whoever
    is in the worker's hands when it dies is suspected.
    """
    order = in_service_order(heads)
    if len(followed) == 1 and all(head.lane in followed for head in heads):
        return _of_one_lane(order[:max_adapters], max_tokens=max_tokens, suspect_from=suspect_from)
    if any(head.suspicions or head.kind in _REPLAYING for head in heads):
        return []
    light, passes = _first_passes(_as_far_as_there_is_room(order, followed, places))
    horizon = max((operation.finish for operation in passes), default=float("inf"))
    taken = [operation for operation in light if operation.start <= horizon][:max_adapters]
    left = {operation.head.lane for operation in light if operation not in taken}
    passes = [operation for operation in passes if operation.head.lane not in left][:max_adapters]
    return [operation.head for operation in taken] + _as_fits(fair_part(passes, min_tokens=min_tokens), max_tokens)


def _as_fits(passes: Iterable[Tagged], max_tokens: int) -> list[Head]:
    """The passes that go together: one at least, however large, and no more tokens than ``max_tokens``."""
    batch: list[Head] = []
    num_tokens = 0
    for operation in passes:
        num_tokens += operation.head.num_tokens
        if batch and num_tokens > max_tokens:
            break
        batch.append(operation.head)
    return batch


def _of_one_lane(order: Sequence[Tagged], *, max_tokens: int, suspect_from: int) -> list[Head]:
    ahead: list[Head] = []
    num_tokens = 0
    for operation in order:
        head = operation.head
        num_tokens += head.num_tokens
        if head.suspicions >= suspect_from or head.kind in _REPLAYING or (ahead and num_tokens > max_tokens):
            break
        ahead.append(head)
    return ahead


def _as_far_as_there_is_room(order: Sequence[Tagged], followed: Collection[str], places: Places) -> list[Tagged]:
    """Up to the first whose adapter has no place beside those at work: whose turn it is makes room when they rest."""
    newcomers: list[str] = []
    part: list[Tagged] = []
    for operation in order:
        lane = operation.head.lane
        if lane not in followed and lane not in newcomers:
            newcomers.append(lane)
            if len(newcomers) > places.spare or not places.fit(newcomers):
                break
        part.append(operation)
    return part


def _first_passes(order: Sequence[Tagged]) -> tuple[list[Tagged], list[Tagged]]:
    """Of each lane what is light before its first pass, and that pass."""
    light: list[Tagged] = []
    passes: dict[str, Tagged] = {}
    for operation in order:
        head = operation.head
        if head.lane in passes:
            continue
        if head.kind in _FUSED:
            passes[head.lane] = operation
        else:
            light.append(operation)
    return light, list(passes.values())


def beside(heads: list[Head], passing: Sequence[Claim], *, large_tokens: int, suspect_from: int = 2) -> list[Head]:
    """The heads that may be begun while others' passes are half through the model; all of them while none are.

    A large pass lets others go between its slices, so that nobody waits for all of it: those tenants that have nothing
    under way there. Of large ones two are at once, since a third would only make all three take longer. A suspect goes
    alone, and nothing is begun beside one.
    """
    if not passing:
        return heads
    if any(claim.suspicions >= suspect_from for claim in passing):
        return []
    tenants = {claim.tenant for claim in passing}
    has_room = sum(claim.num_tokens > large_tokens for claim in passing) < _LARGE_AT_ONCE
    return [
        head
        for head in heads
        if head.turn.tenant not in tenants
        and head.suspicions < suspect_from
        and (has_room or head.num_tokens <= large_tokens)
    ]


def choose_samples(
    heads: list[Head], *, room: int, is_idle: bool, suspect_from: int = 2, drawing: Collection[str] | None = None
) -> list[Head]:
    """Pick the samples to begin with, as many as have room with all their sequences.

    One with more sequences than there is room for waits until there is, and the others behind it; an idle holder begins
    with it whatever its size. Where it is told whose samples are ``drawing``, tenants that have none there need no
    room, a few at a time: the sampler has places that no one tenant can take, and shares them out one by one.

    A suspect is taken alone, and only by an idle holder: were it the cause, its companions would be blamed with it.
    Until it has run, nothing else begins.
    """
    suspects = [head for head in heads if head.suspicions >= suspect_from]
    if suspects:
        return suspects[:1] if is_idle else []
    chosen: list[Head] = []
    present = None if drawing is None else set(drawing)
    num_guests, is_full = 0, False
    for operation in in_service_order(heads):
        head = operation.head
        fits = not is_full and (head.num_sequences <= room or (is_idle and not chosen))
        is_guest = not fits and present is not None and head.turn.tenant not in present and num_guests < _MOST_GUESTS
        if not fits:
            is_full = True
            if not is_guest:
                continue
            num_guests += 1
        room -= head.num_sequences
        chosen.append(head)
        if present is not None:
            present.add(head.turn.tenant)
    return chosen
