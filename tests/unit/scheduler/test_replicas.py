"""How many meshes of a kind there are, and which work goes to a new one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.scheduler.replicas import ReplicaRule, ReplicaWatch, even_out

RULE = ReplicaRule(least=1, most=4, operations_each=10, grow_after_s=5, shrink_after_s=60)


@pytest.mark.parametrize(
    ("num_open", "num_busy", "wanted"),
    [(0, 0, 1), (10, 9, 1), (11, 9, 2), (1000, 9, 4), (1000, 1, 1), (1000, 3, 3)],
)
def test_so_many_meshes_that_each_has_its_operations_and_none_has_nothing_to_do(
    num_open: int, num_busy: int, wanted: int
) -> None:
    assert RULE.wanted(num_open=num_open, num_busy=num_busy) == wanted


def test_a_burst_that_passes_starts_no_mesh_and_a_pause_gives_none_back() -> None:
    watch = ReplicaWatch(RULE)

    def number(at_s: float, num_open: int, num_meshes: int) -> int:
        return watch.number(num_open=num_open, num_busy=9, num_meshes=num_meshes, now_s=at_s)

    assert [number(at_s, 25, 1) for at_s in (0, 4)] == [1, 1]
    assert number(4.5, 5, 1) == 1
    assert [number(at_s, 25, 1) for at_s in (5, 9, 10)] == [1, 1, 3]
    assert [number(at_s, 5, 3) for at_s in (11, 70)] == [3, 3]
    assert number(70.5, 25, 3) == 3
    assert [number(at_s, 5, 3) for at_s in (71, 130)] == [3, 3]
    assert [number(at_s, 15, 3) for at_s in (130.5,)] == [3]
    assert number(131, 5, 3) == 2
    assert [number(at_s, 5, 2) for at_s in (132, 191, 192)] == [2, 2, 1]


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), min_size=1))
def test_work_is_evened_out_by_as_few_moves_as_can_be(numbers: dict[str, int]) -> None:
    lanes = {mesh: [f"{mesh}{number}" for number in range(count)] for mesh, count in numbers.items()}

    moves = even_out(lanes)

    places = {lane: mesh for mesh, ids in lanes.items() for lane in ids} | dict(moves)
    after = Counter(dict.fromkeys(numbers, 0)) + Counter(places.values())
    counts = [after[mesh] for mesh in numbers]
    assert max(counts) - min(counts) <= 1
    share = sum(counts) // len(counts)
    assert len(moves) == len(dict(moves))
    assert len(moves) <= sum(max(0, count - share) for count in numbers.values())
