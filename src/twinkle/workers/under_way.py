"""What a worker has in its hands: operations, one behind the other in each lane, and passes that share a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic

from twinkle.core.batch_loss import num_passes
from twinkle.core.operation import Claim, OperationKind, Payload
from twinkle.storage.journal.records import Records
from twinkle.storage.journal.turns import Followed
from twinkle.wire.calls import Call
from twinkle.wire.training import ForwardBackwardBody
from twinkle.wire.training_result import ForwardBackwardResult
from twinkle.workers.engine import CallAnswer, Pass, PassAnswer, State
from twinkle.workers.requests import ReadAhead
from twinkle.workers.steps import Job

PASSES = frozenset({OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD})
FOLLOWED = PASSES | {OperationKind.OPTIM_STEP}
"""Behind these more may be claimed ahead, and they are read then."""
_MOST_IN_LANE = 8
"""How many operations of one adapter are in hand at once: four steps of the usual kind."""
_LEAST_TAKEN = 4
"""For fewer behind those of an adapter that is at work alone nobody looks: the device waits a little for each look."""
_MOST_BEHIND = 2
"""How many are claimed behind those in hand where several adapters are at work: a step and the next pass."""


@dataclass(eq=False)
class Operation(Generic[State]):
    """An operation under way: the steps of the whole, or those before or after the pass it shares with others."""

    claim: Claim
    started_at: float
    previous: Operation[State] | None = None
    """What it follows on in its lane, unless that is committed or about to be."""
    body: ReadAhead | None = None
    """Its request, where that was read while the device was at work."""
    records: Records = field(default_factory=Records)
    job: Job[Pass[State] | Payload | ForwardBackwardResult] = field(init=False)
    device_s: float = 0.0
    num_tokens: int = 0
    passed_tokens: int = 0
    """Its tokens, as often as they went through the model."""
    clears_gradients: bool = False
    is_done: bool = False
    """Whether the adapter in memory has it, though its result may not be stored yet."""
    is_unwanted: bool = False
    """Whether what it followed on has failed: it goes back to the journal."""

    @property
    def may_begin(self) -> bool:
        """Whether the adapter in memory is as it is to find it."""
        return self.previous is None or self.previous.is_done

    @property
    def has_ended(self) -> bool:
        """Whether it has a result or an error."""
        return self.job.has_ended and (self.job.error is not None or not isinstance(self.job.result, Pass))

    def expected_tokens(self, item: Pass[State]) -> int:
        """How many tokens its pass has; of a call what the API has counted: its rows may have to be encoded yet."""
        body = item.body
        return self.claim.num_tokens if isinstance(body, Call) else sum(len(datum.tokens) for datum in body.data)

    def note(self, item: Pass[State], answer: PassAnswer) -> None:
        """What its pass took, now that it has run."""
        self.num_tokens = self.passed_tokens = self.expected_tokens(item)
        if isinstance(item.body, ForwardBackwardBody):
            body = item.body
            self.passed_tokens *= num_passes(body.loss_fn, body.loss_fn_config, forward_only=body.forward_only)
        elif isinstance(answer, CallAnswer):
            self.num_tokens, self.passed_tokens = answer.num_tokens, answer.passed_tokens


@dataclass(eq=False)
class Batch(Generic[State]):
    """Passes that go through the model together, a slice at a time."""

    ready: list[tuple[Operation[State], Pass[State]]]
    job: Job[tuple[Sequence[PassAnswer], float]]
    num_slices: int = 0
    """How many it has had."""


class Lanes(Generic[State]):
    """The operations in hand, each behind the one it follows on. They end in the order of their numbers."""

    def __init__(self) -> None:
        self._chains: dict[str, deque[Operation[State]]] = {}

    def __iter__(self) -> Iterator[Operation[State]]:
        return (operation for chain in self._chains.values() for operation in chain)

    def __bool__(self) -> bool:
        return bool(self._chains)

    @property
    def names(self) -> set[str]:
        """The adapters with operations in hand."""
        return set(self._chains)

    def add(self, operation: Operation[State]) -> None:
        """Take one in, behind those of its lane."""
        chain = self._chains.setdefault(operation.claim.lane, deque())
        operation.previous = chain[-1] if chain else None
        chain.append(operation)

    def take_ended(self, lane: str) -> Operation[State] | None:
        """The first of a lane, if it has ended; it is in hand no more."""
        chain = self._chains.get(lane)
        if not chain or not chain[0].has_ended:
            return None
        operation = chain[0]
        self.remove(operation)
        return operation

    def remove(self, operation: Operation[State]) -> None:
        """Let go of one. What is behind it follows on nothing that is in hand."""
        chain = self._chains[operation.claim.lane]
        chain.remove(operation)
        if chain:
            chain[0].previous = None
        else:
            del self._chains[operation.claim.lane]

    def of(self, lane: str) -> list[Operation[State]]:
        """Those of a lane."""
        return list(self._chains.get(lane, ()))

    def clear(self) -> None:
        """Let go of all."""
        self._chains.clear()

    def followed(self, room_ahead: Callable[[str, int], int]) -> list[Followed]:
        """What may be claimed ahead: behind passes and optimizer steps that nobody suspects, a few in each lane.

        Where several adapters are at work, of each the next batch's: none gets ahead of those it goes with.

        Args:
            room_ahead: How many may be begun behind a number of a lane before that one is committed.
        """
        found = []
        is_alone = len(self._chains) == 1
        for lane, chain in self._chains.items():
            claims = [operation.claim for operation in chain]
            is_plain = all(claim.kind in FOLLOWED and not claim.suspicions for claim in claims)
            is_wanted = not any(operation.is_unwanted for operation in chain)
            room = _MOST_IN_LANE - len(chain)
            if is_alone:
                room = room if room >= _LEAST_TAKEN else 0
            else:
                room = min(room, _MOST_BEHIND) if sum(claim.kind in PASSES for claim in claims) <= 1 else 0
            last_seq = claims[-1].seq
            found.append(
                Followed(
                    lane=lane,
                    tenant=claims[0].tenant,
                    last_seq=last_seq,
                    room=min(room, room_ahead(lane, last_seq)) if room > 0 and is_plain and is_wanted else 0,
                    num_tokens=sum(claim.num_tokens for claim in claims),
                )
            )
        return found
