"""``twinkle submit``: a command for each kind of jobs. A kind's options are a function that makes its spec of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from twinkle.cli.jobs.export import export_options
from twinkle.cli.jobs.files import batch_options, ops_options, script_options
from twinkle.cli.jobs.options import Shared, Spec, with_settings
from twinkle.cli.jobs.rl import distill_options, grpo_options
from twinkle.cli.jobs.training import dpo_options, sft_options

_FLOW_ENDINGS = (".yaml", ".yml")

_OF_SINGLE_KINDS = (
    "settings",
    "sweep",
    "sweep_mode",
    "sweep_runs",
    "sweep_seed",
    "at_once",
    "metric",
    "goal",
    "require",
)
_FLOW_HELP = """Hand over jobs that come after each other, out of a YAML file.

twinkle submit flow.yaml --name nightly
"""

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


def _command_of(kind: str, options: Callable[..., Spec]) -> Callable[..., None]:
    """The command of a kind: its own options, which ``options`` makes a spec of, and those of all jobs."""

    def run(of_all: Shared, given: Mapping[str, Any]) -> int:
        from twinkle.cli.jobs.submitting import submit_job

        spec = {name: value for name, value in options(**given).items() if value is not None}
        return submit_job(kind, with_settings(spec, of_all.settings or []), of_all)

    own_types = get_type_hints(options, include_extras=True)
    own = [
        one.replace(annotation=own_types[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in inspect.signature(options).parameters.items()
    ]
    return _command(options.__name__, options.__doc__, own, run, left_out=())


def _flow_command(show_schema: Callable[[bool], None]) -> Callable[..., None]:
    """The command of a flow's file, which takes what a job takes but for what is said of single kinds and sweeps."""

    def run(of_all: Shared, given: Mapping[str, Any]) -> int:
        from twinkle.cli.jobs.submitting import submit_flow

        return submit_flow(given["file"], of_all)

    file = Annotated[Path, typer.Argument(metavar="FLOW.yaml", help="Jobs by name, and what each waits for.")]
    schema = Annotated[
        bool,
        typer.Option("--schema", is_eager=True, callback=show_schema, help="Print the JSON schema of such a file."),
    ]
    own = [
        inspect.Parameter("file", inspect.Parameter.KEYWORD_ONLY, annotation=file),
        inspect.Parameter("schema", inspect.Parameter.KEYWORD_ONLY, annotation=schema, default=False),
    ]
    return _command("flow", _FLOW_HELP, own, run, left_out=_OF_SINGLE_KINDS)


def _command(
    name: str,
    help_text: str | None,
    own: Sequence[inspect.Parameter],
    run: Callable[[Shared, Mapping[str, Any]], int],
    *,
    left_out: Collection[str],
) -> Callable[..., None]:
    types = get_type_hints(Shared, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
        )
        for field in fields(Shared)
        if field.name not in left_out
    ]

    def command(**given: Any) -> None:
        of_all = Shared(**{one.name: given.pop(one.name) for one in shared})
        raise SystemExit(run(of_all, given))

    command.__name__ = name
    command.__doc__ = help_text
    command.__annotations__ = {}
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return command


for _kind, _options in _OPTIONS.items():
    submit.command(_kind)(_command_of(_kind, _options))

submit.command("flow")(_flow_command(_show_flow_schema))
