"""How the journal hands operations out, takes outcomes in, and fences off whoever has lost the mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg
import pytest

from harness.clock import HandClock
from harness.journal import Bench, done, everything, failed, new_sampler, submission
from twinkle.core.errors import LeaseLost
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim, OperationKind, OperationState
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.storage.database import Transaction
from twinkle.storage.journal.records import NewSamplingSession, Records
from twinkle.storage.journal.turns import Followed, Head


def test_only_the_head_of_each_lane_is_offered(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a", "b")
    bench.append(*(submission(lane, seq) for lane in "ab" for seq in (1, 2, 3)), submission("b", 5))

    offered: list[Head] = []
    bench.journal.claim(lease, with_virtual_time(lambda heads: offered.extend(heads) or []), 256)

    assert sorted((head.lane, head.seq) for head in offered) == [("a", 1), ("b", 1)]


def test_a_commit_moves_the_head_on_to_the_next_number_and_stops_before_a_gap(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1), submission("a", 2, OperationKind.OPTIM_STEP), submission("a", 4))
    heads = []
    while claims := bench.claim(lease):
        bench.journal.commit(lease, [done(claim) for claim in claims])
        heads.append((bench.lane("a").head_seq, bench.lane("a").head_kind))

    assert heads == [(2, "optim_step"), (3, None)]


def test_the_lane_that_has_had_least_is_offered_first(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a", "b", "c")
    bench.append(*(submission(lane, seq) for lane in "abc" for seq in (1, 2)))
    costs = {"a": 100, "b": 1, "c": 10}
    claims = bench.claim(lease)
    bench.journal.commit(lease, [done(claim, num_tokens=costs[claim.lane]) for claim in claims])

    assert [claim.lane for claim in bench.claim(lease)] == ["b", "c", "a"]


def test_neither_being_new_nor_having_idled_is_a_head_start(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "busy", "idle")
    bench.append(*(submission("busy", seq) for seq in range(1, 7)))
    for _ in range(5):
        bench.journal.commit(lease, [done(claim, num_tokens=1000) for claim in bench.claim(lease)])
    before_last = dict(bench.rows("SELECT id, vtime FROM lane"))["busy"] - 1000

    bench.append(submission("idle", 1))
    bench.adapter("new")
    claims = bench.claim(lease)
    bench.journal.commit(lease, [done(claim) for claim in claims])

    vtimes = dict(bench.rows("SELECT id, vtime FROM lane"))
    assert [claim.lane for claim in claims] == ["new", "idle", "busy"]
    assert vtimes["idle"] == vtimes["new"] == before_last + 1


def test_claims_come_in_the_order_they_were_chosen_and_unchosen_heads_stay(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a", "b", "c")
    bench.append(*(submission(lane, 1) for lane in "abc"))

    claims = bench.journal.claim(lease, with_virtual_time(lambda heads: [heads[2], heads[0]]), 256)

    assert [claim.lane for claim in claims] == ["c", "a"]
    assert bench.status("b", 1).state is OperationState.QUEUED


def test_a_claim_carries_what_was_submitted(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1, body=b"\x00body", num_tokens=17, rejection="rank: too large"))

    (claim,) = bench.claim(lease)

    assert (claim.payload.inline, claim.num_tokens, claim.rejection) == (b"\x00body", 17, "rank: too large")
    assert (claim.attempt, claim.tenant, claim.failed_window_seq) == (1, "t0", None)


def test_another_meshes_lanes_are_not_offered(bench: Bench, lease: Lease) -> None:
    other = bench.lease("b", mesh="mesh1")
    bench.adapter("a")

    assert bench.claim(other) == []
    assert bench.journal.ready_meshes() == ["mesh0"]


@pytest.fixture
def zombie(bench: Bench, lease: Lease) -> Lease:
    """A lease that was good until somebody else took the mesh, with an operation of ``a`` and a sample in its hands."""
    bench.created(lease, "a")
    bench.journal.open_lane(new_sampler("s"))
    bench.append(submission("a", 1), submission("s", 0, OperationKind.SAMPLE))
    return lease


def test_who_has_lost_the_mesh_can_do_nothing_and_leaves_no_trace(bench: Bench, zombie: Lease) -> None:
    (claim,) = bench.claim(zombie)
    (sample,) = bench.claim_samples(zombie, 8, under_way=[])
    bench.lease("successor")
    before = bench.rows("SELECT * FROM operation ORDER BY request_id"), bench.rows("SELECT * FROM lane ORDER BY id")

    with pytest.raises(LeaseLost):
        bench.claim(zombie)
    with pytest.raises(LeaseLost):
        bench.claim_samples(zombie, 8, under_way=[])
    with pytest.raises(LeaseLost):
        bench.journal.commit(zombie, [done(claim, b"late")], _bringing(claim, new_sampler("late")))
    with pytest.raises(LeaseLost):
        bench.journal.commit(zombie, [done(sample, b"late")])
    with pytest.raises(LeaseLost):
        bench.journal.give_back(zombie, [claim.request_id])

    after = bench.rows("SELECT * FROM operation ORDER BY request_id"), bench.rows("SELECT * FROM lane ORDER BY id")
    assert after == before
    assert bench.rows("SELECT id FROM sampling_session") == [("s",)]


def test_the_successor_takes_what_the_zombie_held_and_its_outcome_stands(bench: Bench, zombie: Lease) -> None:
    (old,) = bench.claim(zombie)
    successor = bench.lease("successor")

    (claim,) = bench.claim(successor)
    bench.journal.commit(successor, [done(claim, b"mine")])
    with pytest.raises(LeaseLost):
        bench.journal.commit(zombie, [done(old, b"late")])

    assert claim.attempt == 2
    assert bench.status("a", 1).result.inline == b"mine"
    assert bench.lane("a").head_seq == 2


def test_an_epoch_cannot_commit_what_an_earlier_epoch_of_the_same_process_claimed(bench: Bench, zombie: Lease) -> None:
    (claim,) = bench.claim(zombie)
    again = bench.lease("a")

    committed = bench.journal.commit(again, [done(claim)], _bringing(claim, new_sampler("late")))

    assert [outcome.request_id for outcome in committed.not_held] == ["a:req:1"]
    assert committed.recorded == committed.ended_before == []
    assert bench.status("a", 1).state is OperationState.RUNNING
    assert bench.lane("a").head_seq == 1
    assert bench.rows("SELECT id FROM sampling_session") == [("s",)]


def test_the_same_epoch_by_another_owner_is_no_lease(bench: Bench, zombie: Lease) -> None:
    forged = Lease(mesh=zombie.mesh, owner="somebody|else|1|1", epoch=zombie.epoch, expires_at=zombie.expires_at)

    with pytest.raises(LeaseLost):
        bench.claim(forged)


def test_an_outcome_is_recorded_once(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1))
    (claim,) = bench.claim(lease)
    bench.journal.commit(lease, [done(claim, b"first")])

    again = bench.journal.commit(lease, [done(claim, b"second")], _bringing(claim, new_sampler("late")))

    assert again.recorded == [] and [outcome.request_id for outcome in again.ended_before] == ["a:req:1"]
    assert bench.rows("SELECT id FROM sampling_session") == []
    assert bench.status("a", 1).result.inline == b"first"
    assert bench.lane("a").head_seq == 2


class _Unwritable(Records):
    """Something that an outcome brings into being and that cannot be written."""

    def insert(self, transaction: Transaction, now: float) -> None:
        raise ZeroDivisionError


def test_a_batch_is_committed_whole_or_not_at_all(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a", "b")
    bench.append(submission("a", 1), submission("b", 1))
    one, other = bench.claim(lease)

    with pytest.raises(ZeroDivisionError):
        bench.journal.commit(lease, [done(one), done(other)], {other.request_id: _Unwritable()})

    assert bench.status(one.lane, 1).state is bench.status(other.lane, 1).state is OperationState.RUNNING
    assert bench.lane(one.lane).head_seq == bench.lane(other.lane).head_seq == 1


@pytest.mark.parametrize("how", ["cancelled", "overdue", "committed before", "given back"])
def test_what_is_not_to_be_recorded_any_more_harms_no_neighbour(
    bench: Bench, lease: Lease, clock: HandClock, how: str
) -> None:
    bench.created(lease, "a")
    bench.journal.open_lane(new_sampler("s"))
    bench.append(submission("s", 0, OperationKind.SAMPLE))
    clock.move(3601)
    bench.append(submission("a", 1), submission("s", 1, OperationKind.SAMPLE))
    (head,) = bench.claim(lease)
    late, sample = bench.claim_samples(lease, 8)
    assert late.seq == 0
    match how:
        case "cancelled":
            bench.sampling_sessions.cancel("s:req:0", "t0")
        case "overdue":
            clock.move(20)
            assert bench.upkeep.expire_overdue(deadline_s=3600) == ["s:req:0"]
        case "committed before":
            bench.journal.commit(lease, [done(late, b"first")])
        case "given back":
            bench.journal.give_back(lease, ["s:req:0"])
    before = bench.rows("SELECT * FROM operation WHERE request_id = 's:req:0'")

    committed = bench.journal.commit(lease, [done(late, b"late"), done(head), done(sample)])

    assert [outcome.request_id for outcome in committed.recorded] == ["a:req:1", "s:req:1"]
    untaken = committed.not_held if how == "given back" else committed.ended_before
    assert [outcome.request_id for outcome in untaken] == ["s:req:0"]
    assert bench.rows("SELECT * FROM operation WHERE request_id = 's:req:0'") == before
    assert bench.status("a", 1).state is bench.status("s", 1).state is OperationState.DONE
    assert bench.lane("a").head_seq == 2


def _bringing(claim: Claim, sampler: NewSamplingSession) -> dict[str, Records]:
    return {claim.request_id: Records(sampling_sessions=[sampler])}


def test_nothing_to_commit_is_not_an_error(bench: Bench, lease: Lease) -> None:
    bench.journal.commit(lease, [])
    bench.journal.give_back(lease, [])


def test_what_is_given_back_waits_its_delay_and_its_lane_with_it(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a", "b")
    bench.append(submission("a", 1), submission("a", 2), submission("b", 1))
    claims = {claim.lane: claim for claim in bench.claim(lease)}
    bench.journal.commit(lease, [done(claims["b"])])

    bench.journal.give_back(lease, ["a:req:1"], delay_s=10)

    assert bench.claim(lease) == [] and bench.journal.ready_meshes() == []
    clock.move(10)
    assert bench.journal.ready_meshes() == ["mesh0"]
    (claim,) = bench.claim(lease)
    assert (claim.seq, claim.attempt) == (1, 2)
    bench.journal.commit(lease, [done(claim)])
    assert [claim.seq for claim in bench.claim(lease)] == [2]


def test_a_blameless_attempt_does_not_count(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1))
    bench.claim(lease)
    bench.journal.give_back(lease, ["a:req:1"], is_blameless=True)

    (claim,) = bench.claim(lease)

    assert claim.attempt == 1


def test_giving_back_what_one_does_not_hold_changes_nothing(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a", "b")
    bench.append(submission("a", 1), submission("b", 1))
    claims = {claim.lane: claim for claim in bench.claim(lease)}
    bench.journal.commit(lease, [done(claims["a"])])

    bench.journal.give_back(lease, ["a:req:1", "x:req:9"], delay_s=100)

    assert bench.status("a", 1).state is OperationState.DONE
    assert bench.rows("SELECT id FROM lane WHERE not_before > 0") == []


def test_a_delay_ends_with_the_operation_it_was_for(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1), submission("a", 2))
    bench.claim(lease)
    bench.journal.give_back(lease, ["a:req:1"], delay_s=10)
    clock.move(10)
    (claim,) = bench.claim(lease)
    bench.journal.commit(lease, [failed(claim)])

    assert [claim.seq for claim in bench.claim(lease)] == [2]


def test_samples_are_handed_out_longest_waiting_first_and_never_twice(
    bench: Bench, lease: Lease, clock: HandClock
) -> None:
    bench.journal.open_lane(new_sampler("s"))
    for seq in (5, 0, 9):
        bench.append(submission("s", seq, OperationKind.SAMPLE))
        clock.move(1)

    first = bench.claim_samples(lease, 2, under_way=[])
    rest = bench.claim_samples(lease, 2, under_way=[claim.request_id for claim in first])

    assert [claim.seq for claim in first] == [5, 0]
    assert [claim.seq for claim in rest] == [9]


def test_samples_finish_in_any_order_and_move_no_lane(bench: Bench, lease: Lease) -> None:
    bench.journal.open_lane(new_sampler("s"))
    bench.append(*(submission("s", seq, OperationKind.SAMPLE) for seq in (3, 1)))
    claims = bench.claim_samples(lease, 8, under_way=[])

    bench.journal.commit(lease, [done(claims[1])])
    bench.journal.commit(lease, [failed(claims[0])])

    assert bench.lane("s").head_seq == 0 and bench.lane("s").head_kind is None
    assert bench.journal.num_open_samples("t0") == 0
    assert bench.journal.ready_meshes() == []


def test_samples_a_dead_worker_held_come_back_together_once(bench: Bench, lease: Lease) -> None:
    bench.journal.open_lane(new_sampler("s"))
    bench.append(*(submission("s", seq, OperationKind.SAMPLE) for seq in range(3)))
    bench.claim_samples(lease, 2, under_way=[])
    successor = bench.lease("successor")

    claims = bench.claim_samples(successor, 8, under_way=[])

    assert sorted((claim.attempt, claim.suspicions) for claim in claims) == [(1, 0), (2, 1), (2, 1)]


def test_samples_two_dead_workers_held_come_back_one_by_one_and_only_to_an_idle_holder(
    bench: Bench, lease: Lease
) -> None:
    bench.journal.open_lane(new_sampler("s"))
    bench.append(*(submission("s", seq, OperationKind.SAMPLE) for seq in range(3)))
    bench.claim_samples(lease, 2, under_way=[])
    bench.claim_samples(bench.lease("second"), 2, under_way=[])
    successor = bench.lease("successor")

    alone = bench.claim_samples(successor, 8, under_way=[])
    while_busy = bench.claim_samples(successor, 8, under_way=[alone[0].request_id])
    bench.journal.commit(successor, [done(alone[0])])
    second = bench.claim_samples(successor, 8, under_way=[])
    bench.journal.commit(successor, [done(second[0])])
    fresh = bench.claim_samples(successor, 8, under_way=[])

    assert len(alone) == len(second) == 1
    assert while_busy == []
    assert {alone[0].attempt, second[0].attempt} == {3}
    assert [claim.attempt for claim in fresh] == [1]


def test_a_sample_the_holder_claimed_and_lost_sight_of_is_handed_out_again(bench: Bench, lease: Lease) -> None:
    """The claim was committed but its answer never reached the worker: nobody would ever run it."""
    bench.journal.open_lane(new_sampler("s"))
    bench.append(submission("s", 0, OperationKind.SAMPLE))
    bench.claim_samples(lease, 8, under_way=[])

    (again,) = bench.claim_samples(lease, 8, under_way=[])

    assert (again.request_id, again.attempt, again.suspicions) == ("s:req:0", 2, 0)


def test_who_died_with_an_operation_in_its_hands_makes_it_suspect_and_who_lost_sight_of_it_does_not(
    bench: Bench, lease: Lease
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1))
    bench.claim(lease)

    offered: list[Head] = []
    bench.journal.claim(lease, with_virtual_time(lambda heads: offered.extend(heads) or heads), 256)
    successor = bench.lease("successor")
    bench.journal.claim(successor, with_virtual_time(lambda heads: offered.extend(heads) or []), 256)
    (claim,) = bench.claim(successor)

    assert [head.suspicions for head in offered] == [0, 1]
    assert (claim.suspicions, claim.attempt) == (1, 3)


def test_an_attempt_that_failed_makes_an_operation_suspect_only_where_it_may_be_to_blame(
    bench: Bench, lease: Lease
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1))
    suspicions = []
    for is_suspect in (False, True, False):
        bench.claim(lease)
        bench.journal.give_back(lease, ["a:req:1"], is_suspect=is_suspect)
        bench.journal.claim(lease, with_virtual_time(lambda heads: suspicions.append(heads[0].suspicions) or []), 256)

    assert suspicions == [0, 1, 1]


def test_a_sample_given_back_waits_its_delay(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.journal.open_lane(new_sampler("s"))
    bench.append(submission("s", 0, OperationKind.SAMPLE))
    bench.claim_samples(lease, 8, under_way=[])
    bench.journal.give_back(lease, ["s:req:0"], delay_s=10)

    assert bench.claim_samples(lease, 8, under_way=[]) == []
    assert bench.journal.ready_meshes() == []
    clock.move(10)
    assert bench.journal.ready_meshes() == ["mesh0"]
    assert len(bench.claim_samples(lease, 8, under_way=[])) == 1


def test_a_limit_bounds_what_is_offered(bench: Bench, lease: Lease) -> None:
    for adapter in "abcde":
        bench.adapter(adapter)

    assert len(bench.journal.claim(lease, with_virtual_time(everything), 3)) == 3


def test_history_holds_the_finished_operations_in_between_with_how_they_ended(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(*(submission("a", seq) for seq in (1, 2, 3, 4)))
    for seq in (1, 2, 3):
        (claim,) = bench.claim(lease)
        bench.journal.commit(lease, [failed(claim) if seq == 2 else done(claim)])

    past = bench.journal.history("a", after_seq=0, before_seq=9)

    assert [(operation.seq, operation.succeeded, operation.error_code) for operation in past] == [
        (1, True, None),
        (2, False, "invalid_input"),
        (3, True, None),
    ]
    assert past[0].payload.inline == b"a 1 forward_backward"
    assert [operation.seq for operation in bench.journal.history("a", after_seq=1, before_seq=3)] == [2]


def _journeys(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> int:
    """How often a transaction of PostgreSQL waits for the server: each time it looks at an answer, and at its end."""
    waited: list[psycopg.Pipeline] = []
    sync, own_thread = psycopg.Pipeline.sync, threading.get_ident()

    def noted(pipeline: psycopg.Pipeline) -> None:
        # Other tests' services, which they share, go to databases of their own meanwhile.
        if threading.get_ident() == own_thread:
            waited.append(pipeline)
        sync(pipeline)

    with monkeypatch.context() as patched:
        patched.setattr(psycopg.Pipeline, "sync", noted)
        act()
    return len(waited) + 1


@pytest.mark.parametrize("num_lanes", [1, 16])
def test_a_batch_makes_as_many_journeys_to_the_database_as_one_operation(
    bench: Bench, lease: Lease, monkeypatch: pytest.MonkeyPatch, num_lanes: int
) -> None:
    lanes = [f"a{number}" for number in range(num_lanes)]
    bench.created(lease, *lanes)
    bench.append(*(submission(lane, 1) for lane in lanes))
    claims: list[Claim] = []

    claimed = _journeys(monkeypatch, lambda: claims.extend(bench.claim(lease)))
    committed = _journeys(monkeypatch, lambda: bench.journal.commit(lease, [done(claim) for claim in claims]))

    assert len(claims) == num_lanes
    assert all(bench.status(lane, 1).state is OperationState.DONE for lane in lanes)
    assert (claimed, committed) == ((3, 3) if bench.database.is_postgres else (1, 1))


def test_what_follows_on_an_outcome_that_is_not_taken_is_not_recorded_in_the_same_commit(
    bench: Bench, lease: Lease
) -> None:
    bench.created(lease, "a", "b")
    bench.append(*(submission(lane, seq) for lane in "ab" for seq in (1, 2)))
    one, other = sorted(bench.claim(lease), key=lambda claim: claim.lane)
    followers = [Followed(lane=lane, tenant="t0", last_seq=1, room=1, num_tokens=1) for lane in "ab"]
    behind = bench.journal.claim(lease, with_virtual_time(everything), 8, held=["a", "b"], followed=followers)
    after_one, after_other = sorted(behind, key=lambda claim: claim.lane)
    bench.journal.give_back(lease, [one.request_id])

    committed = bench.journal.commit(lease, [done(claim) for claim in (one, after_one, other, after_other)])

    assert [outcome.request_id for outcome in committed.recorded] == ["b:req:1", "b:req:2"]
    assert [outcome.request_id for outcome in committed.not_held] == ["a:req:1", "a:req:2"]
    assert (bench.lane("a").head_seq, bench.lane("b").head_seq) == (1, 3)
