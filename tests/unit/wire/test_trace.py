"""Traces as Perfetto's own message classes read them."""

from __future__ import annotations

import psutil
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as theirs

from twinkle.wire import trace as ours
from twinkle.wire.trace import Rows, TraceWriter

NESTED = {"Clock": theirs.ClockSnapshot.Clock.DESCRIPTOR}
PACKED_BY_US_NEVER = {"flow_ids", "terminating_flow_ids"}


def _theirs(name: str) -> Descriptor:
    found = NESTED.get(name)
    return found if found is not None else getattr(theirs, name).DESCRIPTOR


def test_every_field_has_the_number_and_the_type_it_has_in_perfettos_own_schema() -> None:
    file = ours._Trace.DESCRIPTOR.file

    for message in file.message_types_by_name.values():
        for field in message.fields:
            same = _theirs(message.name).fields_by_name[field.name]
            assert (field.number, field.type) == (same.number, same.type), field.full_name
            assert field.is_repeated == same.is_repeated or field.name in PACKED_BY_US_NEVER, field.full_name
            assert not field.is_repeated or field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING)


def test_every_enum_has_the_numbers_of_perfettos_own() -> None:
    same = {
        "BuiltinClock": theirs.BuiltinClock,
        "ChildTracksOrdering": theirs.TrackDescriptor.ChildTracksOrdering,
        "EventType": theirs.TrackEvent.Type,
    }

    for enum in ours._Trace.DESCRIPTOR.file.enum_types_by_name.values():
        for value in enum.values:
            assert same[enum.name].Value(value.name) == value.number


def test_a_trace_is_its_pieces_one_after_the_other() -> None:
    writer = TraceWriter(now=1_700_000_000.5)
    process = writer.add_process("p")
    pieces = [writer.take()]
    track = writer.add_track("t", parent=process, rank=3, description="d")
    facts = {"seq": 0, "name": "x", "share": 0.5, "nothing": None}
    writer.add_slice(track, "s", category="c", begins=1.0, ends=2.0, facts=facts, flow_out=7)
    pieces.append(writer.take())
    writer.add_slice(track, "open", category="c", begins=3.0, ends=None, facts={}, flow_in=7)
    writer.add_instant(track, "i", category="c", at=4.0, facts={})
    pieces.append(writer.take())

    snapshot, first, second, *events = theirs.Trace.FromString(b"".join(pieces)).packet

    assert [clock.timestamp for clock in snapshot.clock_snapshot.clocks] == [1_700_000_000_500_000_000] * 2
    assert first.track_descriptor.process.process_name == "p"
    assert (second.track_descriptor.parent_uuid, second.track_descriptor.sibling_order_rank) == (process, 3)
    begin, end, begin_open, instant = (event.track_event for event in events)
    assert [packet.timestamp for packet in events] == [10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9]
    assert [begin.type, end.type, begin_open.type, instant.type] == [1, 2, 1, 3]
    assert {event.track_uuid for event in (begin, end, begin_open, instant)} == {track}
    told = {fact.name: getattr(fact, fact.WhichOneof("value")) for fact in begin.debug_annotations}
    assert told == {"seq": 0, "name": "x", "share": 0.5}
    assert (list(begin.flow_ids), list(begin_open.terminating_flow_ids)) == ([7], [7])
    assert {packet.trusted_packet_sequence_id for packet in (snapshot, first, second, *events)} == {1}
    assert writer.take() == b""


def test_what_was_taken_is_no_longer_in_memory() -> None:
    writer, process = TraceWriter(now=0.0), psutil.Process()
    track = writer.add_process("p")
    before = process.memory_info().rss

    for n in range(100_000):
        writer.add_instant(track, "i", category="c", at=float(n), facts={"seq": n})
        if writer.num_packets >= 1000:
            writer.take()

    # Kept, it would be over 30 MB.
    assert process.memory_info().rss - before < 10 * 2**20


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20) | st.none()), max_size=60),
)
def test_slices_of_one_track_never_overlap_and_there_are_no_more_tracks_than_needed(
    spans: list[tuple[int, int | None]],
) -> None:
    writer = TraceWriter(now=0.0)
    rows = Rows(writer, "r", parent=writer.add_process("p"), rank=0)
    free_at: dict[int, float] = {}
    spans.sort(key=lambda span: span[0])

    for begins, length in spans:
        track = rows.track(begins, None if length is None else begins + length)
        assert free_at.get(track, 0.0) <= begins
        free_at[track] = float("inf") if length is None else begins + length

    at_once = max(
        (
            sum(begins <= at and (length is None or at < begins + max(length, 0.5)) for begins, length in spans)
            for at, _ in spans
        ),
        default=0,
    )
    assert len(free_at) <= max(at_once, 0)
