"""Where operations stand: places in a queue that is at rest, reasons, and when things may start."""

from __future__ import annotations

import pytest

from harness.clock import HandClock
from harness.journal import MESH, Bench, done, new_sampler, submission
from twinkle.core.ids import request_id_of
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind
from twinkle.core.standing import Standing, WaitReason
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.scheduler.fusion import choose_batch
from twinkle.scheduler.overview import overview_of
from twinkle.scheduler.standing import describe, line_up, standing_of
from twinkle.storage.journal import queues as queues_module
from twinkle.storage.journal.queues import Queues
from twinkle.storage.journal.turns import Head


@pytest.fixture
def queues(bench: Bench) -> Queues:
    return bench.stores.queues


def _standing(
    bench: Bench, queues: Queues, lane: str, seq: int, *, tenant: str = "t0", is_mesh_alive: bool = True
) -> Standing:
    place = queues.place(request_id_of(lane, seq), tenant)
    return standing_of(
        place, line_up(queues.look(MESH)), is_mesh_alive=is_mesh_alive, now=bench.clock.now(), max_attempts=3
    )


def _one_at_a_time(heads: list[Head]) -> list[Head]:
    return choose_batch(heads, max_adapters=1, max_tokens=1000, min_tokens=0, previous_was_light=False)


def _busy(bench: Bench, lease: Lease) -> list[str]:
    """Three adapters of ``t0`` and one of ``t1`` with passes of different sizes; their futures."""
    bench.created(lease, "a", "b", "c")
    bench.created(lease, "d", tenant="t1")
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE tenant SET weight = 2 WHERE id = 't1'")
        transaction.execute("UPDATE lane SET nice = -1 WHERE id = 'c'")
    bench.append(*(submission(lane, seq, num_tokens=7 * seq) for lane in "abc" for seq in range(1, 6)))
    bench.append(*(submission("d", seq, num_tokens=11, tenant="t1") for seq in range(1, 9)))
    futures = [request_id_of(lane, seq) for lane in "abc" for seq in range(1, 6)]
    return futures + [request_id_of("d", seq) for seq in range(1, 9)]


def test_in_a_queue_at_rest_the_place_is_the_true_rank(bench: Bench, lease: Lease, queues: Queues) -> None:
    futures = _busy(bench, lease)
    line = line_up(queues.look(MESH))

    served = []
    while claims := bench.journal.claim(lease, with_virtual_time(_one_at_a_time), 256):
        bench.journal.commit(lease, [done(claim, num_tokens=claim.num_tokens) for claim in claims])
        served += [claim.request_id for claim in claims]

    assert sorted(served) == sorted(futures)
    assert [line.places[future].num_before for future in served] == list(range(len(futures)))
    assert all(line.places[future].is_exact for future in futures)


def test_samples_stand_in_a_line_of_their_own(bench: Bench, lease: Lease, queues: Queues) -> None:
    bench.journal.open_lane(new_sampler("s0"))
    bench.journal.open_lane(new_sampler("s1", tenant="t1"))
    bench.append(*(submission("s0", seq, OperationKind.SAMPLE, num_tokens=5) for seq in range(6)))
    bench.append(*(submission("s1", seq, OperationKind.SAMPLE, num_tokens=9, tenant="t1") for seq in range(4)))
    first = bench.claim_samples(lease, 3)
    line = line_up(queues.look(MESH))

    under_way = [claim.request_id for claim in first]
    served = []
    while claims := bench.claim_samples(lease, 1, under_way=under_way):
        served += [claim.request_id for claim in claims]
        under_way += served[-1:]

    assert [line.places[future].num_before for future in served] == list(range(7))
    assert not set(line.places) & {claim.request_id for claim in first}


def test_every_waiting_operation_has_its_reason(bench: Bench, lease: Lease, queues: Queues, clock: HandClock) -> None:
    bench.created(lease, "a", "g", "r")
    bench.append(*(submission("a", seq) for seq in (1, 2)), submission("g", 3), submission("r", 1))
    claims = {claim.lane: claim for claim in bench.claim(lease)}
    bench.journal.give_back(lease, [claims["r"].request_id], delay_s=30, reason="the device was lost")

    running, behind = _standing(bench, queues, "a", 1), _standing(bench, queues, "a", 2)
    gap, retry = _standing(bench, queues, "g", 3), _standing(bench, queues, "r", 1)
    bench.journal.commit(lease, [done(claims["a"])])

    assert running.reason is WaitReason.RUNNING
    assert (behind.reason, behind.waits_for_seq) == (WaitReason.WAITING_FOR_PREDECESSOR, 1)
    assert (gap.reason, gap.waits_for_seq, gap.starts_in_s) == (WaitReason.WAITING_FOR_GAP, 1, None)
    assert (retry.reason, retry.attempt, retry.max_attempts) == (WaitReason.RETRY_BACKOFF, 1, 3)
    assert (retry.last_error, retry.next_try_at) == ("the device was lost", clock.now() + 30)
    assert "attempt 1 of 3 failed (the device was lost); the next one is due in 30 s" in describe(
        retry, now=clock.now()
    )
    assert _standing(bench, queues, "a", 1).reason is WaitReason.DONE
    assert _standing(bench, queues, "a", 2).reason is WaitReason.QUEUED
    assert _standing(bench, queues, "a", 2, is_mesh_alive=False).reason is WaitReason.MESH_UNAVAILABLE


def test_a_tenant_above_its_rate_is_told_so_and_when_it_goes_on(bench: Bench, lease: Lease, queues: Queues) -> None:
    bench.created(lease, "a")
    bench.append(*(submission("a", seq) for seq in (1, 2)))
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE tenant SET tokens_per_minute = 60 WHERE id = 't0'")
    (claim,) = bench.claim(lease)
    bench.journal.commit(lease, [done(claim, num_tokens=100)])

    standing = _standing(bench, queues, "a", 2)

    assert standing.reason is WaitReason.RATE_LIMITED and standing.is_paused
    assert standing.starts_in_s == pytest.approx(90.0)


def test_the_start_is_estimated_from_the_rate_at_which_the_mesh_was_busy(
    bench: Bench, lease: Lease, queues: Queues, clock: HandClock
) -> None:
    bench.created(lease, "a", "b")
    bench.append(*(submission("a", seq, num_tokens=100) for seq in range(1, 11)))
    assert _standing(bench, queues, "a", 9).starts_in_s is None, "nothing was measured"
    for idle_s in (0, 0, 200):
        clock.move(idle_s)
        (claim,) = bench.journal.claim(lease, with_virtual_time(_one_at_a_time), 256)
        clock.move(2)
        bench.journal.commit(lease, [done(claim, num_tokens=100)])

    standing = _standing(bench, queues, "a", 8)

    assert standing.place is not None and standing.place.num_tokens_before == 400
    assert standing.starts_in_s == pytest.approx(8.0, rel=0.05)


def test_of_a_very_long_queue_the_place_is_a_lower_bound_and_says_so(
    bench: Bench, lease: Lease, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues_module, "MAX_OPERATIONS", 20)
    bench.created(lease, "a")
    bench.created(lease, "b", tenant="t1")
    bench.append(*(submission("a", seq) for seq in range(1, 41)))
    bench.append(*(submission("b", seq, tenant="t1", num_tokens=5) for seq in range(1, 11)))

    known, beyond = _standing(bench, queues, "a", 3).place, _standing(bench, queues, "a", 30).place
    behind_the_known = _standing(bench, queues, "b", 9, tenant="t1").place

    assert known is not None and known.is_exact
    assert beyond is not None and not beyond.is_exact and beyond.num_before >= 29 and beyond.num_own_before == 29
    assert behind_the_known is not None and not behind_the_known.is_exact


def test_an_overview_counts_what_waits_and_who_was_served(bench: Bench, lease: Lease, queues: Queues) -> None:
    _busy(bench, lease)
    bench.journal.open_lane(new_sampler("s", tenant="t1"))
    bench.append(*(submission("s", seq, OperationKind.SAMPLE, num_tokens=5, tenant="t1") for seq in range(3)))
    for _ in range(12):
        (claim,) = bench.journal.claim(lease, with_virtual_time(_one_at_a_time), 256)
        bench.clock.move(1)
        bench.journal.commit(lease, [done(claim, num_tokens=claim.num_tokens)])
    bench.claim_samples(lease, 1)

    overview = overview_of(queues.look(MESH), now=bench.clock.now())

    lines = {line.tenant: line for line in overview.tenants}
    assert overview.is_exact and overview.training_rate is not None
    assert lines["t0"].num_operations + lines["t1"].num_operations == 23 - 12
    assert (lines["t1"].num_samples, lines["t1"].num_running) == (2, 1)
    assert lines["t1"].share == pytest.approx(2 / 3, abs=0.15) and lines["t0"].share == 1 - lines["t1"].share
