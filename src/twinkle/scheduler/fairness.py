"""What operations are charged, and in which order they are served: start-time fair queueing over tenants, then over a
tenant's adapters.

Goyal, Vin and Cheng, "Start-time Fair Queueing" (1996): a flow's operation starts at the tag where its predecessor
ends, an operation's length is its charge divided by the flow's weight, and the lowest start tag goes first. Two flows
that both have work differ by no more than one operation of each, whatever the sizes. A flow that was idle starts at the
virtual time of the level above, so what it did not use is no credit.

Tags are made of what the journal read, and what was served is added to it by the statement that records an outcome
(``storage/journal/executing.py::charge``). It is what the device did, in tokens, and counts towards the tenant's rate
as well:

- A forward pass, with or without its backward pass: its tokens. It shares its device time with others. An operation
  whose loss compares datums goes through the model twice, and is charged twice.
- A sample: the tokens of its prompt and those that were drawn, for the same reason; also one that was cancelled or came
  too late while it was drawn.
- Everything else has the device to itself, and is charged for the device's time: the seconds it took, times the tokens
  per second that the mesh's passes have come to lately. A fork or a rewind replays past operations at its tenant's
  wish: those tokens are the least it is charged.
- Weights of a past state that are made anew to be sampled from are charged like a fork, to the sample for which they
  were made, even if it is refused then. The samples that find them there are charged nothing for them.
- An adapter that is rebuilt because its worker died, or because others needed its place on the device, is charged to
  nobody: that is the service's doing. So is an attempt that is tried again; what else failed counts as one token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twinkle.storage.journal.turns import Choice, Choose, Head, Turn

_DECAY = 0.95
"""How much of a pass's weight is left after the next one: the rate is that of the last twenty or so."""


@dataclass
class PassRate:
    """The tokens per second that a mesh's passes have come to lately."""

    _num_tokens: float = 0.0
    _device_s: float = 0.0

    def note(self, num_tokens: int, device_s: float) -> None:
        """A pass, of one operation or of several, has run."""
        self._num_tokens = _DECAY * self._num_tokens + num_tokens
        self._device_s = _DECAY * self._device_s + device_s

    @property
    def tokens_per_s(self) -> float:
        """0 until a pass was measured: then nobody has waited for one either."""
        return self._num_tokens / self._device_s if self._device_s > 0 else 0.0


def charge_of_tokens(num_tokens: int) -> int:
    """The charge of a pass or a sample; and what is reckoned with for whatever waits, one token where it has none."""
    return max(num_tokens, 1)


def charge_of_time(device_s: float, *, tokens_per_s: float, num_replayed: int = 0) -> int:
    """The charge of what had the device to itself.

    Args:
        device_s: For how long.
        tokens_per_s: What the device would have done for others in that time.
        num_replayed: The tokens of the past passes it ran once more.
    """
    return max(round(device_s * tokens_per_s), num_replayed, 1)


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """An operation and the start tag at which it is served."""

    head: Head
    start: float

    @property
    def finish(self) -> float:
        """Where its tenant's next operation starts."""
        return self.start + charge_of_tokens(self.head.num_tokens) / self.head.turn.weight


def start_of_tenant(turn: Turn) -> float:
    """The start tag of a tenant's next operation, were nothing of it running: none is below the mesh's virtual time."""
    return max(turn.vtime, turn.mesh_vtime)


def start_of_lane(head: Head) -> float:
    """The start tag of an operation among its tenant's; a sample that runs counts as served."""
    return max(head.vtime, head.turn.lane_vtime) + head.num_running_tokens


def virtual_time(offered: Iterable[Head]) -> float:
    """The mesh's virtual time when these are offered: the lowest start tag. Of nothing it is 0, which moves none on."""
    return min((start_of_tenant(head.turn) for head in offered), default=0.0)


def with_virtual_time(choose: Callable[[list[Head]], list[Head]]) -> Choose:
    """What the journal asks: what is chosen of the heads on offer, and the virtual time that follows of them all."""
    return lambda offered: Choice(heads=choose(offered), vtime=virtual_time(offered))


def in_service_order(heads: Sequence[Head]) -> list[Tagged]:
    """All heads in the order in which they are served.

    A tenant's own heads are ordered by niceness, then by their lanes' start tags; several heads of one lane stand in
    the order given. Of a tenant with a limit no more than may run are listed, sample by sample with all its sequences.
    """
    tagged = []
    for own in _by_tenant(heads).values():
        turn = own[0].turn
        start = start_of_tenant(turn) + turn.num_running_tokens / turn.weight
        for head in _within_limit(turn, _in_lane_order(own)):
            tagged.append(Tagged(head=head, start=start))
            start = tagged[-1].finish
    return sorted(tagged, key=_place)


def _within_limit(turn: Turn, heads: Sequence[Head]) -> Sequence[Head]:
    """As many of the first heads as a tenant's limit has places for; one that has more than all of them runs alone."""
    if not turn.max_running:
        return heads
    num_running = turn.num_running
    for place, head in enumerate(heads):
        num_running += head.num_sequences
        if num_running > turn.max_running and num_running > head.num_sequences:
            return heads[:place]
    return heads


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
        tagged.append((head.nice, start_of_lane(head) + served[head.lane], head.lane, place, head))
        served[head.lane] += charge_of_tokens(head.num_tokens)
    return [entry[-1] for entry in sorted(tagged, key=lambda entry: entry[:-1])]
