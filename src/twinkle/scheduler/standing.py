"""Where operations stand: positions in fair order, when they may start, and why they wait. Pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinkle.core.ids import request_id_of
from twinkle.core.operation import OperationState
from twinkle.core.standing import QueuePlace, Standing, WaitReason
from twinkle.scheduler.fairness import charge_of_tokens, in_service_order
from twinkle.storage.journal.queues import Ended, MeshQueue, OperationPlace
from twinkle.storage.journal.turns import Head

_PAUSE_S = 1.0
"""Work that begins within this time after other work has ended belongs to the same busy period."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A mesh's queue, put in order. ``training_rate`` and ``sampling_rate`` are tokens per second while it was busy."""

    places: dict[str, QueuePlace]
    last_of_cut_lane: dict[str, int]
    training_rate: float | None
    sampling_rate: float | None

    def place_of(self, operation: OperationPlace) -> QueuePlace | None:
        """Its place; a lower bound for one that stands behind what was looked at of its adapter's queue."""
        place = self.places.get(operation.request_id)
        last = self.last_of_cut_lane.get(operation.lane)
        if place is not None or last is None or operation.seq <= last:
            return place
        before = self.places[request_id_of(operation.lane, last)]
        more = operation.seq - last
        return QueuePlace(
            num_before=before.num_before + more,
            num_own_before=before.num_own_before + more,
            num_tokens_before=before.num_tokens_before + more,
            is_exact=False,
        )


def line_up(queue: MeshQueue) -> Line:
    """Put a queue into the order in which it will be served, were nothing to arrive any more.

    Steps of the optimizer, saves and loads may be taken a step earlier than their place says, since each frees a pass.
    """
    last = Counter[str]()
    for head in queue.training:
        if head.lane in queue.cut_lanes:
            last[head.lane] = max(last[head.lane], head.seq)
    places = _places(queue.training, last, is_complete=queue.is_complete)
    places |= _places(queue.samples, {}, is_complete=queue.is_complete)
    return Line(
        places=places,
        last_of_cut_lane=dict(last),
        training_rate=measured_rate(ended for ended in queue.recent if not ended.is_sample),
        sampling_rate=measured_rate(ended for ended in queue.recent if ended.is_sample),
    )


def measured_rate(recent: Iterable[Ended]) -> float | None:
    """Tokens per second over the times in which there was work; ``None`` where nothing was measured."""
    busy_s = 0.0
    num_tokens = 0
    busy_until = float("-inf")
    for ended in sorted(recent, key=lambda ended: ended.started_at):
        num_tokens += charge_of_tokens(ended.num_tokens)
        begins = ended.started_at if ended.started_at > busy_until + _PAUSE_S else busy_until
        busy_s += max(ended.finished_at - begins, 0.0)
        busy_until = max(busy_until, ended.finished_at)
    return num_tokens / busy_s if busy_s > 0 else None


def standing_of(
    operation: OperationPlace, line: Line, *, is_mesh_alive: bool, now: float, max_attempts: int
) -> Standing:
    """Why an operation is where it is, and when it may start."""
    reason, waits_for_seq = _reason(operation, is_mesh_alive=is_mesh_alive, now=now)
    place = line.place_of(operation) if operation.state is OperationState.QUEUED else None
    return Standing(
        request_id=operation.request_id,
        kind=operation.kind,
        state=operation.state,
        mesh=operation.mesh,
        lane=operation.lane,
        seq=operation.seq,
        reason=reason,
        waits_for_seq=waits_for_seq,
        place=place,
        starts_in_s=_starts_in_s(operation, line, place, reason, now),
        attempt=operation.attempts,
        max_attempts=max_attempts,
        last_error=operation.last_error,
        next_try_at=operation.not_before if operation.not_before > now else None,
        accepted_at=operation.accepted_at,
    )


def describe(standing: Standing, *, now: float) -> str:
    """A standing in a sentence, for whoever waits."""
    where = f"mesh {standing.mesh!r}"
    match standing.reason:
        case WaitReason.DONE:
            return "it has ended"
        case WaitReason.MESH_UNAVAILABLE:
            return f"no worker of {where} is running; the operation is kept and runs when one is back"
        case WaitReason.RUNNING:
            return f"running on {where}, attempt {standing.attempt} of {standing.max_attempts}"
        case WaitReason.WAITING_FOR_GAP:
            return f"operation {standing.waits_for_seq} of this adapter has not arrived; send it again, or wait it out"
        case WaitReason.RATE_LIMITED:
            return "your tokens per minute are used up; accepted operations are kept and go on by themselves"
        case WaitReason.RETRY_BACKOFF:
            due_s = max((standing.next_try_at or now) - now, 0.0)
            return (
                f"attempt {standing.attempt} of {standing.max_attempts} failed ({standing.last_error or 'no reason'});"
                f" the next one is due in {due_s:.0f} s"
            )
    told = f"waits on {where}"
    if standing.place is not None and standing.place.num_before == 0:
        told = f"next in line on {where}"
    elif standing.place is not None:
        bound = "" if standing.place.is_exact else "at least "
        told += f" behind {bound}{standing.place.num_before} operations, {standing.place.num_own_before} of them yours"
    if standing.starts_in_s is not None:
        told += f"; starts in about {standing.starts_in_s:.0f} s"
    return told


def _places(heads: Sequence[Head], last: dict[str, int], *, is_complete: bool) -> dict[str, QueuePlace]:
    places = {}
    own: Counter[str] = Counter()
    num_tokens = 0
    is_exact = is_complete
    for number, operation in enumerate(in_service_order(heads)):
        head = operation.head
        places[head.request_id] = QueuePlace(
            num_before=number,
            num_own_before=own[head.turn.tenant],
            num_tokens_before=num_tokens,
            is_exact=is_exact,
        )
        own[head.turn.tenant] += 1
        num_tokens += charge_of_tokens(head.num_tokens)
        # Behind the last one that is known of a lane there are others whose places are not.
        is_exact = is_exact and last.get(head.lane) != head.seq
    return places


def _reason(operation: OperationPlace, *, is_mesh_alive: bool, now: float) -> tuple[WaitReason, int | None]:
    if operation.state.is_final:
        return WaitReason.DONE, None
    if not is_mesh_alive:
        return WaitReason.MESH_UNAVAILABLE, None
    if operation.state is OperationState.RUNNING:
        return WaitReason.RUNNING, None
    is_behind = operation.kind.is_ordered and operation.seq > operation.head_seq
    if is_behind and operation.is_head_missing:
        return WaitReason.WAITING_FOR_GAP, operation.head_seq
    if operation.paused_until > now:
        return WaitReason.RATE_LIMITED, None
    if is_behind:
        return WaitReason.WAITING_FOR_PREDECESSOR, operation.seq - 1
    if operation.not_before > now:
        return WaitReason.RETRY_BACKOFF, None
    return WaitReason.QUEUED, None


def _starts_in_s(
    operation: OperationPlace, line: Line, place: QueuePlace | None, reason: WaitReason, now: float
) -> float | None:
    """From the tokens before it and the measured rate; never before a pause ends that is known."""
    rate = line.training_rate if operation.kind.is_ordered else line.sampling_rate
    if place is None or reason in {WaitReason.MESH_UNAVAILABLE, WaitReason.WAITING_FOR_GAP}:
        return None
    if rate is None and place.num_before:
        return None
    in_line_s = place.num_tokens_before / rate if rate else 0.0
    return max(in_line_s, operation.paused_until - now, operation.not_before - now, 0.0)
