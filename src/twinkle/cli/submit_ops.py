"""The options of ``twinkle submit ops``."""

from __future__ import annotations

from typing import Annotated

import typer

from twinkle.cli.submit_options import DataOption, ModelOption, Spec, data_of


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
