"""The options of ``twinkle submit grpo`` and ``twinkle submit distill``; ``--set`` reaches what is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from twinkle.cli.jobs.options import DataOption, EvalOption, ModelOption, Spec
from twinkle.cli.jobs.training import (
    BudgetTokensOption,
    CheckpointEveryOption,
    EpochsOption,
    EvalEveryOption,
    EvalFractionOption,
    FormatOption,
    KeepOption,
    LengthOption,
    LrOption,
    MaxHoursOption,
    PatienceOption,
    RankOption,
    ScheduleOption,
    SeedOption,
    StepsOption,
    SuffixOption,
    TruncationOption,
    WarmupOption,
    sft_options,
)
from twinkle.core.errors import ConfigError

BatchOption = Annotated[int | None, typer.Option(min=1, help="Prompts a step.  [default: 16, or all of fewer]")]
MaxTokensOption = Annotated[int | None, typer.Option(min=1, help="Of an answer, at most.  [default: 512]")]
TemperatureOption = Annotated[float | None, typer.Option(min=0.01, max=2.0, help="Of the answers.  [default: 1]")]


def grpo_options(
    model: ModelOption = None,
    data: DataOption = None,
    grader: Annotated[
        str | None,
        typer.Option(metavar="FILE|JSON", help="How good an answer is: a grader as JSON, or a file with one."),
    ] = None,
    eval_data: EvalOption = None,
    eval_fraction: EvalFractionOption = None,
    format: FormatOption = None,
    group_size: Annotated[int | None, typer.Option(min=2, help="Answers to each prompt.  [default: 8]")] = None,
    batch_size: BatchOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    max_length: LengthOption = None,
    truncation: TruncationOption = None,
    lr: LrOption = None,
    schedule: ScheduleOption = None,
    warmup_ratio: WarmupOption = None,
    rank: RankOption = None,
    loss: Annotated[
        str | None,
        typer.Option(help="importance_sampling, ppo, cispo, gspo, GRPOLoss, ...  [default: importance_sampling]"),
    ] = None,
    kl_coef: Annotated[
        float | None, typer.Option(min=0.0, help="The price of leaving the first weights.  [default: 0]")
    ] = None,
    eval_every: EvalEveryOption = None,
    patience: PatienceOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    keep_last: KeepOption = None,
    budget_tokens: BudgetTokensOption = None,
    max_hours: MaxHoursOption = None,
    suffix: SuffixOption = None,
    seed: SeedOption = None,
) -> Spec:
    """Learn what a grader rewards: groups of answers to each prompt are compared with one another.

    twinkle submit grpo --model Qwen/Qwen3.5-4B --data sums.jsonl --grader grader.json --group-size 8 --steps 100
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
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        budget_tokens=budget_tokens,
        max_hours=max_hours,
        suffix=suffix,
        seed=seed,
    )
    own = {"group_size": group_size, "max_tokens": max_tokens, "temperature": temperature, "kl_coef": kl_coef}
    return {**shared, **own, "grader": None if grader is None else _grader(grader)}


def distill_options(
    model: ModelOption = None,
    data: DataOption = None,
    teacher: Annotated[
        str | None, typer.Option(help="Whom to learn from: a base model, or a tinker:// checkpoint.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE", help="on_policy: the student answers, off_policy: the teacher.  [default: on_policy]"
        ),
    ] = None,
    eval_data: EvalOption = None,
    eval_fraction: EvalFractionOption = None,
    format: FormatOption = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Answers to each prompt.  [default: 1]")] = None,
    batch_size: BatchOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    epochs: EpochsOption = None,
    steps: StepsOption = None,
    max_length: LengthOption = None,
    truncation: TruncationOption = None,
    lr: LrOption = None,
    schedule: ScheduleOption = None,
    warmup_ratio: WarmupOption = None,
    rank: RankOption = None,
    eval_every: EvalEveryOption = None,
    patience: PatienceOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    keep_last: KeepOption = None,
    budget_tokens: BudgetTokensOption = None,
    max_hours: MaxHoursOption = None,
    suffix: SuffixOption = None,
    seed: SeedOption = None,
) -> Spec:
    """Learn to answer as a teacher does.

    twinkle submit distill --model Qwen/Qwen3.5-4B --teacher Qwen/Qwen3.5-27B --data prompts.jsonl --steps 100
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
        eval_every=eval_every,
        patience=patience,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        budget_tokens=budget_tokens,
        max_hours=max_hours,
        suffix=suffix,
        seed=seed,
    )
    own = {"group_size": group_size, "max_tokens": max_tokens, "temperature": temperature}
    return {**shared, **own, "teacher": teacher, "mode": mode}


def _grader(text: str) -> object:
    """A grader as it was written, or as a file has it.

    Raises:
        ConfigError: It is no JSON, and no file's name.
    """
    if not text.lstrip().startswith("{"):
        path = Path(text)
        if not path.is_file():
            raise ConfigError(f"--grader: there is no file {text}; give one, or the grader itself as JSON")
        text = path.read_text(encoding="utf-8")
    try:
        grader: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--grader: is no JSON: {error}") from error
    return grader
