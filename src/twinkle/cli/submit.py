"""``twinkle submit``: a command for each kind of jobs. A kind's options are a function that makes its spec of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twinkle.cli.submit_batch import batch_options
from twinkle.cli.submit_export import export_options
from twinkle.cli.submit_ops import ops_options
from twinkle.cli.submit_options import Spec, command_of, flow_command
from twinkle.cli.submit_rl import distill_options, grpo_options
from twinkle.cli.submit_script import script_options
from twinkle.cli.submit_training import dpo_options, sft_options

_FLOW_ENDINGS = (".yaml", ".yml")

_OPTIONS: Mapping[str, Callable[..., Spec]] = {
    "batch": batch_options,
    "distill": distill_options,
    "dpo": dpo_options,
    "export": export_options,
    "grpo": grpo_options,
    "ops": ops_options,
    "script": script_options,
    "sft": sft_options,
}
"""By kind. Adding one is one line."""


class _KindOrFlow(TyperGroup):
    """Commands by name, and a YAML file in the place of a command's name: then it is a flow."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # of click's, which typer has a copy of
        if args and args[0].endswith(_FLOW_ENDINGS):
            args = ["flow", *args]
        return super().resolve_command(ctx, args)


def _show_schema(is_asked: bool) -> None:
    if is_asked:
        from twinkle.wire.bodies.jobs import published_schema

        print(json.dumps(published_schema(), indent=2))
        raise typer.Exit


def _show_flow_schema(is_asked: bool) -> None:
    if is_asked:
        from twinkle.wire.job_groups import flow_file_schema

        print(json.dumps(flow_file_schema(), indent=2))
        raise typer.Exit


submit = typer.Typer(
    cls=_KindOrFlow,
    help="Hand a job over: it goes on when this machine sleeps. Ctrl-C leaves it running.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@submit.callback()
def _schema(
    schema: Annotated[
        bool,
        typer.Option("--schema", is_eager=True, callback=_show_schema, help="Print the JSON schema of all kinds."),
    ] = False,
) -> None:
    """Hand a job over: it goes on when this machine sleeps. Ctrl-C leaves it running."""


for _kind, _options in _OPTIONS.items():
    submit.command(_kind)(command_of(_kind, _options))

submit.command("flow")(flow_command(_show_flow_schema))
