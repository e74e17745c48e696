"""Which heads the next batch takes, whatever heads there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinkle.core.operation import OperationKind
from twinkle.scheduler.fusion import choose_batch
from twinkle.storage.journal import Head

_PASSES = {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD}
_ORDERED = [kind for kind in OperationKind if kind.is_ordered and kind is not OperationKind.GAP]


def _head(
    lane: int,
    kind: OperationKind = OperationKind.FORWARD_BACKWARD,
    *,
    attempts: int = 0,
    num_tokens: int = 10,
) -> Head:
    return Head(lane=f"lane{lane}", tenant="t", seq=1, kind=kind, attempts=attempts, num_tokens=num_tokens)


_heads = st.lists(
    st.builds(
        _head,
        st.integers(0, 99),
        st.sampled_from(_ORDERED),
        attempts=st.sampled_from([0, 0, 0, 1]),
        num_tokens=st.integers(0, 500),
    ),
    unique_by=lambda head: head.lane,
    max_size=12,
)


def _choose(heads: list[Head], *, previous_was_light: bool = False) -> list[Head]:
    return choose_batch(heads, max_adapters=4, max_tokens=300, previous_was_light=previous_was_light)


@given(_heads, st.booleans())
def test_whatever_waits_something_is_chosen_of_it_and_within_the_limits(
    heads: list[Head], previous_was_light: bool
) -> None:
    batch = _choose(heads, previous_was_light=previous_was_light)

    assert bool(batch) == bool(heads)
    assert len(batch) <= 4
    assert [head for head in heads if head in batch] == batch, "in the order of fairness"
    assert {head.kind in _PASSES for head in batch} in (set(), {True}, {False}), "passes and light ones do not mix"
    if len(batch) > 1 and batch[0].kind in _PASSES:
        assert sum(head.num_tokens for head in batch) <= 300


@given(_heads, st.booleans())
def test_who_has_been_tried_before_runs_alone_and_first(heads: list[Head], previous_was_light: bool) -> None:
    suspects = [head for head in heads if head.attempts]

    batch = _choose(heads, previous_was_light=previous_was_light)

    assert batch == suspects[:1] if suspects else all(head.attempts == 0 for head in batch)


@given(_heads)
def test_light_operations_do_not_go_twice_in_a_row_while_passes_wait(heads: list[Head]) -> None:
    fresh = [head for head in heads if head.attempts == 0]
    passes = [head for head in fresh if head.kind in _PASSES]

    batch = _choose(fresh, previous_was_light=True)

    if passes:
        assert batch[0] == passes[0]


@given(_heads)
def test_light_operations_go_before_passes_since_each_frees_one(heads: list[Head]) -> None:
    fresh = [head for head in heads if head.attempts == 0]
    light = [head for head in fresh if head.kind not in _PASSES]

    if light:
        assert _choose(fresh) == light[:4]


def test_a_pass_larger_than_the_limit_runs_alone_and_is_not_passed_over() -> None:
    huge, small = _head(0, num_tokens=1000), _head(1, num_tokens=1)

    assert _choose([huge, small]) == [huge]
    assert _choose([small, huge]) == [small]
