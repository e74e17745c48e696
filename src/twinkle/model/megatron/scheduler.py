"""Megatron's schedule of learning rate and weight decay, as torch's schedules are called."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as CoreScheduler
from torch.optim.lr_scheduler import LRScheduler

from twinkle.core.errors import InvalidInput

DEFAULT_MAX_LR = 1e-4
STYLES = ("constant", "cosine", "inverse-square-root", "linear", "WSD")
DECAY_STYLES = ("constant", "cosine", "linear")


class OptimizerParamScheduler(LRScheduler):
    """Warm-up from ``init_lr`` to ``max_lr`` over ``lr_warmup_steps``, then down to ``min_lr`` at ``lr_decay_steps``.

    Args:
        optimizer: Its groups' rates are set, and their weight decay where ``end_wd`` is given.
        lr_decay_steps: Optimizer steps until ``min_lr``.
        max_lr: The highest rate.
        lr_warmup_steps: Below ``lr_decay_steps``.
        init_lr: The first rate.
        min_lr: The last.
        lr_decay_style: ``cosine``, ``linear``, ``constant``, ``inverse-square-root`` or ``WSD``.
        start_wd, end_wd, wd_incr_steps, wd_incr_style: Of weight decay; by default the optimizer's own, unchanged.
        wsd_decay_steps, lr_wsd_decay_style: Of the style ``WSD``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_decay_steps: int,
        max_lr: float = DEFAULT_MAX_LR,
        lr_warmup_steps: int = 0,
        *,
        init_lr: float = 0.0,
        min_lr: float = 0.0,
        lr_decay_style: str = "cosine",
        start_wd: float | None = None,
        end_wd: float | None = None,
        wd_incr_steps: int | None = None,
        wd_incr_style: str = "constant",
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str = "exponential",
    ) -> None:
        for name, value, known in (
            ("lr_decay_style", lr_decay_style, STYLES),
            ("wd_incr_style", wd_incr_style, DECAY_STYLES),
        ):
            if value not in known:
                raise InvalidInput(name, f"is {value!r}; send one of {', '.join(known)}")
        self.optimizer = optimizer
        decay = max(float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            # Vectors have none; Megatron's schedule sets every group's to the multiple of one.
            own = float(group.get("weight_decay", 0.0))
            group["wd_mult"] = own / decay if decay else 0.0
        start_wd = decay if start_wd is None else start_wd
        try:
            self._core = CoreScheduler(
                optimizer,
                init_lr=init_lr,
                max_lr=max_lr,
                min_lr=min_lr,
                lr_warmup_steps=lr_warmup_steps,
                lr_decay_steps=lr_decay_steps,
                lr_decay_style=lr_decay_style,
                start_wd=start_wd,
                end_wd=start_wd if end_wd is None else end_wd,
                wd_incr_steps=lr_decay_steps if wd_incr_steps is None else wd_incr_steps,
                wd_incr_style=wd_incr_style,
                wsd_decay_steps=wsd_decay_steps,
                lr_wsd_decay_style=lr_wsd_decay_style,
            )
        except AssertionError as error:
            raise InvalidInput(
                "scheduler_cls",
                f"OptimizerParamScheduler wants 0 <= min_lr <= max_lr, init_lr <= max_lr, lr_warmup_steps <"
                f" lr_decay_steps and start_wd <= end_wd; it got max_lr {max_lr}, init_lr {init_lr}, min_lr {min_lr},"
                f" {lr_warmup_steps} and {lr_decay_steps} steps",
            ) from error

    def step(self, epoch: int | None = None) -> None:
        """Move on by one optimizer step."""
        self._core.step(1)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The rates of the next step."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"num_steps": self._core.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, with the settings of this one."""
        self._core.num_steps = int(state_dict["num_steps"])
        self._core.step(0)
