"""What the journal keeps of who was served: shares by weight, rates, and how many run at once."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.clock import HandClock
from harness.journal import Bench, done, everything, new_sampler, submission
from twinkle.core.job import DEFAULT_NICE
from twinkle.core.lease import Lease
from twinkle.core.limits import TenantLimits
from twinkle.core.operation import OperationKind
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.scheduler.fusion import choose_batch
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.turns import Head


def _set(bench: Bench, tenant: str, column: str, value: float) -> None:
    with bench.database.transaction() as transaction:
        transaction.execute(f"UPDATE tenant SET {column} = ? WHERE id = ?", (value, tenant))


def _one_at_a_time(heads: list[Head]) -> list[Head]:
    return choose_batch(heads, max_adapters=1, max_tokens=1000, min_tokens=0, previous_was_light=False)


def _serve(bench: Bench, lease: Lease, num_steps: int) -> Counter[str]:
    """Tokens served in so many steps of one operation each, by tenant."""
    served: Counter[str] = Counter()
    for _ in range(num_steps):
        (claim,) = bench.journal.claim(lease, with_virtual_time(_one_at_a_time), 16)
        bench.journal.commit(lease, [done(claim, num_tokens=claim.num_tokens)])
        served[claim.tenant] += claim.num_tokens
    return served


@pytest.fixture
def crowd(bench: Bench, lease: Lease) -> list[str]:
    """Ten adapters of ``t0`` and one of ``t1``, all with work."""
    adapters = [f"a{number}" for number in range(10)]
    bench.created(lease, *adapters)
    bench.created(lease, "b", tenant="t1")
    bench.append(*(submission(lane, seq, num_tokens=10) for lane in adapters for seq in range(1, 31)))
    bench.append(*(submission("b", seq, num_tokens=10, tenant="t1") for seq in range(1, 100)))
    return adapters


def test_ten_adapters_get_as_many_tokens_as_one_and_share_them(bench: Bench, lease: Lease, crowd: list[str]) -> None:
    served = _serve(bench, lease, 80)

    assert abs(served["t0"] - served["t1"]) <= 20
    heads = [bench.lane(adapter).head_seq for adapter in crowd]
    assert max(heads) - min(heads) <= 1


@pytest.mark.parametrize(("limit", "lanes"), [(3, ["b", "a0", "a1"]), (8, ["b", "a0", "a1", "a2", "a3"])])
def test_the_next_tenant_is_asked_where_the_one_whose_turn_it_is_has_too_little(
    bench: Bench, lease: Lease, crowd: list[str], limit: int, lanes: list[str]
) -> None:
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE share SET vtime = CASE WHEN tenant = 't1' THEN 0 ELSE 1000 END")

    assert [claim.lane for claim in bench.claim(lease, limit)] == lanes


def test_a_tenant_of_twice_the_weight_gets_twice_the_tokens(bench: Bench, lease: Lease, crowd: list[str]) -> None:
    _set(bench, "t1", "weight", 2.0)

    served = _serve(bench, lease, 90)

    assert abs(served["t1"] / 2 - served["t0"]) <= 20


def test_a_tenant_that_idled_starts_at_once_and_has_no_credit(bench: Bench, lease: Lease, crowd: list[str]) -> None:
    bench.created(lease, "c", tenant="t1")
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE lane SET head_kind = NULL WHERE id = 'b'")
    _serve(bench, lease, 60)

    bench.append(*(submission("c", seq, num_tokens=10, tenant="t1") for seq in range(1, 40)))
    first = bench.journal.claim(lease, with_virtual_time(_one_at_a_time), 16)
    bench.journal.commit(lease, [done(claim, num_tokens=10) for claim in first])
    served = _serve(bench, lease, 30)

    assert [claim.lane for claim in first] == ["c"]
    assert abs(served["t1"] - served["t0"]) <= 20


def test_every_tenant_is_offered_however_many_adapters_another_one_has(
    bench: Bench, lease: Lease, crowd: list[str]
) -> None:
    offered: list[Head] = []
    bench.journal.claim(lease, with_virtual_time(lambda heads: offered.extend(heads) or []), 8)

    assert {head.turn.tenant for head in offered} == {"t0", "t1"}
    assert len(offered) == 5 and all(head.has_next for head in offered)


def test_samples_and_training_are_one_account(bench: Bench, lease: Lease, crowd: list[str]) -> None:
    bench.journal.open_lane(new_sampler("s", tenant="t1"))
    bench.append(submission("s", 0, OperationKind.SAMPLE, tenant="t1", num_tokens=200))
    (sample,) = bench.claim_samples(lease, 4)
    bench.journal.commit(lease, [done(sample, num_tokens=200)])

    assert _serve(bench, lease, 19)["t1"] <= 10


def test_a_lane_of_few_samples_does_not_wait_for_one_of_many(bench: Bench, lease: Lease) -> None:
    for session, tenant in (("s0", "t0"), ("s1", "t0"), ("s2", "t1")):
        bench.journal.open_lane(new_sampler(session, tenant=tenant))
    bench.append(*(submission("s0", seq, OperationKind.SAMPLE, num_tokens=10) for seq in range(50)))
    bench.append(
        submission("s1", 0, OperationKind.SAMPLE, num_tokens=10),
        submission("s2", 0, OperationKind.SAMPLE, num_tokens=10, tenant="t1"),
    )

    claims = bench.claim_samples(lease, 4)
    more = bench.claim_samples(lease, 4, under_way=[claim.request_id for claim in claims])

    assert {claim.lane for claim in claims} == {"s0", "s1", "s2"}
    assert [claim.request_id for claim in more] == [f"s0:req:{seq}" for seq in range(2, 6)]


def test_the_lowest_niceness_goes_first_within_its_tenant(bench: Bench, lease: Lease, crowd: list[str]) -> None:
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE lane SET nice = -1 WHERE id = 'a7'")

    served = _serve(bench, lease, 40)

    assert bench.lane("a7").head_seq == 1 + served["t0"] // 10
    assert abs(served["t0"] - served["t1"]) <= 20


def test_interactive_work_goes_before_a_tenants_jobs_and_costs_other_tenants_nothing(
    bench: Bench, lease: Lease, crowd: list[str]
) -> None:
    with bench.database.transaction() as transaction:
        transaction.execute(f"UPDATE lane SET nice = {DEFAULT_NICE} WHERE tenant = 't0' AND id NOT IN ('a0', 'a1')")
    before = {lane: bench.lane(lane).head_seq for lane in crowd}

    served = _serve(bench, lease, 40)

    done = {lane: bench.lane(lane).head_seq - before[lane] for lane in crowd}
    assert done["a0"] + done["a1"] == served["t0"] // 10
    assert sum(done.values()) == done["a0"] + done["a1"]
    assert abs(served["t0"] - served["t1"]) <= 20


def test_a_tenant_above_its_rate_waits_until_it_is_paid_for_and_others_go_on(
    bench: Bench, lease: Lease, clock: HandClock, crowd: list[str]
) -> None:
    _set(bench, "t0", "tokens_per_minute", 60)

    served = _serve(bench, lease, 20)
    assert 10 <= served["t0"] <= 20
    paused = _serve(bench, lease, 20)
    resumed = 0
    for _ in range(6):
        clock.move(10)
        resumed += _serve(bench, lease, 5)["t0"]

    assert paused["t0"] == 0
    assert 50 <= resumed <= 70


def test_a_rate_of_the_settings_holds_for_tenants_without_one_and_for_samples(bench: Bench, lease: Lease) -> None:
    journal = Journal(bench.database, bench.clock, limits=TenantLimits(tokens_per_minute=60))
    bench.journal.open_lane(new_sampler("s"))
    bench.append(*(submission("s", seq, OperationKind.SAMPLE, num_tokens=100) for seq in range(2)))
    claims = journal.claim_samples(lease, with_virtual_time(lambda heads: heads[:1]), 1, under_way=())
    journal.commit(lease, [done(claim, num_tokens=100) for claim in claims])

    assert journal.claim_samples(lease, with_virtual_time(everything), 4, under_way=()) == []
    bench.clock.move(90.1)
    assert len(journal.claim_samples(lease, with_virtual_time(everything), 4, under_way=())) == 1


def test_no_more_of_a_tenant_run_at_once_than_may(bench: Bench, lease: Lease, crowd: list[str]) -> None:
    _set(bench, "t0", "max_running", 3)

    def choose(heads: list[Head]) -> list[Head]:
        return choose_batch(heads, max_adapters=64, max_tokens=10_000, min_tokens=10_000, previous_was_light=False)

    claims = bench.journal.claim(lease, with_virtual_time(choose), 256)

    assert Counter(claim.tenant for claim in claims) == {"t0": 3, "t1": 1}
