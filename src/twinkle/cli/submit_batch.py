"""The options of ``twinkle submit batch``."""

from __future__ import annotations

from typing import Annotated

import typer

from twinkle.cli.submit_options import ModelOption, Spec, data_of


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
