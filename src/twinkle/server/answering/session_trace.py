"""A session's timeline as a trace: a track for each training run and sampling session, what waits, what runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from twinkle.core.operation import FailureCategory, OperationKind, OperationState
from twinkle.core.standing import WaitReason
from twinkle.storage.journal.timeline import PastOrPresent, SessionLane, Timeline
from twinkle.wire.trace import Facts, Rows, TraceWriter

_PACKETS_A_PIECE = 2000
# Behind all training runs; a session has fewer than that.
_SAMPLERS_RANK = 1_000_000
_RUNNING, _WAITING, _SESSION = "running", "waiting", "session"


@dataclass(frozen=True)
class Wait:
    """A stretch of time for which an operation did not run, and why."""

    reason: WaitReason
    begins: float
    ends: float | None


def trace_of(timeline: Timeline, session_id: str, *, now: float) -> Iterator[bytes]:
    """A session's trace as of ``now``, piece by piece. Reads as it goes; each piece blocks for a page or two.

    Raises:
        NotFound: There is no such session.
        StorageUnavailable: The journal did not answer.
    """
    session = timeline.session(session_id)
    writer = TraceWriter(now=now)
    process = writer.add_process(f"session {session.id}")
    root = writer.add_track(_SESSION, parent=process)
    facts = {"session_id": session.id, "finish_reason": session.finish_reason}
    writer.add_slice(
        root, _SESSION, category=_SESSION, begins=session.created_at, ends=session.finished_at, facts=facts
    )
    for name, at in (("last heartbeat", session.heartbeat_at), ("trace made", now)):
        writer.add_instant(root, name, category=_SESSION, at=at, facts={})
    for lane in timeline.lanes(session.id):
        tracks = _LaneTracks(writer, lane, process)
        previous = None
        for operation in timeline.operations(lane.id, until=now):
            tracks.add(operation, previous)
            previous = operation
            if writer.num_packets >= _PACKETS_A_PIECE:
                yield writer.take()
    yield writer.take()


def waits_of(operation: PastOrPresent, previous: PastOrPresent | None) -> list[Wait]:
    """How long an operation waited, and why; a wait without an end goes on.

    ``previous`` is the one before it in its lane. A sample has none that it waits for.
    """
    begins = operation.accepted_at
    ends = operation.ran_from if operation.ran_from is not None else operation.finished_at
    waits: list[Wait] = []
    if operation.kind.is_ordered:
        in_line = _in_line(operation, previous)
        if in_line is not None:
            turn_at = in_line.ends if ends is None or in_line.ends is None else min(in_line.ends, ends)
            if turn_at is None or ends == turn_at:
                return [Wait(in_line.reason, begins, ends)]
            waits.append(Wait(in_line.reason, begins, turn_at))
            begins = turn_at
    if ends is not None or operation.attempts == 0 or operation.started_at is None:
        return [*waits, Wait(WaitReason.QUEUED, begins, ends)]
    # The last attempt, of which only the beginning is known, and the pause after it.
    last_try_at = max(operation.started_at, begins)
    return [
        *waits,
        Wait(WaitReason.QUEUED, begins, last_try_at),
        Wait(WaitReason.RETRY_BACKOFF, last_try_at, None),
    ]


def _in_line(operation: PastOrPresent, previous: PastOrPresent | None) -> Wait | None:
    """The wait until it was the operation's turn; ``None`` if it was at once."""
    begins = operation.accepted_at
    if operation.seq != (0 if previous is None else previous.seq + 1):
        return Wait(WaitReason.WAITING_FOR_GAP, begins, None)
    if previous is None or (previous.finished_at is not None and previous.finished_at <= begins):
        return None
    is_gap = previous.kind is OperationKind.GAP
    reason = WaitReason.WAITING_FOR_GAP if is_gap else WaitReason.WAITING_FOR_PREDECESSOR
    return Wait(reason, begins, previous.finished_at)


class _LaneTracks:
    """The tracks of one training run or sampling session."""

    def __init__(self, writer: TraceWriter, lane: SessionLane, process: int) -> None:
        name, number = _name_of(lane)
        rank = number if lane.is_run else _SAMPLERS_RANK + number
        self._writer = writer
        self._track = writer.add_track(name, parent=process, rank=rank, description=_description_of(lane))
        self._running = Rows(writer, _RUNNING, parent=self._track, rank=0)
        self._waiting = Rows(writer, _WAITING, parent=self._track, rank=1)
        for event, at in (("created", lane.created_at), ("parked", lane.parked_at)):
            if at is not None:
                facts = {"base_model": lane.base_model, "rank": lane.rank}
                writer.add_instant(self._track, event, category=_SESSION, at=at, facts=facts)

    def add(self, operation: PastOrPresent, previous: PastOrPresent | None) -> None:
        """An operation's slices."""
        if operation.kind is OperationKind.GAP:
            at = operation.accepted_at
            self._writer.add_instant(self._track, operation.kind, category=_WAITING, at=at, facts=_facts(operation))
            return
        waits = waits_of(operation, previous)
        runs_from = operation.ran_from
        flow = None if runs_from is None else self._writer.new_flow()
        track = self._waiting.track(waits[0].begins, waits[-1].ends)
        for wait in waits:
            is_last = wait is waits[-1]
            self._writer.add_slice(
                track,
                wait.reason,
                category=_WAITING,
                begins=wait.begins,
                ends=wait.ends,
                facts=_facts(operation) if is_last and runs_from is None else _name_facts(operation),
                flow_out=flow if is_last else None,
            )
        if runs_from is not None:
            self._writer.add_slice(
                self._running.track(runs_from, operation.finished_at),
                operation.kind,
                category=_RUNNING,
                begins=runs_from,
                ends=operation.finished_at,
                facts=_facts(operation),
                flow_in=flow,
            )


def _name_of(lane: SessionLane) -> tuple[str, int]:
    """A lane's name within its session, and its number."""
    name = lane.id.partition(":")[2] or lane.id
    number = name.rpartition(":")[2]
    return name, int(number) if number.isdecimal() else 0


def _description_of(lane: SessionLane) -> str:
    if lane.is_run:
        return f"{lane.base_model}, rank {lane.rank}"
    return f"samples from {lane.model_path or lane.base_model}"


def _name_facts(operation: PastOrPresent) -> Facts:
    return {"request_id": operation.request_id, "kind": operation.kind.value, "seq": operation.seq}


def _facts(operation: PastOrPresent) -> Facts:
    """All that is told of an operation. Never a text that may quote its request: whoever has the URL reads this."""
    is_quoting = operation.error_category == FailureCategory.USER
    is_done = operation.state is OperationState.DONE
    return {
        **_name_facts(operation),
        "state": operation.state.value,
        "attempt": operation.attempts,
        "code": operation.error_code,
        "category": operation.error_category,
        "reason": None if is_quoting else operation.error,
        "next_try_at": operation.next_try_at,
        "mesh": operation.mesh,
        "payload_bytes": operation.payload_bytes,
        "tokens": operation.num_tokens,
        "prompt_tokens": operation.num_prompt_tokens or None,
        "device_s": operation.device_s if is_done else None,
    }
