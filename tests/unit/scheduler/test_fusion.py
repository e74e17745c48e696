"""Which heads the next batch takes, whatever heads there are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from harness.heads import head, turn
from twinkle.core.operation import OperationKind
from twinkle.scheduler.fairness import in_service_order
from twinkle.scheduler.fusion import UNLIMITED, Places, alone_from, choose_ahead, choose_batch, choose_samples
from twinkle.storage.journal.turns import Head

_PASSES = {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD}
_REPLAYING = {OperationKind.FORK, OperationKind.REWIND}
_ORDERED = [kind for kind in OperationKind if kind.is_ordered and kind is not OperationKind.GAP]
_FOLLOWING = sorted(_PASSES | {OperationKind.OPTIM_STEP})
SUSPECT_FROM = 2
_TURNS = [turn("t0"), turn("t1", vtime=30, weight=2.0), turn("t2", vtime=100)]

_heads = st.lists(
    st.builds(
        head,
        st.integers(0, 99).map(lambda number: f"lane{number:02d}"),
        st.sampled_from(_ORDERED),
        of=st.sampled_from(_TURNS),
        suspicions=st.sampled_from([0, 0, 1, 2]),
        num_tokens=st.integers(0, 500),
        has_next=st.booleans(),
    ),
    unique_by=lambda head: head.lane,
    max_size=12,
)


def _choose(
    heads: list[Head], *, previous_was_light: bool = False, min_tokens: int = 0, has_suspect: bool = False
) -> list[Head]:
    return choose_batch(
        heads,
        max_adapters=4,
        max_tokens=300,
        min_tokens=min_tokens,
        previous_was_light=previous_was_light,
        suspect_from=SUSPECT_FROM,
        has_suspect=has_suspect,
    )


def _in_order(heads: list[Head]) -> list[Head]:
    return [operation.head for operation in in_service_order(heads)]


@given(_heads, st.booleans(), st.sampled_from([0, 200, 10_000]))
def test_whatever_waits_something_is_chosen_of_it_and_within_the_limits(
    heads: list[Head], previous_was_light: bool, min_tokens: int
) -> None:
    batch = _choose(heads, previous_was_light=previous_was_light, min_tokens=min_tokens)

    assert bool(batch) == bool(heads)
    assert len(batch) <= 4
    assert [head for head in _in_order(heads) if head in batch] == batch, "in the order of fairness"
    assert {head.kind in _PASSES for head in batch} in (set(), {True}, {False}), "passes and light ones do not mix"
    if len(batch) > 1 and batch[0].kind in _PASSES:
        assert sum(head.num_tokens for head in batch) <= 300


@given(_heads, st.booleans())
def test_a_suspect_runs_alone_when_its_turn_comes(heads: list[Head], previous_was_light: bool) -> None:
    first = _in_order(heads)[:1]

    batch = _choose(heads, previous_was_light=previous_was_light)

    if first and first[0].suspicions >= SUSPECT_FROM:
        assert batch == first
    else:
        assert all(head.suspicions < SUSPECT_FROM for head in batch)


@given(_heads)
def test_no_suspect_begins_beside_another_one_and_the_others_go_on(heads: list[Head]) -> None:
    batch = _choose(heads, has_suspect=True)

    assert all(head.suspicions < SUSPECT_FROM for head in batch)
    assert bool(batch) == any(head.suspicions < SUSPECT_FROM for head in heads)


def test_what_was_under_way_when_a_worker_died_runs_together_once_more_and_alone_at_its_last_attempt() -> None:
    assert [alone_from(max_attempts) for max_attempts in (2, 3, 4, 20)] == [1, 2, 2, 2]
    once, twice = ([head(f"lane{number}", suspicions=times) for number in range(4)] for times in (1, 2))

    assert _choose(once) == once
    assert _choose(twice) == twice[:1]


@given(_heads)
def test_light_operations_do_not_go_twice_in_a_row_while_passes_wait(heads: list[Head]) -> None:
    fresh = [head for head in heads if head.suspicions < SUSPECT_FROM and head.kind not in _REPLAYING]
    passes = [head for head in _in_order(fresh) if head.kind in _PASSES]

    batch = _choose(fresh, previous_was_light=True)

    if passes:
        assert batch[0] == passes[0]


@given(_heads)
def test_light_operations_go_before_passes_since_each_frees_one(heads: list[Head]) -> None:
    fresh = [head for head in heads if head.suspicions < SUSPECT_FROM and head.kind not in _REPLAYING]
    order = in_service_order(fresh)
    horizon = max((each.finish for each in order if each.head.kind in _PASSES), default=float("inf"))
    light = [each.head for each in order if each.head.kind not in _PASSES and each.start <= horizon]

    if light:
        assert _choose(fresh) == light[:4]


def test_a_tenant_that_is_ahead_of_all_passes_gets_no_light_operation_before_them() -> None:
    behind = head("a", of=turn("behind", vtime=0), num_tokens=50)
    ahead = head("b", OperationKind.SAVE_WEIGHTS, of=turn("ahead", vtime=51))
    level = head("c", OperationKind.OPTIM_STEP, of=turn("level", vtime=50))

    assert _choose([behind, ahead]) == [behind]
    assert _choose([behind, ahead, level]) == [level]
    assert _choose([ahead]) == [ahead]


@given(_heads)
def test_a_fork_or_a_rewind_runs_alone_and_not_before_its_turn(heads: list[Head]) -> None:
    fresh = [head for head in heads if head.suspicions < SUSPECT_FROM]

    batch = _choose(fresh)

    if any(head.kind in _REPLAYING for head in batch):
        assert batch == _in_order(fresh)[:1]
    elif batch:
        assert _in_order(fresh)[0].kind not in _REPLAYING


def test_a_pass_larger_than_the_limit_runs_alone_and_is_not_passed_over() -> None:
    huge, small = head("lane0", num_tokens=1000), head("lane1", num_tokens=1)

    assert _choose([huge, small]) == [huge]
    assert _choose([head("lane0", num_tokens=1), head("lane1", num_tokens=1000)]) == [head("lane0", num_tokens=1)]


def test_a_tenant_is_not_served_ahead_of_one_that_has_more_work_but_none_for_this_step() -> None:
    one = head("b", of=turn("one"), num_tokens=20, has_next=True)
    many = [head(f"a{number}", of=turn("many"), num_tokens=20) for number in range(4)]

    assert _choose([*many, one]) == [many[0], one, many[1]]


def test_a_step_is_filled_up_to_what_costs_nothing_and_where_nobody_else_waits() -> None:
    many = [head(f"a{number}", of=turn("many"), num_tokens=20) for number in range(4)]
    waiting, alone = (head("b", of=turn("one"), num_tokens=20, has_next=has_next) for has_next in (True, False))

    assert len(_choose([*many, waiting], min_tokens=80)) == 4
    assert len(_choose([*many, alone])) == 4


def test_suspect_samples_are_tried_one_by_one_and_only_by_the_idle() -> None:
    suspects = [head("s", OperationKind.SAMPLE, seq=seq, suspicions=2) for seq in (1, 2)]
    once = [head("s", OperationKind.SAMPLE, seq=seq, suspicions=1) for seq in (4, 5)]
    fresh = head("s", OperationKind.SAMPLE, seq=3)

    assert choose_samples([fresh, *suspects], room=8, is_idle=True) == [suspects[0]]
    assert choose_samples([fresh, *suspects], room=8, is_idle=False) == []
    assert choose_samples(once, room=8, is_idle=False) == once
    assert choose_samples([fresh], room=8, is_idle=False) == [fresh]


def test_samples_begin_as_long_as_all_their_sequences_have_room() -> None:
    numbers = {"a": 3, "b": 4, "c": 1}
    heads = [head(lane, OperationKind.SAMPLE, of=turn(lane), num_sequences=numbers[lane]) for lane in numbers]

    assert choose_samples(heads, room=8, is_idle=False) == heads
    assert choose_samples(heads, room=7, is_idle=False) == heads[:2]
    assert choose_samples(heads, room=6, is_idle=False) == heads[:1], "a small one does not overtake for ever"
    assert choose_samples(heads, room=2, is_idle=False) == []
    assert choose_samples(heads, room=2, is_idle=True) == heads[:1], "one larger than all the room runs alone"


def test_samples_under_way_count_for_their_tenant_and_towards_its_limit() -> None:
    busy = turn("busy", num_running=2, num_running_tokens=50)
    limited = turn("limited", max_running=3, num_running=2)
    heads = [head("a", OperationKind.SAMPLE, of=busy, seq=seq, num_tokens=10) for seq in range(5)]
    heads += [head("b", OperationKind.SAMPLE, of=limited, seq=seq, num_tokens=10) for seq in range(5)]
    heads += [head("c", OperationKind.SAMPLE, of=turn("new"), seq=seq, num_tokens=10) for seq in range(5)]

    chosen = choose_samples(heads, room=7, is_idle=False)

    assert sorted(chosen, key=lambda head: (head.lane, head.seq)) == [heads[0], heads[5], *heads[10:15]]


def test_a_tenants_limit_counts_sequences_and_lets_one_sample_that_has_more_run_alone() -> None:
    def samples(*numbers: int, num_running: int = 0) -> list[Head]:
        limited = turn("limited", max_running=4, num_running=num_running)
        return [
            head("a", OperationKind.SAMPLE, of=limited, seq=seq, num_sequences=number)
            for seq, number in enumerate(numbers)
        ]

    def num_begun(heads: list[Head]) -> int:
        chosen = choose_samples(heads, room=100, is_idle=False)
        assert chosen == heads[: len(chosen)]
        return len(chosen)

    assert num_begun(samples(1, 3, 1)) == 2
    assert num_begun(samples(2, 3, 1)) == 1, "a small one does not overtake for ever"
    assert num_begun(samples(9, 1)) == 1
    assert num_begun(samples(9, 1, num_running=1)) == 0
    assert num_begun(samples(1, 1, num_running=3)) == 1


def test_a_full_sampler_has_room_for_tenants_that_have_nothing_there() -> None:
    numbers = {"a": 3, "b": 4, "c": 1}
    heads = [head(lane, OperationKind.SAMPLE, of=turn(lane), num_sequences=numbers[lane]) for lane in numbers]

    assert choose_samples(heads, room=0, is_idle=False, drawing={"a"}) == heads[1:]
    assert choose_samples(heads, room=0, is_idle=False, drawing={"a", "b", "c"}) == []
    twice = [head(f"{lane}{n}", OperationKind.SAMPLE, of=turn(lane)) for lane in ("a", "b") for n in (1, 2)]
    assert choose_samples(twice, room=0, is_idle=False, drawing={"a"}) == twice[2:3], "one of each is enough"


def _ahead(heads: list[Head], followed: set[str], places: Places = UNLIMITED) -> list[Head]:
    return choose_ahead(heads, followed, max_adapters=4, max_tokens=300, suspect_from=SUSPECT_FROM, places=places)


@given(_heads)
def test_of_an_adapter_at_work_alone_a_first_part_of_what_follows_is_claimed_ahead(heads: list[Head]) -> None:
    """So nothing is taken without what stands before it, and nothing from a suspect on."""
    following = [replace(each, lane="alone", seq=number, turn=turn("t")) for number, each in enumerate(heads)]
    ahead = _ahead(following, {"alone"})

    assert ahead == following[: len(ahead)]
    assert len(ahead) <= 4
    assert len(ahead) <= 1 or sum(head.num_tokens for head in ahead) <= 300
    assert not any(head.suspicions >= SUSPECT_FROM or head.kind in _REPLAYING for head in ahead)


@given(_heads, st.data())
def test_where_several_are_at_work_the_next_batch_is_claimed_ahead(heads: list[Head], data: st.DataObject) -> None:
    """Of each lane what is light and the pass behind it, or less, but never the pass without what stands before it."""
    behind = [
        replace(
            each, seq=each.seq + number, kind=data.draw(st.sampled_from(sorted(_PASSES | {OperationKind.OPTIM_STEP})))
        )
        for each in heads
        for number in range(1, data.draw(st.integers(1, 3)))
    ]
    offered = [*heads, *behind]
    ahead = _ahead(offered, {head.lane for head in behind} | {"another"})

    if any(head.suspicions or head.kind in _REPLAYING for head in offered):
        assert ahead == []
    for lane in {one.lane for one in ahead}:
        taken = [one for one in ahead if one.lane == lane]
        assert taken == [one for one in offered if one.lane == lane][: len(taken)]
        assert not any(one.kind in _PASSES for one in taken[:-1])
    passes = [one for one in ahead if one.kind in _PASSES]
    assert len(passes) <= 4
    assert len(passes) <= 1 or sum(one.num_tokens for one in passes) <= 300


@given(_heads)
def test_passes_claimed_ahead_are_those_of_a_batch_chosen_at_rest(heads: list[Head]) -> None:
    passes = [replace(head, suspicions=0) for head in heads if head.kind in _PASSES]

    assert _ahead(passes, {"another", "and another"}) == _choose(passes)


def test_a_pass_that_is_too_large_goes_alone_also_after_passes_without_tokens() -> None:
    empty, large = head("empty", num_tokens=0), head("large", of=turn("large", vtime=1), num_tokens=301)

    assert _ahead([empty, large], {"another", "and another"}) == [empty]
    assert _ahead([large], {"another", "and another"}) == [large]


def test_who_is_served_already_by_what_is_in_hand_comes_after_who_waits() -> None:
    served = head("served", of=turn("served", num_running_tokens=100), seq=2, num_tokens=200)
    waiting = head("waiting", of=turn("waiting"), num_tokens=200)

    assert _ahead([served, waiting], {"served"}) == [waiting]


def test_nobody_is_claimed_ahead_past_an_adapter_that_has_no_place_on_the_device() -> None:
    first, second, third = (head(f"a{number}", of=turn(f"t{number}", vtime=number)) for number in range(3))

    def places(spare: int, *, fitting: int = 3) -> Places:
        return Places(spare=spare, fit=lambda lanes: len(lanes) <= fitting)

    assert _ahead([first, second, third], {"b"}, places(3)) == [first, second, third]
    assert _ahead([first, second, third], {"b"}, places(1)) == [first]
    assert _ahead([first, second, third], {"b"}, places(3, fitting=2)) == [first, second]
    assert _ahead([first, second, third], {"a0"}, places(0)) == [first]
    assert _ahead([second, third], {"b"}, places(0)) == []
