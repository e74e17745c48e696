"""What a job would take: exact where it can be, a range where it was measured, a reason where neither is so."""

from __future__ import annotations

import pytest

from twinkle.core.adapter_sizes import AdapterSizes
from twinkle.core.operation import OperationKind
from twinkle.jobs.estimate import AdapterShape, Tokens, Work, device_seconds, estimate_of, sum_of_estimates
from twinkle.storage.journal.speeds import Measured, ModelFacts

SIZES = AdapterSizes(attn=100, mlp=200, unembed=50)
WORK = Work(
    base_model="base",
    num_trained=10_000,
    num_steps=10,
    adapter=AdapterShape(rank=4, train_unembed=False),
    num_kept=2,
    num_kept_with_optimizer=1,
)


def measured(kind: OperationKind, *device_s: float, num_tokens: int = 0) -> list[Measured]:
    """Operations one after the other."""
    ends = [sum(device_s[: number + 1]) for number in range(len(device_s))]
    return [
        Measured(kind=kind, num_tokens=num_tokens, device_s=one, started_at=end - one, finished_at=end)
        for one, end in zip(device_s, ends, strict=True)
    ]


MEASURED = [
    *measured(OperationKind.FORWARD_BACKWARD, 1.0, 1.0, 2.0, 2.0, num_tokens=1000),
    *measured(OperationKind.OPTIM_STEP, 0.1, 0.1, 0.1),
]


def test_memory_and_storage_follow_from_the_model_and_the_rank() -> None:
    told = estimate_of(WORK, ModelFacts(sizes=SIZES, measured=MEASURED, num_others=0))
    assert told["memory"] == {
        "adapter_parameters": 4 * 300,
        "weights_bytes": 4800,
        "gradients_bytes": 4800,
        "optimizer_bytes": 9600,
        "total_bytes": 19200,
    }
    assert told["storage"] == {"checkpoints": 3, "size_bytes": 2 * 4800 + 3 * 4800}


def test_the_time_is_a_range_between_the_quicker_and_the_slower_operations() -> None:
    alone = estimate_of(WORK, ModelFacts(sizes=SIZES, measured=MEASURED, num_others=0))["time"]
    assert (alone["low_s"], alone["high_s"]) == (pytest.approx(11.0), pytest.approx(21.0))
    shared = estimate_of(WORK, ModelFacts(sizes=SIZES, measured=MEASURED, num_others=2))["time"]
    assert (shared["low_s"], shared["high_s"]) == (pytest.approx(11.0), pytest.approx(63.0))


def test_operations_weigh_as_much_as_they_have_tokens() -> None:
    few = measured(OperationKind.FORWARD_BACKWARD, 1.0, 1.0, 1.0, num_tokens=10)
    many = measured(OperationKind.FORWARD_BACKWARD, 1.0, num_tokens=10_000)
    found, missing = device_seconds(Work(base_model="base", num_trained=10_000), [*few, *many])
    assert missing == [] and found is not None
    assert (found.low, found.high) == (pytest.approx(1.0), pytest.approx(1.0))


def test_where_nothing_was_measured_there_is_no_time_and_a_reason() -> None:
    told = estimate_of(WORK, ModelFacts(sizes=SIZES, measured=MEASURED[:2], num_others=0))
    assert told["time"] == {
        "reason": "no measurement of training and optimizer steps on this mesh yet; it is there after 3 operations of"
        " the kind"
    }
    assert told["price"]["device_seconds"] is None
    assert told["price"]["training_tokens"] == 10_000


def test_a_mesh_that_does_not_tell_sizes_gives_a_reason_for_the_memory() -> None:
    told = estimate_of(WORK, ModelFacts(sizes=None, measured=MEASURED, num_others=0))
    assert "does not say" in told["memory"]["reason"]
    assert told["storage"] is None


def test_forward_passes_without_a_measurement_cost_from_a_third_of_a_training_pass_to_all_of_it() -> None:
    found, _ = device_seconds(Work(base_model="base", num_forwarded=3000), MEASURED)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(1.0), pytest.approx(6.0))


def test_what_depends_on_how_long_answers_get_is_a_range_and_so_is_its_time() -> None:
    work = Work(base_model="base", num_trained=10_000, least=Tokens(trained=1000), num_steps=10)
    told = estimate_of(work, ModelFacts(sizes=SIZES, measured=MEASURED, num_others=0))

    assert (told["tokens"]["trained"], told["tokens"]["trained_least"]) == (10_000, 1000)
    assert (told["time"]["low_s"], told["time"]["high_s"]) == (pytest.approx(2.0), pytest.approx(21.0))
    twice = sum_of_estimates([told, told])
    assert (twice["tokens"]["trained"], twice["tokens"]["trained_least"]) == (20_000, 2000)
    assert (twice["time"]["low_s"], twice["time"]["high_s"]) == (pytest.approx(4.0), pytest.approx(42.0))


def test_what_other_models_do_counts_and_takes_time_where_they_are_measured() -> None:
    sampled = measured(OperationKind.SAMPLE, 1.0, 1.0, 1.0, num_tokens=100)
    teacher = Work(base_model="teacher", num_prefilled=200)
    work = Work(base_model="base", num_trained=10_000, num_steps=10, elsewhere=(teacher,))
    facts = ModelFacts(sizes=SIZES, measured=MEASURED, num_others=0)

    told = estimate_of(work, facts, elsewhere=[ModelFacts(sizes=None, measured=sampled, num_others=0)])
    blind = estimate_of(work, facts, elsewhere=[ModelFacts(sizes=None, measured=[], num_others=0)])

    assert (told["tokens"]["trained"], told["tokens"]["prefilled"]) == (10_000, 200)
    assert (told["time"]["low_s"], told["time"]["high_s"]) == (pytest.approx(13.0), pytest.approx(23.0))
    assert "no measurement of sampling" in blind["time"]["reason"]


def test_what_asks_nothing_of_a_device_has_no_time_of_one() -> None:
    told = estimate_of(Work(base_model="base", stored_bytes=7), ModelFacts(sizes=None, measured=[], num_others=0))

    assert "asks nothing of a device" in told["time"]["reason"]
    assert told["storage"] == {"checkpoints": 0, "size_bytes": 7}


def test_what_costs_the_same_however_many_tokens_there_are_counts_as_often_as_it_comes() -> None:
    # It holds the device for a second, and waits for the object store for another.
    saves = [
        Measured(kind=OperationKind.SAVE_WEIGHTS, num_tokens=0, device_s=1.0, started_at=at, finished_at=at + 2.0)
        for at in (0.0, 10.0)
    ]
    around = {OperationKind.SAVE_WEIGHTS: 3, OperationKind.CREATE_MODEL: 1}
    work = Work(base_model="base", num_trained=10_000, num_steps=10, around=around)

    told = estimate_of(work, ModelFacts(sizes=SIZES, measured=[*MEASURED, *saves], num_others=0))

    assert told["around"] == {"save_weights": 3, "create_model": 1}
    assert (told["time"]["low_s"], told["time"]["high_s"]) == (pytest.approx(17.0), pytest.approx(27.0))
    assert told["price"]["device_seconds"] == [pytest.approx(14.0), pytest.approx(24.0)]
    assert told["time"]["not_counted"] == {"create_model": 1}
    assert sum_of_estimates([told, told])["time"]["not_counted"] == {"create_model": 2}


def test_samples_that_were_drawn_side_by_side_have_shared_the_time_and_are_paid_for_each() -> None:
    """Two rounds of four samples: ten seconds for 400 tokens each, with a pause between them that counts for nobody."""
    drawn = [
        Measured(kind=OperationKind.SAMPLE, num_tokens=100, device_s=10.0, started_at=at, finished_at=at + 10.0)
        for at in (0.0, 500.0)
        for _ in range(4)
    ]
    work = Work(base_model="base", num_prefilled=300, num_drawn=500, least=Tokens(prefilled=300, drawn=500))

    told = estimate_of(work, ModelFacts(sizes=SIZES, measured=drawn, num_others=0))

    assert (told["time"]["low_s"], told["time"]["high_s"]) == (pytest.approx(20.0), pytest.approx(20.0))
    assert told["price"]["device_seconds"] == [pytest.approx(80.0), pytest.approx(80.0)]
