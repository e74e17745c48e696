"""Who leaves the device first, whatever waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.heads import head, turn
from twinkle.core.operation import OperationKind
from twinkle.scheduler.residency import leaving_first, places_in_line

_PASS = OperationKind.FORWARD_BACKWARD


def test_what_waits_comes_in_the_order_of_fairness_and_after_it_what_follows_the_batch() -> None:
    ahead, behind = turn("t0"), turn("t1", vtime=500)
    heads = [
        head("late", _PASS, of=behind),
        head("now", _PASS, of=ahead, has_next=True),
        head("soon", _PASS, of=ahead, vtime=10),
        head("last", _PASS, of=ahead, vtime=5, has_next=False),
    ]
    batch = [heads[1], heads[3]]

    assert places_in_line(heads, batch) == {"soon": 0, "late": 1, "now": 2}


def test_an_idle_adapter_leaves_before_any_that_is_waited_for_and_the_longest_unused_first() -> None:
    residents = ["soon", "idle-long", "late", "idle-short"]

    assert leaving_first(residents, {"soon": 0, "late": 1}, pinned=()) == ["idle-long", "idle-short", "late", "soon"]


def test_a_pinned_adapter_never_leaves() -> None:
    assert leaving_first(["a", "b"], {"b": 0}, pinned={"a"}) == ["b"]


@given(st.permutations(range(6)), st.integers(1, 3), st.integers(6, 40))
def test_in_a_round_over_more_adapters_than_fit_fewer_come_back_than_if_the_longest_unused_left(
    order: list[int], limit: int, num_turns: int
) -> None:
    turns = [str(order[index % len(order)]) for index in range(num_turns)]

    def returns(*, by_line: bool) -> int:
        residents: list[str] = []
        count = 0
        for index, wanted in enumerate(turns):
            count += wanted not in residents
            residents = [adapter for adapter in residents if adapter != wanted] + [wanted]
            line = list(dict.fromkeys(turns[index + 1 :]))
            places = {adapter: place for place, adapter in enumerate(line)} if by_line else {}
            for adapter in leaving_first(residents, places, pinned=())[: max(len(residents) - limit, 0)]:
                residents.remove(adapter)
        return count

    assert returns(by_line=True) <= returns(by_line=False)
