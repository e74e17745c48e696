"""The course of a training: what is trained when, at which rate, under which numbers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.core.errors import InvalidInput
from twinkle.jobs.training.course import Course, cut, decide, order_of, split_rows
from twinkle.wire.bodies.jobs_training import SupervisedSpec


def course_of(num_rows: int = 10, *, num_eval_rows: int = 0, longest_row: int = 8, **values: object) -> Course:
    spec = SupervisedSpec.model_validate({"model": "m", "data": "file-1", **values})
    return decide(
        spec,
        seed=3,
        num_rows=num_rows,
        num_eval_rows=num_eval_rows,
        longest_row=longest_row,
        whole_batches=False,
        with_reference=False,
    )


def test_every_row_is_trained_once_an_epoch_in_an_order_of_its_own() -> None:
    course = course_of(10, batch_size=4, epochs=2)

    epochs = [[row for step in range(first, first + 3) for row in course.rows_of(step)] for first in (1, 4)]

    assert course.num_steps == 6
    assert [len(course.rows_of(step)) for step in range(1, 7)] == [4, 4, 2, 4, 4, 2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_the_order_of_an_epoch_is_the_same_in_every_process_for_ever() -> None:
    # Stored jobs go on by it: a change here would train other rows under the numbers of those that were accepted.
    assert list(order_of(7, 0, 8)) == [6, 3, 4, 0, 2, 7, 5, 1]


@given(num_rows=st.integers(2, 300), fraction=st.floats(0.001, 0.5), seed=st.integers(0, 2**63 - 1))
def test_a_split_leaves_no_row_out_and_takes_none_twice(num_rows: int, fraction: float, seed: int) -> None:
    train, held_out = split_rows(seed, num_rows, fraction)

    assert sorted([*train, *held_out]) == list(range(num_rows))
    assert held_out
    assert train


@given(
    num_rows=st.integers(1, 60),
    num_eval_rows=st.integers(0, 20),
    batch_size=st.integers(1, 20),
    longest_row=st.sampled_from([1, 100, 9_000, 40_000]),
    steps=st.integers(1, 40),
    checkpoint_every=st.integers(0, 7),
    sample_every=st.integers(0, 7),
    samples=st.booleans(),
)
def test_numbers_follow_each_other_without_a_gap(
    num_rows: int,
    num_eval_rows: int,
    batch_size: int,
    longest_row: int,
    steps: int,
    checkpoint_every: int,
    sample_every: int,
    samples: bool,
) -> None:
    course = course_of(
        num_rows,
        num_eval_rows=num_eval_rows,
        longest_row=longest_row,
        batch_size=batch_size,
        steps=steps,
        checkpoint_every=checkpoint_every,
        sample_every=sample_every,
        samples=["hello"] if samples else [],
    )

    numbers = course.first_numbers()

    assert numbers[0] == 1
    assert len(numbers) == steps + 2
    for step in range(1, steps + 1):
        pieces = cut(course.rows_of(step), course.rows_per_operation)
        assert course.passes_of(step) == len(pieces)
        assert numbers[step + 1] - numbers[step] == course.operations_of(step) >= len(pieces) + 1
    later = course.first_numbers(from_step=steps // 2) if steps > 1 else numbers
    assert later[1 if steps > 1 else 0] == 1
    assert Counter(row for step in range(1, min(steps, course.steps_per_epoch) + 1) for row in course.rows_of(step))


def test_the_rate_warms_up_and_falls_to_its_last_share() -> None:
    linear = course_of(10, batch_size=1, epochs=1, lr=1.0, warmup_steps=2, final_lr_ratio=0.2)
    cosine = course_of(10, batch_size=1, epochs=1, lr=1.0, schedule="cosine")

    assert [round(linear.rate(step), 3) for step in (1, 2, 3, 10)] == [0.333, 0.667, 1.0, 0.3]
    assert cosine.rate(1) == 1.0
    assert 0 < cosine.rate(10) < cosine.rate(6) < 1
    assert course_of(10, batch_size=1, lr=0.5, schedule="constant").rate(10) == 0.5


def test_auto_settings_follow_from_the_number_of_rows() -> None:
    few, many = course_of(50), course_of(20_000)

    assert (few.batch_size, few.num_steps) == (1, 100)
    assert (many.batch_size, many.num_epochs) == (64, 1.0)


def test_a_batch_that_no_operation_can_carry_is_refused_by_the_field_to_change() -> None:
    spec = SupervisedSpec(model="m", data="file-1", batch_size=64)

    with pytest.raises(InvalidInput, match=r"batch_size: 64 rows of up to 32768 tokens"):
        decide(spec, seed=0, num_rows=100, num_eval_rows=0, longest_row=32768, whole_batches=True, with_reference=False)
