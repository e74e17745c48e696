"""Schedules against the curves they promise."""

import math

import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.module.scheduler import CosineWarmupScheduler, LearningRate, create_scheduler

RATE, WARMUP, STEPS = 0.5, 4, 20


def curve(name, num_steps=STEPS + 1, **settings):
    rate = LearningRate(RATE, name, **settings)
    values = []
    for _ in range(num_steps):
        values.append(rate.value)
        rate.advance()
    return values


def warm(step, after):
    return RATE * (step / WARMUP if step < WARMUP else after((step - WARMUP) / (STEPS - WARMUP)))


@pytest.mark.parametrize(
    ("name", "settings", "after"),
    [
        ("CosineWarmupScheduler", {"num_training_steps": STEPS}, lambda x: (1 + math.cos(math.pi * x)) / 2),
        ("LinearWarmupScheduler", {"num_training_steps": STEPS}, lambda x: 1 - x),
        ("ConstantWarmupScheduler", {}, lambda x: 1),
    ],
)
def test_a_rate_rises_from_zero_and_follows_its_curve(name, settings, after):
    values = curve(name, num_warmup_steps=WARMUP, **settings)
    assert values == pytest.approx([warm(step, after) for step in range(STEPS + 1)])


def test_no_warm_up_starts_at_the_full_rate():
    assert curve("CosineWarmupScheduler", 1, num_warmup_steps=0, num_training_steps=STEPS) == [RATE]
    assert curve("constant", 3) == [RATE] * 3


def test_torch_schedules_are_found_by_their_name():
    values = curve("CosineAnnealingLR", 11, T_max=10, eta_min=0.1)
    assert values == pytest.approx([0.1 + 0.4 * (1 + math.cos(math.pi * i / 10)) / 2 for i in range(11)])


def test_a_rate_goes_on_where_it_was_saved():
    settings = {"num_warmup_steps": WARMUP, "num_training_steps": STEPS}
    whole, again = (LearningRate(RATE, "CosineWarmupScheduler", **settings) for _ in range(2))
    for _ in range(7):
        whole.advance()
    again.load_state_dict(whole.state_dict())
    for rate in (whole, again):
        rate.advance()
    assert again.value == whole.value


def test_a_schedule_drives_every_group_of_an_optimizer():
    weight, bias = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "lr": 0.2}], lr=0.1)
    scheduler = CosineWarmupScheduler(optimizer, 2, 10)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.05, 0.1])


def test_an_unknown_schedule_and_unknown_settings_are_refused():
    with pytest.raises(InvalidInput, match=r"scheduler_cls: 'Cosine' is not known; use one of .*CosineWarmupScheduler"):
        LearningRate(RATE, "Cosine")
    with pytest.raises(InvalidInput, match="cannot be built with these settings"):
        create_scheduler("StepLR", torch.optim.SGD([torch.zeros(1)], lr=1.0), steps=3)
