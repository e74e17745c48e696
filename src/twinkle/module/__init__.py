"""The LoRA pool and the packed attention that a frozen base model is fitted with; for scripts, schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.module.scheduler import CosineWarmupScheduler, LinearWarmupScheduler

__all__ = ["CosineWarmupScheduler", "LinearWarmupScheduler"]

__getattr__ = lazy_attributes(
    __name__,
    {name: "twinkle.module.scheduler" for name in ("CosineWarmupScheduler", "LinearWarmupScheduler")},
)
