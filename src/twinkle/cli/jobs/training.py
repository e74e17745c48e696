"""The options of ``twinkle submit sft`` and ``twinkle submit dpo``: what is used often; ``--set`` reaches the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from twinkle.cli.console import complain
from twinkle.cli.jobs.options import DataOption, EvalOption, ModelOption, Spec, data_of
from twinkle.core.errors import ConfigError

_PURPOSE = "fine-tune"

FormatOption = Annotated[
    str | None,
    typer.Option("--format", metavar="FORMAT", help="auto, chat, completion, preference, text or tokens."),
]
EvalFractionOption = Annotated[
    float | None, typer.Option(min=0.0, max=0.5, help="Or keep so much of the data for that, like 0.1.")
]
EpochsOption = Annotated[int | None, typer.Option(min=1, help="Passes over the data.  [default: by their number]")]
StepsOption = Annotated[int | None, typer.Option(min=1, help="Optimizer steps, instead of epochs.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Rows, or pairs, a step.  [default: by their number]")]
LengthOption = Annotated[int | None, typer.Option(min=2, help="Tokens of a row.  [default: what the model takes]")]
TruncationOption = Annotated[
    str | None, typer.Option(metavar="WAY", help="Of longer rows: raise, left, right, split, delete.  [default: raise]")
]
LrOption = Annotated[float | None, typer.Option(help="Learning rate.  [default: 1e-4]")]
ScheduleOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="constant, linear, cosine or inverse_sqrt.  [default: linear]")
]
WarmupOption = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of the steps that warm up.")]
RankOption = Annotated[int | None, typer.Option(min=1, help="Of the adapter.  [default: 32]")]
EvalEveryOption = Annotated[int | None, typer.Option(min=0, help="Steps.  [default: after every epoch]")]
PatienceOption = Annotated[int | None, typer.Option(min=0, help="End after so many evaluations without progress.")]
SampleOption = Annotated[
    list[str] | None, typer.Option("--sample", metavar="PROMPT", help="Answered during training; may be repeated.")
]
SampleEveryOption = Annotated[int | None, typer.Option(min=0, help="Steps.  [default: after every epoch]")]
CheckpointEveryOption = Annotated[int | None, typer.Option(min=0, help="Steps.  [default: after every epoch]")]
KeepOption = Annotated[int | None, typer.Option("--keep-last", min=0, help="Checkpoints that stay.  [default: 3]")]
BudgetTokensOption = Annotated[
    int | None, typer.Option(min=1, help="A budget of trained tokens: it ends with a checkpoint.")
]
OldBudgetOption = Annotated[int | None, typer.Option("--max-tokens", min=1, hidden=True)]
MaxHoursOption = Annotated[float | None, typer.Option(help="A budget of running time: it ends with a checkpoint.")]
SuffixOption = Annotated[str | None, typer.Option(help="A part of the model's name.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Of the order of the rows, and of the adapter.")]


def sft_options(
    model: ModelOption = None,
    data: DataOption = None,
    eval_data: EvalOption = None,
    eval_fraction: EvalFractionOption = None,
    format: FormatOption = None,
    max_length: LengthOption = None,
    truncation: TruncationOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    batch_size: BatchOption = None,
    lr: LrOption = None,
    schedule: ScheduleOption = None,
    warmup_ratio: WarmupOption = None,
    rank: RankOption = None,
    loss: Annotated[
        str | None, typer.Option(help="cross_entropy or CrossEntropyLoss.  [default: cross_entropy]")
    ] = None,
    eval_every: EvalEveryOption = None,
    patience: PatienceOption = None,
    samples: SampleOption = None,
    sample_every: SampleEveryOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    keep_last: KeepOption = None,
    budget_tokens: BudgetTokensOption = None,
    max_tokens: OldBudgetOption = None,
    max_hours: MaxHoursOption = None,
    suffix: SuffixOption = None,
    seed: SeedOption = None,
) -> Spec:
    """Fine-tune on answers: chats, prompts with completions, texts or tokens.

    twinkle submit sft --model Qwen/Qwen3.5-4B --data train.jsonl --eval eval.jsonl --epochs 2 --sample "Who are you?"
    """
    return {
        "model": model,
        "data": data_of(data, purpose=_PURPOSE),
        "eval_data": data_of(eval_data, purpose=_PURPOSE),
        "eval_fraction": eval_fraction,
        "format": format,
        "max_length": max_length,
        "truncation": truncation,
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "schedule": schedule,
        "warmup_ratio": warmup_ratio,
        "rank": rank,
        "loss": loss,
        "eval_every": eval_every,
        "patience": patience,
        "samples": samples or None,
        "sample_every": sample_every,
        "checkpoint_every": checkpoint_every,
        "keep_last": keep_last,
        "max_train_tokens": budget_of(budget_tokens, max_tokens),
        "max_hours": max_hours,
        "suffix": suffix,
        "seed": seed,
    }


def dpo_options(
    model: ModelOption = None,
    data: DataOption = None,
    eval_data: EvalOption = None,
    eval_fraction: EvalFractionOption = None,
    format: FormatOption = None,
    max_length: LengthOption = None,
    truncation: TruncationOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    batch_size: BatchOption = None,
    lr: LrOption = None,
    schedule: ScheduleOption = None,
    warmup_ratio: WarmupOption = None,
    rank: RankOption = None,
    loss: Annotated[
        str | None, typer.Option(help="DPOLoss, SimPOLoss, CPOLoss or ORPOLoss.  [default: DPOLoss]")
    ] = None,
    beta: Annotated[float | None, typer.Option(help="How much the loss makes of a difference.")] = None,
    eval_every: EvalEveryOption = None,
    patience: PatienceOption = None,
    samples: SampleOption = None,
    sample_every: SampleEveryOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    keep_last: KeepOption = None,
    budget_tokens: BudgetTokensOption = None,
    max_tokens: OldBudgetOption = None,
    max_hours: MaxHoursOption = None,
    suffix: SuffixOption = None,
    seed: SeedOption = None,
) -> Spec:
    """Fine-tune on preferences: pairs of a chosen and a rejected answer.

    twinkle submit dpo --model Qwen/Qwen3.5-4B --data pairs.jsonl --beta 0.1 --epochs 1
    """
    shared = sft_options(
        model=model,
        data=data,
        eval_data=eval_data,
        eval_fraction=eval_fraction,
        format=format,
        max_length=max_length,
        truncation=truncation,
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        schedule=schedule,
        warmup_ratio=warmup_ratio,
        rank=rank,
        loss=loss,
        eval_every=eval_every,
        patience=patience,
        samples=samples,
        sample_every=sample_every,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        budget_tokens=budget_tokens,
        max_tokens=max_tokens,
        max_hours=max_hours,
        suffix=suffix,
        seed=seed,
    )
    return {**shared, "loss_config": None if beta is None else {"beta": beta}}


def budget_of(budget_tokens: int | None, max_tokens: int | None) -> int | None:
    """The budget of tokens, under its own name or the one it had.

    Raises:
        ConfigError: Both are given.
    """
    if max_tokens is None:
        return budget_tokens
    if budget_tokens is not None:
        raise ConfigError("--max-tokens: is what --budget-tokens was called; give that one alone")
    complain(
        "--max-tokens is called --budget-tokens for sft and dpo, and is taken for that;"
        " for grpo and distill --max-tokens is the length of an answer"
    )
    return max_tokens
