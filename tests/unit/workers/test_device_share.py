"""How sampling and training share a device: by weight, over what each has had, and nothing is saved up."""

from __future__ import annotations

import pytest

from twinkle.workers.sampling.rounds import DeviceShare
from twinkle.workers.sampling.sampling import SLICE_S


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_sampling_is_due_its_weight_of_what_training_had(weight: float) -> None:
    share = DeviceShare(weight)
    assert share.turn_s(trained_s=0.1) == pytest.approx(0.1 * weight)
    share.note(0.1 * weight)
    assert share.turn_s(trained_s=0.2) == pytest.approx(0.2 * weight)


def test_what_was_overdrawn_is_trainings_before_it_is_samplings_turn_again() -> None:
    share = DeviceShare(1.0)
    share.turn_s(trained_s=0.1)
    share.note(0.35)
    assert [share.turn_s(trained_s=0.1) for _ in range(3)] == [0.0, 0.0, pytest.approx(0.05)]


def test_time_without_anything_to_draw_is_no_credit() -> None:
    share = DeviceShare(1.0)
    for _ in range(100):
        assert share.turn_s(trained_s=0.1, draws=False) == 0.0
    assert share.turn_s(trained_s=0.1) == pytest.approx(0.1)


def test_a_debt_is_paid_also_while_nothing_is_drawn() -> None:
    share = DeviceShare(1.0)
    share.turn_s(trained_s=0.1)
    share.note(0.35)
    for _ in range(5):
        share.turn_s(trained_s=0.1, draws=False)
    assert share.turn_s(trained_s=0.1) == pytest.approx(0.1)


def test_where_nothing_trains_it_has_the_device_to_itself() -> None:
    share = DeviceShare(0.1)
    share.note(5.0)
    assert share.turn_s(trained_s=None) == SLICE_S
    assert share.turn_s(trained_s=0.1) == pytest.approx(0.01)
