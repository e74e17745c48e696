"""In which order waiting operations are served: start-time fair queueing over tenants, then over a tenant's adapters.

Goyal, Vin and Cheng, "Start-time Fair Queueing" (1996): a flow's operation starts at the tag where its predecessor
ends, an operation's length is its tokens divided by the flow's weight, and the lowest start tag goes first. Two flows
that both have work differ by no more than one operation of each, whatever the sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.storage.journal.turns import Head


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """An operation and the start tag at which it is served."""

    head: Head
    start: float

    @property
    def finish(self) -> float:
        """Where its tenant's next operation starts."""
        return self.start + cost_of(self.head.num_tokens) / self.head.turn.weight


def cost_of(num_tokens: int) -> int:
    """What serving an operation counts for: its tokens; a step of the optimizer, a save or a load counts as one."""
    return max(num_tokens, 1)


def in_service_order(heads: Sequence[Head]) -> list[Tagged]:
    """All heads in the order in which they are served.

    A tenant's own heads are ordered by niceness, then by their lanes' start tags; several heads of one lane stand in
    the order given. Of a tenant with a limit no more than may run are listed.
    """
    tagged = []
    for own in _by_tenant(heads).values():
        turn = own[0].turn
        start = turn.vtime + turn.num_running_tokens / turn.weight
        room = max(turn.max_running - turn.num_running, 0) if turn.max_running else len(own)
        for head in _in_lane_order(own)[:room]:
            tagged.append(Tagged(head=head, start=start))
            start = tagged[-1].finish
    return sorted(tagged, key=_place)


def fair_part(order: Sequence[Tagged], *, min_tokens: int) -> list[Tagged]:
    """As many of the first operations as may be served before somebody's turn is due who has no more to offer now.

    An adapter's next operation can only follow in a later step. Where one waits behind an operation of this step, other
    tenants may go up to its start tag and no further; so a hundred adapters get no more than one that always has work.

    Args:
        order: Operations as they are served.
        min_tokens: A step may be filled up to here in any case: what costs the device nothing is not left empty.
    """
    turn_due: dict[str, float] = {}
    for operation in order:
        tenant = operation.head.turn.tenant
        turn_due[tenant] = operation.finish
    has_more = {operation.head.turn.tenant for operation in order if operation.head.has_next}
    due = [(turn_due[tenant], tenant) for tenant in has_more]
    first_due, whose = min(due, default=(float("inf"), ""))
    part: list[Tagged] = []
    num_tokens = 0
    for operation in order:
        is_ahead = operation.start > first_due and operation.head.turn.tenant != whose
        if is_ahead and num_tokens + operation.head.num_tokens > min_tokens:
            break
        part.append(operation)
        num_tokens += operation.head.num_tokens
    return part


def _place(operation: Tagged) -> tuple[float, bool, str]:
    """Where tags are equal, what nobody suspects goes first."""
    return operation.start, operation.head.suspicions > 0, operation.head.turn.tenant


def _by_tenant(heads: Sequence[Head]) -> dict[str, list[Head]]:
    found: defaultdict[str, list[Head]] = defaultdict(list)
    for head in heads:
        found[head.turn.tenant].append(head)
    return found


def _in_lane_order(heads: Sequence[Head]) -> list[Head]:
    """One tenant's heads, by the start tags of their lanes."""
    served: defaultdict[str, int] = defaultdict(int)
    tagged = []
    for place, head in enumerate(heads):
        tagged.append((head.nice, head.vtime + served[head.lane], head.lane, place, head))
        served[head.lane] += cost_of(head.num_tokens)
    return [entry[-1] for entry in sorted(tagged, key=lambda entry: entry[:-1])]
