"""What the journal accepts, and how it answers what it has seen before."""

from __future__ import annotations

import pytest

from harness.clock import HandClock
from harness.journal import Bench, done, failed, new_adapter, new_sampler, submission
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.lease import Lease
from twinkle.core.operation import Accepted, OperationKind, OperationState
from twinkle.storage.journal.lanes import MAX_NUMBERS_AHEAD


def test_a_resend_gets_the_same_future_in_whatever_state_it_is(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    request = submission("a", 1)
    answers = [bench.append(request)[0]]
    answers += bench.append(request)
    (claim,) = bench.claim(lease)
    answers += bench.append(request)
    bench.journal.commit(lease, [done(claim, b"first")])
    answers += bench.append(request)

    assert answers == [Accepted(request_id="a:req:1", mesh="mesh0", is_new=is_new) for is_new in (True, *[False] * 3)]
    assert bench.run(lease) == []
    assert bench.status("a", 1).result.inline == b"first"


def test_a_different_body_under_a_used_number_is_refused_and_changes_nothing(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1, body=b"one"))

    (answer,) = bench.append(submission("a", 1, body=b"two"))

    assert isinstance(answer, Conflict)
    assert "seq_id 1 of a" in answer.message
    (claim,) = bench.claim(lease)
    assert claim.payload.inline == b"one"


def test_the_same_number_in_one_call_is_a_resend_or_a_conflict_as_in_two(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    first, again, other = (submission("a", 1, body=body) for body in (b"x", b"x", b"y"))

    answers = bench.append(first, again, other)

    assert isinstance(answers[0], Accepted) and answers[0].is_new
    assert isinstance(answers[1], Accepted) and not answers[1].is_new
    assert isinstance(answers[2], Conflict)


@pytest.mark.parametrize("lane", ["a", "nowhere", "", "a'; DROP TABLE operation; --"])
def test_another_tenants_adapter_answers_like_one_that_does_not_exist(bench: Bench, lease: Lease, lane: str) -> None:
    bench.created(lease, "a")

    (answer,) = bench.append(submission(lane, 1, tenant="t1"))

    assert isinstance(answer, NotFound)
    assert answer.message == f"no adapter or sampling session {lane!r}"
    assert bench.journal.statuses([f"{lane}:req:1"]) == {}


def test_a_resend_by_another_tenant_tells_nothing(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1))

    (answer,) = bench.append(submission("a", 1, tenant="t1"))

    assert isinstance(answer, NotFound)


def test_a_bad_submission_does_not_undo_its_neighbours(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a", "b")

    answers = bench.append(
        submission("a", 1), submission("nowhere", 1), submission("a", 10_000_000), submission("b", 1)
    )

    assert [type(answer) for answer in answers] == [Accepted, NotFound, InvalidInput, Accepted]
    assert sorted(bench.run(lease)) == [("a", 1), ("b", 1)]


def test_nothing_to_append_is_not_an_error(bench: Bench) -> None:
    assert bench.append() == []
    assert bench.journal.statuses([]) == {}


def test_chunks_that_arrive_last_first_run_in_the_order_of_their_numbers(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    seen = []
    for seq in (4, 2, 3, 1):
        bench.append(submission("a", seq))
        seen.append(bench.lane("a").head_kind)

    assert seen == [None, None, None, "forward_backward"]
    assert bench.run(lease) == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]


def test_a_gap_is_noted_when_it_opens_and_forgotten_when_it_is_filled(
    bench: Bench, lease: Lease, clock: HandClock
) -> None:
    bench.created(lease, "a")
    assert bench.lane("a").gap_since is None
    bench.append(submission("a", 3))
    opened_at = clock.now()
    clock.move(5)
    bench.append(submission("a", 2))
    assert bench.lane("a").gap_since == opened_at

    bench.append(submission("a", 1))

    assert bench.lane("a").gap_since is None


def test_a_gap_behind_the_head_counts_from_when_the_head_reaches_it(
    bench: Bench, lease: Lease, clock: HandClock
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1), submission("a", 3))
    assert bench.lane("a").gap_since is None
    clock.move(7)

    bench.run(lease)

    state = bench.lane("a")
    assert (state.head_seq, state.head_kind, state.gap_since) == (2, None, clock.now())


def test_a_number_from_nowhere_is_refused_and_the_last_allowed_one_accepted(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")

    allowed, refused = bench.append(submission("a", 1 + MAX_NUMBERS_AHEAD), submission("a", 2 + 2 * MAX_NUMBERS_AHEAD))

    assert isinstance(allowed, Accepted)
    assert isinstance(refused, InvalidInput) and refused.field == "seq_id"
    assert bench.lane("a").max_seq == 1 + MAX_NUMBERS_AHEAD


def test_samples_need_a_sampling_session_and_training_an_adapter(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.journal.open_lane(new_sampler("s"))

    answers = bench.append(
        submission("a", 1, OperationKind.SAMPLE), submission("s", 1), submission("s", 7, OperationKind.SAMPLE)
    )

    assert [type(answer) for answer in answers] == [NotFound, NotFound, Accepted]


def test_opening_an_adapter_twice_is_opening_it_once(bench: Bench, lease: Lease) -> None:
    first = bench.adapter("a")
    again = bench.journal.open_lane(new_adapter("a"), first)
    (claim,) = bench.claim(lease)
    bench.journal.commit(lease, [done(claim)])
    late = bench.journal.open_lane(new_adapter("a"), first)

    assert again == late == Accepted(request_id="a:req:0", mesh="mesh0", is_new=False)
    assert bench.lane("a").head_seq == 1
    assert bench.run(lease) == []


def test_opening_an_adapter_with_another_creation_is_refused(bench: Bench) -> None:
    bench.adapter("a")

    with pytest.raises(Conflict):
        bench.journal.open_lane(new_adapter("a"), submission("a", 0, OperationKind.CREATE_MODEL, body=b"other"))


def test_opening_another_tenants_adapter_is_refused(bench: Bench) -> None:
    bench.adapter("a")

    with pytest.raises(NotFound):
        bench.journal.open_lane(
            new_adapter("a", tenant="t1"), submission("a", 0, OperationKind.CREATE_MODEL, tenant="t1")
        )

    assert bench.adapters.find("a").tenant == "t0"


def test_opening_another_tenants_sampling_session_is_refused_also_without_a_first_operation(bench: Bench) -> None:
    bench.journal.open_lane(new_sampler("s"))

    with pytest.raises(NotFound):
        bench.journal.open_lane(new_sampler("s", tenant="t1"))

    assert bench.journal.open_lane(new_sampler("s")) is None
    assert bench.sampling_sessions.find("s").tenant == "t0"


def test_statuses_say_what_became_of_each_future_and_omit_the_unknown(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a", "b", "c")
    bench.append(*(submission(lane, 1, num_tokens=5) for lane in "abc"), submission("a", 2))
    claims = {claim.lane: claim for claim in bench.claim(lease)}
    bench.journal.commit(lease, [done(claims["a"], b"result"), failed(claims["b"])])

    statuses = bench.journal.statuses(["a:req:1", "b:req:1", "c:req:1", "a:req:2", "x:req:1"])

    states = {request_id: owned.status.state for request_id, owned in statuses.items()}
    assert states == {
        "a:req:1": OperationState.DONE,
        "b:req:1": OperationState.FAILED,
        "c:req:1": OperationState.RUNNING,
        "a:req:2": OperationState.QUEUED,
    }
    assert statuses["a:req:1"].status.result.inline == b"result"
    assert statuses["b:req:1"].status.failure.code == "invalid_input"
    assert {owned.tenant for owned in statuses.values()} == {"t0"}


def test_only_open_samples_of_the_tenant_are_counted(bench: Bench, lease: Lease) -> None:
    bench.journal.open_lane(new_sampler("s"))
    bench.journal.open_lane(new_sampler("r", tenant="t1"))
    bench.append(*(submission("s", seq, OperationKind.SAMPLE) for seq in range(3)))
    bench.append(submission("r", 0, OperationKind.SAMPLE, tenant="t1"))
    claims = bench.claim_samples(lease, 2, under_way=[])
    bench.journal.commit(lease, [done(claims[0])])

    assert bench.journal.num_open_samples("t0") == 2
    assert bench.journal.num_open_samples("nobody") == 0
