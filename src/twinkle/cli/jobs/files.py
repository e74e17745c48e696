"""The options of jobs that do what a file says: ``twinkle submit batch``, ``ops`` and ``script``."""

from __future__ import annotations

from typing import Annotated

import typer

from twinkle.cli.jobs.options import DataOption, ModelOption, Spec, data_of


def batch_options(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Requests in OpenAI's form, a line each; or an uploaded file's id.")
    ],
    model: ModelOption = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="ROUTE", help="Where all lines go.  [default: /v1/chat/completions]")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Samples under way at once.  [default: 64]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of lines that have none of their own.")] = None,
) -> Spec:
    """Answer a file of requests, behind everything interactive. --model is that of lines that name none.

    twinkle submit batch questions.jsonl --model Qwen/Qwen3.5-4B
    """
    return {
        "data": data_of(file, purpose="batch"),
        "model": model,
        "endpoint": endpoint,
        "window": window,
        "seed": seed,
    }


def ops_options(
    model: ModelOption = None,
    data: DataOption = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Of the adapter.  [default: 32]")] = None,
    on_error: Annotated[
        str | None,
        typer.Option(metavar="stop|continue", help="What a failed operation does to the rest.  [default: stop]"),
    ] = None,
) -> Spec:
    """Do a file of raw operations on one new adapter: training steps, saves, samples. Results come line by line.

    twinkle submit ops --model Qwen/Qwen3.5-4B --data steps.jsonl --id steps-1
    """
    return {"model": model, "data": data_of(data, purpose="user_data"), "rank": rank, "on_error": on_error}


def script_options(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A Python script, or the id of one that is there.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="What the script gets; behind --.")
    ] = None,
    max_seconds: Annotated[int | None, typer.Option(min=1, help="Of one attempt.  [default: the operator's]")] = None,
) -> Spec:
    """Run your own Python loop beside the service, where its operator allows it. What it prints are its events.

    twinkle submit script train.py -- --steps 100
    """
    return {
        "data": data_of(file, purpose="user_data"),
        "arguments": list(arguments) if arguments else None,
        "max_seconds": max_seconds,
    }
