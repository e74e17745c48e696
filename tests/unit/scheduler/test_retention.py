"""When an adapter gets a recovery point, and which stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.scheduler.retention import FROM_CREATION, Pace, Retention
from twinkle.storage.adapters.snapshots import Snapshot

NOW = 1_000_000.0


def _snapshot(seq: int, *, age_s: float = 0.0, is_start: bool = False) -> Snapshot:
    return Snapshot(adapter="a", seq=seq, blob=f"b{seq}", size_bytes=1, created_at=NOW - age_s, is_start=is_start)


@pytest.mark.parametrize(
    ("num_ops", "num_bytes", "age_s", "has_gradients", "is_due"),
    [
        (9, 0, 0.0, False, False),
        (10, 0, 0.0, False, True),
        (1, 100, 0.0, False, True),
        (1, 0, 60.0, False, True),
        (19, 199, 600.0, True, False),
        (20, 0, 0.0, True, True),
        (1, 200, 0.0, True, True),
    ],
)
def test_a_snapshot_is_due_by_operations_bytes_or_time_and_later_while_gradients_are_open(
    num_ops: int, num_bytes: int, age_s: float, has_gradients: bool, is_due: bool
) -> None:
    pace = Pace(every_ops=10, every_bytes=100, every_s=60.0)

    assert pace.is_due(num_ops=num_ops, num_bytes=num_bytes, age_s=age_s, has_gradients=has_gradients) is is_due


def test_within_its_time_one_snapshot_in_so_many_operations_stays_and_the_newest() -> None:
    snapshots = [_snapshot(seq) for seq in range(50, 1300, 50)]

    kept = Retention(keep_s=100, every_ops=500, max_snapshots=16).choose(snapshots, None, NOW)

    assert ([one.seq for one in kept.snapshots], kept.floor_seq) == ([500, 1000, 1250], FROM_CREATION)


def test_when_its_time_is_over_only_the_newest_stays() -> None:
    snapshots = [_snapshot(50, age_s=300), _snapshot(100, age_s=200), _snapshot(120, age_s=150, is_start=True)]

    kept = Retention(keep_s=100, every_ops=10, max_snapshots=16).choose(snapshots, None, NOW)

    assert ([one.seq for one in kept.snapshots], kept.floor_seq) == ([120], 120)


def test_what_an_accepted_fork_goes_back_to_holds_the_floor_down() -> None:
    snapshots = [_snapshot(50, age_s=300), _snapshot(100, age_s=200), _snapshot(150, age_s=150)]

    kept = Retention(keep_s=100, every_ops=10, max_snapshots=16).choose(snapshots, 120, NOW)

    assert ([one.seq for one in kept.snapshots], kept.floor_seq) == ([100, 150], 100)


def test_many_loads_shorten_the_reach_and_not_the_bound() -> None:
    snapshots = [_snapshot(seq, is_start=True) for seq in range(1, 31)]

    kept = Retention(keep_s=1e9, every_ops=1, max_snapshots=5).choose(snapshots, None, NOW)

    assert ([one.seq for one in kept.snapshots], kept.floor_seq) == ([26, 27, 28, 29, 30], 26)


@st.composite
def _histories(draw: st.DrawFn) -> tuple[list[Snapshot], int | None, Retention]:
    ages = sorted(draw(st.lists(st.floats(0, 200), max_size=30)), reverse=True)
    seqs = sorted(draw(st.sets(st.integers(0, 400), min_size=len(ages), max_size=len(ages))))
    snapshots = [_snapshot(seq, age_s=age, is_start=draw(st.booleans())) for seq, age in zip(seqs, ages, strict=True)]
    needed = draw(st.none() | st.integers(0, 400))
    keep_s, every_ops = draw(st.floats(1, 200)), draw(st.integers(1, 100))
    return snapshots, needed, Retention(keep_s=keep_s, every_ops=every_ops, max_snapshots=draw(st.integers(2, 8)))


@given(_histories())
def test_whatever_is_kept_every_state_within_reach_can_be_rebuilt(
    history: tuple[list[Snapshot], int | None, Retention],
) -> None:
    """A rebuild begins at the nearest snapshot kept, or the creation, and may cross no start."""
    snapshots, needed, retention = history

    kept = retention.choose(snapshots, needed, NOW)

    seqs = [one.seq for one in kept.snapshots]
    starts = [one.seq for one in snapshots if one.is_start]
    first = kept.floor_seq if needed is None else min(kept.floor_seq, needed)
    for target in range(max(first, 0), 401):
        base = max((seq for seq in seqs if seq <= target), default=FROM_CREATION)
        assert base >= kept.floor_seq or target < kept.floor_seq
        assert not any(base < start <= target for start in starts), (target, base)
    assert not snapshots or seqs[-1] == snapshots[-1].seq
    assert needed is None or kept.floor_seq <= needed
    if needed is None:
        assert len(seqs) <= retention.max_snapshots
