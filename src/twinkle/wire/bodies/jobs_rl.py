"""What learning from rewards or from a teacher is asked for: kinds ``grpo`` and ``distill``.

The fields of a fine-tuning are theirs too. The data are prompts: a step takes ``batch_size`` of them, and of each
``group_size`` answers are sampled from the weights as they are.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from twinkle.core.batch_loss import BATCH_LOSSES, judge_batch
from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.base import MAX_INT32, Identifier
from twinkle.wire.bodies.graders import Grader
from twinkle.wire.bodies.jobs_training import Count, NotNegative, TrainingSpec, wire_config

MAX_GROUP = 128
DEFAULT_GROUP = 8
MAX_ROLLOUTS = 4096

PolicyLoss: TypeAlias = Literal[
    "importance_sampling",
    "ppo",
    "cispo",
    "gspo",
    "GRPOLoss",
    "PPOLoss",
    "GSPOLoss",
    "CISPOLoss",
    "BNPOLoss",
    "DRGRPOLoss",
    "SAPOLoss",
]
_WIRE_SETTINGS = frozenset({"clip_low_threshold", "clip_high_threshold"})
_WITHOUT_SETTINGS = frozenset({"importance_sampling"})

GroupSize = Annotated[int, Field(ge=1, le=MAX_GROUP)]
Temperature = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]


class RolloutSpec(TrainingSpec):
    """What both kinds share: how answers are sampled."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] = Field(
        default=512, description="tokens of an answer at most"
    )
    temperature: Temperature = Field(
        default=1.0, description="the losses' ratios are to the probabilities that answers were drawn with"
    )

    @model_validator(mode="after")
    def _whole_prompts(self) -> Self:
        if self.truncation == "split":
            raise ValueError("truncation: prompts cannot be split; use raise, left, right or delete")
        if self.samples:
            raise ValueError("samples: the answers to the data's own prompts are told at every step; leave it out")
        return self


class ReinforcementSpec(RolloutSpec):
    """``grpo``: learn what a grader rewards."""

    grader: Grader
    group_size: Annotated[int, Field(ge=2, le=MAX_GROUP)] = Field(
        default=DEFAULT_GROUP, description="answers to each prompt, which are compared with one another"
    )
    advantage: Literal["grpo", "rloo"] = "grpo"
    advantage_scale: Literal["group", "batch", "none"] = Field(
        default="group", description="whose standard deviation of rewards advantages are divided by"
    )
    kl_coef: NotNegative = Field(default=0.0, description="the price of a nat of divergence from the first weights")
    loss: PolicyLoss = "importance_sampling"
    loss_config: dict[str, float | int | bool | str] = Field(default={})
    eval_answers: GroupSize = Field(default=1, description="answers to each prompt of an evaluation")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        judge_policy_loss(self.loss, self.loss_config)
        _judge_rollouts(self.batch_size, self.group_size)
        return self


class DistillSpec(RolloutSpec):
    """``distill``: learn to answer as a teacher does.

    ``on_policy``: the student answers, and each token is rewarded with what the teacher thinks of it more than the
    student does: the reverse KL. ``off_policy``: the teacher answers, and the student is trained on that.
    """

    teacher: Identifier = Field(description="a base model that is served, or a tinker:// checkpoint")
    mode: Literal["on_policy", "off_policy"] = "on_policy"
    group_size: GroupSize = Field(default=1, description="answers to each prompt")
    kl_coef: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0, description="what the reverse KL is multiplied with, on policy"
    )
    loss: Literal["importance_sampling", "ppo", "cispo", "cross_entropy"] | None = Field(
        default=None, description="default: importance_sampling on policy, cross_entropy off policy"
    )
    loss_config: dict[str, float | int | bool | str] = Field(default={})

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.loss == "cross_entropy") != (self.mode == "off_policy") and self.loss is not None:
            raise ValueError(f"loss: {self.loss} does not go with {self.mode}")
        judge_policy_loss(self.policy_loss, self.loss_config)
        _judge_rollouts(self.batch_size, self.group_size)
        return self

    @property
    def policy_loss(self) -> str:
        """The loss it trains with."""
        return self.loss or ("importance_sampling" if self.mode == "on_policy" else "cross_entropy")


def judge_policy_loss(loss: str, config: dict[str, float | int | bool | str]) -> None:
    """Say what is wrong with a loss's settings, as validators do."""
    if loss in BATCH_LOSSES:
        if "beta" in config:
            raise ValueError("loss_config: the price of divergence is kl_coef; leave beta out")
        try:
            judge_batch(loss, wire_config(config), [])
        except InvalidInput as error:
            raise ValueError(error.message.replace("loss_fn_config", "loss_config")) from error
        return
    known = frozenset[str]() if loss in _WITHOUT_SETTINGS | {"cross_entropy"} else _WIRE_SETTINGS
    for name, value in config.items():
        if name not in known:
            raise ValueError(
                f"loss_config.{name}: is no setting of {loss}; it takes {', '.join(sorted(known)) or 'none'}"
            )
        if isinstance(value, bool | str):
            raise ValueError(f"loss_config.{name}: must be a number")


def _judge_rollouts(batch_size: Count | Literal["auto"], group_size: int) -> None:
    if batch_size != "auto" and batch_size * group_size > MAX_ROLLOUTS:
        raise ValueError(
            f"batch_size: {batch_size} prompts of {group_size} answers are more than the {MAX_ROLLOUTS} answers"
            " of a step; lower one of them"
        )
