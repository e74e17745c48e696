"""What a fine-tuning is asked for: kinds ``sft`` and ``dpo``.

The fields are flat, so that a sweep can vary any of them by its name. ``auto`` is decided when the data are known,
and told in the job's progress.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from twinkle.core.batch_loss import BATCH_LOSSES, BatchLossRules, judge_batch
from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.base import MAX_INT32, Identifier, Text
from twinkle.wire.bodies.jobs_base import JobPart, JobSpec
from twinkle.wire.paths import SCHEME

MAX_SAMPLE_PROMPTS = 16
MAX_SUFFIX_CHARS = 64

Auto: TypeAlias = Literal["auto"]
Schedule: TypeAlias = Literal["constant", "linear", "cosine", "inverse_sqrt"]
Count = Annotated[int, Field(ge=1, le=MAX_INT32)]
CountOrNever = Annotated[int, Field(ge=0, le=MAX_INT32)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

CROSS_ENTROPY: Literal["cross_entropy"] = "cross_entropy"
DEFAULT_RANK = 32
DEFAULT_LR = 1e-4
_STEP = "step-"
_OF_A_NEW_ADAPTER = ("rank", "lora_seed", "train_attn", "train_mlp", "train_unembed")


class SampleMessage(JobPart):
    """One message of a prompt."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class SamplePrompt(JobPart):
    """A prompt whose answers are looked at during training: chat messages, or plain text."""

    messages: list[SampleMessage] | None = Field(default=None, min_length=1, max_length=64)
    prompt: Text | None = None
    max_tokens: int = Field(default=128, ge=1, le=4096)
    temperature: NotNegative = 0.0

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("needs either messages or prompt")
        return self


def _prompt_of_text(value: object) -> object:
    return {"messages": [{"role": "user", "content": value}]} if isinstance(value, str) else value


class TrainingSpec(JobSpec):
    """What both kinds of fine-tuning share."""

    pairs: ClassVar[bool] = False

    model: Identifier = Field(description="a base model that is served, or a tinker:// checkpoint to go on from")
    with_optimizer: bool = Field(default=False, description="take over the checkpoint's optimizer state too")

    data: Identifier = Field(description="the id of a file, or a data set of a hub: hf://org/name, ms://org/name")
    subset: Text = Field(default="default", description="of a hub's data set")
    split: Text = Field(default="train", description="of a hub's data set")
    preprocessor: Text | None = Field(default=None, description="makes conversations of a data set's columns, by name")
    format: Literal["auto", "chat", "completion", "preference", "text", "tokens"] = "auto"
    template: Text = Field(default="Template", description="the class that makes tokens of chats")
    system: Text | None = Field(default=None, description="the system message of conversations that have none")
    enable_thinking: bool = True
    max_length: Annotated[int, Field(ge=2, le=MAX_INT32)] | None = Field(
        default=None, description="tokens of a sequence; default: what the model takes"
    )
    truncation: Literal["raise", "left", "right", "split", "delete"] = Field(
        default="raise", description="what becomes of longer ones: the job fails, they are cut, made several, left out"
    )
    max_rows: Count | None = Field(default=None, description="only so many of the data, from the first on")
    eval_data: Identifier | None = Field(default=None, description="what is evaluated on, read in the same way")
    eval_split: Text = Field(default="test", description="of a hub's data set")
    eval_fraction: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = Field(
        default=0.0, description="or the share of the data that is kept from training for it, drawn by the seed"
    )

    epochs: Count | Auto = "auto"
    steps: Count | None = Field(default=None, description="optimizer steps, instead of epochs")
    batch_size: Count | Auto = "auto"

    lr: Positive | Auto = "auto"
    schedule: Schedule = "linear"
    warmup_steps: CountOrNever | None = None
    warmup_ratio: Share = Field(default=0.0, description="share of all steps, where warmup_steps is not given")
    final_lr_ratio: Share = Field(default=0.0, description="what linear and cosine end at, as a share of lr")
    weight_decay: NotNegative = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Positive = 1e-8
    grad_clip_norm: NotNegative = Field(default=1.0, description="0 clips nothing")

    rank: Count | None = Field(default=None, description="of a new adapter; default: 32")
    lora_seed: Annotated[int, Field(ge=0)] | None = Field(default=None, description="default: drawn by the seed")
    train_attn: bool | None = Field(default=None, description="whether a new adapter has a part there; default: yes")
    train_mlp: bool | None = None
    train_unembed: bool | None = None

    eval_every: CountOrNever = Field(default=0, description="steps between evaluations; 0: after every epoch")
    patience: CountOrNever = Field(
        default=0, description="evaluations without progress after which training ends; 0: it does not"
    )
    min_delta: NotNegative = Field(default=0.0, description="how much lower an evaluation's loss must be for progress")
    samples: list[Annotated[SamplePrompt, BeforeValidator(_prompt_of_text)]] = Field(
        default=[], max_length=MAX_SAMPLE_PROMPTS, description="prompts that are answered during training"
    )
    sample_every: CountOrNever = Field(default=0, description="steps between samples; 0: after every epoch")
    checkpoint_every: CountOrNever = Field(default=0, description="steps between checkpoints; 0: after every epoch")
    keep_last: CountOrNever = Field(default=3, description="how many of them are kept, beside the final one")
    keep_best: bool = Field(default=True, description="whether the one with the lowest evaluation is kept besides")

    max_train_tokens: Count | None = Field(
        default=None, description="a budget: training ends before the step that would go beyond so many tokens"
    )
    max_hours: Positive | None = Field(
        default=None, description="a budget: training ends behind the step at which it has run for so long"
    )

    suffix: Annotated[str, Field(min_length=1, max_length=MAX_SUFFIX_CHARS, pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        default=None, description="default: follows from the job"
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.steps is not None and self.epochs != "auto":
            raise ValueError("give either epochs or steps")
        if self.eval_data is not None and self.eval_fraction:
            raise ValueError("give either eval_data or eval_fraction")
        if self.patience and not self.has_evaluation:
            raise ValueError("patience needs eval_data or an eval_fraction to look at")
        if not self.begins_anew:
            for name in _OF_A_NEW_ADAPTER:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is the checkpoint's where model is one; leave it out")
        elif self.with_optimizer:
            raise ValueError("with_optimizer needs a checkpoint as model, like tinker://<run>/weights/<name>")
        return self

    @property
    def begins_anew(self) -> bool:
        """Whether it starts from a base model, with an adapter of its own shape."""
        return not self.model.startswith(SCHEME)

    @property
    def has_evaluation(self) -> bool:
        """Whether anything is evaluated on."""
        return self.eval_data is not None or self.eval_fraction > 0


class SupervisedSpec(TrainingSpec):
    """``sft``: learn the answers of the data."""

    loss: Literal["cross_entropy", "CrossEntropyLoss"] = CROSS_ENTROPY
    loss_config: dict[str, float | int | bool | str] = Field(default={})

    @model_validator(mode="after")
    def _known_settings(self) -> Self:
        _judge_loss(self.loss, self.loss_config)
        return self


class PreferenceSpec(TrainingSpec):
    """``dpo``: prefer one answer to another."""

    pairs: ClassVar[bool] = True

    loss: Literal["DPOLoss", "SimPOLoss", "CPOLoss", "ORPOLoss"] = "DPOLoss"
    loss_config: dict[str, float | int | bool | str] = Field(default={})

    @model_validator(mode="after")
    def _known_settings(self) -> Self:
        _judge_loss(self.loss, self.loss_config)
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with what the model said before it was trained."""
        rules: BatchLossRules = BATCH_LOSSES[self.loss]
        return rules.needs_reference(judge_batch(self.loss, wire_config(self.loss_config), []))


def wire_config(config: dict[str, float | int | bool | str]) -> dict[str, float | str]:
    """A loss's settings as a request carries them: numbers and texts."""
    return {key: value if isinstance(value, str) else float(value) for key, value in config.items()}


def checkpoint_name(step: int) -> str:
    """What the checkpoint behind a step is called."""
    return f"{_STEP}{step:06d}"


def _judge_loss(loss: str, config: dict[str, float | int | bool | str]) -> None:
    if loss in BATCH_LOSSES:
        try:
            judge_batch(loss, wire_config(config), [])
        except InvalidInput as error:
            raise ValueError(error.message.replace("loss_fn_config", "loss_config")) from error
    elif config:
        raise ValueError(f"loss_config: {loss} has no settings")
