"""Writes traces that https://ui.perfetto.dev opens: tracks, slices and instants, piece by piece."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, TypeAlias

from google.protobuf.message_factory import GetMessageClass

from twinkle.wire.protobuf import read_schema

Facts: TypeAlias = Mapping[str, str | int | float | None]
"""What is known of a slice, by name; what is ``None`` is left out."""

_Trace = GetMessageClass(read_schema("perfetto").FindMessageTypeByName("twinkle_perfetto.Trace"))

# The enums' numbers, as in perfetto.proto.
_REALTIME, _BOOTTIME = 1, 6
_EXPLICIT = 3
_SLICE_BEGIN, _SLICE_END, _INSTANT = 1, 2, 3

# Every packet is of one sequence, and slices need one.
_SEQUENCE = 1
_PID = 1
_NEVER = float("inf")


class TraceWriter:
    """Collects packets until somebody takes them. Times are Unix seconds.

    Packets may come in any order of time, but those of one track must: Perfetto sorts them by time and keeps their
    order where times are equal.
    """

    def __init__(self, *, now: float) -> None:
        """Begin a trace that was made at ``now``."""
        self._trace = _Trace()
        self._num_tracks = 0
        self._num_flows = 0
        # Times are the world's. The same number for Perfetto's own default clock makes it show them as such.
        snapshot = self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE).clock_snapshot
        for clock in (_BOOTTIME, _REALTIME):
            snapshot.clocks.add(clock_id=clock, timestamp=_nanoseconds(now))
        snapshot.primary_trace_clock = _REALTIME

    @property
    def num_packets(self) -> int:
        """How many wait to be taken."""
        return len(self._trace.packet)

    def take(self) -> bytes:
        """What has been written since the last time: a trace is these bytes, one piece after the other."""
        piece: bytes = self._trace.SerializeToString()
        # Not emptied but made anew: a message keeps the memory of what was ever in it.
        self._trace = _Trace()
        return piece

    def add_process(self, name: str) -> int:
        """A track that all others are under."""
        track = self._new_track()
        track.process.pid, track.process.process_name = _PID, name
        return int(track.uuid)

    def add_track(self, name: str, *, parent: int, rank: int = 0, description: str = "") -> int:
        """A track under another one; siblings stand in the order of their ranks."""
        track = self._new_track()
        track.name, track.parent_uuid, track.sibling_order_rank = name, parent, rank
        track.description = description
        return int(track.uuid)

    def new_flow(self) -> int:
        """A number for an arrow from one slice to another."""
        self._num_flows += 1
        return self._num_flows

    def add_slice(
        self,
        track: int,
        name: str,
        *,
        category: str,
        begins: float,
        ends: float | None,
        facts: Facts,
        flow_out: int | None = None,
        flow_in: int | None = None,
    ) -> None:
        """Something that lasts; with ``ends`` ``None`` it has not ended."""
        event = self._event(track, _SLICE_BEGIN, begins)
        event.name = name
        event.categories.append(category)
        _annotate(event, facts)
        if flow_out is not None:
            event.flow_ids = flow_out
        if flow_in is not None:
            event.terminating_flow_ids = flow_in
        if ends is not None:
            self._event(track, _SLICE_END, max(begins, ends))

    def add_instant(self, track: int, name: str, *, category: str, at: float, facts: Facts) -> None:
        """Something that happens."""
        event = self._event(track, _INSTANT, at)
        event.name = name
        event.categories.append(category)
        _annotate(event, facts)

    def _new_track(self) -> Any:
        self._num_tracks += 1
        track = self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE).track_descriptor
        track.uuid, track.child_ordering = self._num_tracks, _EXPLICIT
        return track

    def _event(self, track: int, kind: int, at: float) -> Any:
        packet = self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE, timestamp=_nanoseconds(at))
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        return event


class Rows:
    """Tracks of one name for slices that may overlap, which those of one track must not. Perfetto shows them as one."""

    def __init__(self, writer: TraceWriter, name: str, *, parent: int, rank: int) -> None:
        self._writer = writer
        self._name = name
        self._parent = parent
        self._rank = rank
        self._free_at: list[tuple[float, int]] = []

    def track(self, begins: float, ends: float | None) -> int:
        """A track on which nothing lies from ``begins`` on; it is taken until ``ends``, or for ever."""
        taken_until = _NEVER if ends is None else max(begins, ends)
        if self._free_at and self._free_at[0][0] <= begins:
            track = self._free_at[0][1]
            heapq.heapreplace(self._free_at, (taken_until, track))
            return track
        track = self._writer.add_track(self._name, parent=self._parent, rank=self._rank)
        heapq.heappush(self._free_at, (taken_until, track))
        return track


def _annotate(event: Any, facts: Facts) -> None:
    for name, value in facts.items():
        match value:
            case None:
                continue
            case str():
                event.debug_annotations.add(name=name, string_value=value)
            case int():
                event.debug_annotations.add(name=name, int_value=value)
            case float():
                event.debug_annotations.add(name=name, double_value=value)


def _nanoseconds(at: float) -> int:
    # A float holds the time of these years to a quarter of a microsecond.
    return round(at * 1e6) * 1000
