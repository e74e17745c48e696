"""The options of ``twinkle submit script``."""

from __future__ import annotations

from typing import Annotated

import typer

from twinkle.cli.submit_options import Spec, data_of


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
