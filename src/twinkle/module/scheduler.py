"""Learning-rate schedules of the library's own loop: transformers' and torch's, under the names scripts ask for.

The warm-up schedules start at 0 and reach the full rate after ``num_warmup_steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.optimization import (
    get_constant_schedule,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from twinkle.core.errors import InvalidInput


def CosineWarmupScheduler(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up, then ``num_cycles`` waves of a cosine from 1 towards 0 at ``num_training_steps``."""
    return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps, num_cycles, last_epoch)


def LinearWarmupScheduler(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Linear warm-up, then a line down to 0 at ``num_training_steps``."""
    return get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps, last_epoch)


def ConstantWarmupScheduler(optimizer: torch.optim.Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Linear warm-up, then the full rate."""
    return get_constant_schedule_with_warmup(optimizer, num_warmup_steps, last_epoch)


SCHEDULERS: Mapping[str, Callable[..., LRScheduler]] = MappingProxyType(
    {
        "CosineWarmupScheduler": CosineWarmupScheduler,
        "LinearWarmupScheduler": LinearWarmupScheduler,
        "ConstantWarmupScheduler": ConstantWarmupScheduler,
        "constant": get_constant_schedule,
        "ConstantLR": lr_scheduler.ConstantLR,
        "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR,
        "CosineAnnealingWarmRestarts": lr_scheduler.CosineAnnealingWarmRestarts,
        "ExponentialLR": lr_scheduler.ExponentialLR,
        "LambdaLR": lr_scheduler.LambdaLR,
        "LinearLR": lr_scheduler.LinearLR,
        "MultiStepLR": lr_scheduler.MultiStepLR,
        "OneCycleLR": lr_scheduler.OneCycleLR,
        "PolynomialLR": lr_scheduler.PolynomialLR,
        "StepLR": lr_scheduler.StepLR,
    }
)


def create_scheduler(name: str, optimizer: torch.optim.Optimizer, **settings: Any) -> LRScheduler:
    """The named schedule on ``optimizer``, or ``InvalidInput`` that lists what there is."""
    if name not in SCHEDULERS:
        raise InvalidInput("scheduler_cls", f"{name!r} is not known; use one of {', '.join(sorted(SCHEDULERS))}")
    try:
        return SCHEDULERS[name](optimizer, **settings)
    except TypeError as error:
        raise InvalidInput("scheduler_cls", f"{name} cannot be built with these settings: {error}") from error


class LearningRate:
    """A scheduled rate for an engine that is told the rate with every step and has no torch optimizer.

    The schedule drives an optimizer of nothing; ``value`` is the rate of the next step, ``advance`` comes after it.
    """

    def __init__(self, rate: float, scheduler: str = "constant", **settings: Any) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
        self._scheduler = create_scheduler(scheduler, self._optimizer, **settings)

    @property
    def value(self) -> float:
        """The rate of the next optimizer step."""
        return float(self._scheduler.get_last_lr()[0])

    def advance(self) -> None:
        """Move to the next step."""
        # The optimizer of nothing steps too, or torch warns that the order of the two is wrong.
        self._optimizer.step()
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to go on from here."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; name and settings of the schedule must be the same."""
        self._scheduler.load_state_dict(dict(state))
