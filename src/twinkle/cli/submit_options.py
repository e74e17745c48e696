"""What every ``twinkle submit KIND`` takes beside the options of its kind, and how the two become one command."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from twinkle.core.errors import ConfigError

Spec: TypeAlias = Mapping[str, object]
"""What a kind's options say: fields of its spec; ``None`` is what was not given, a ``LocalFile`` is uploaded."""

_REMOTE = ("file-", "hf://", "ms://", "tinker://")

ServerFlag = Annotated[str | None, typer.Option(metavar="URL", help="The server.  [default: TWINKLE_SERVER_URL]")]
ModelOption = Annotated[str | None, typer.Option("--model", help="A base model, or a tinker:// checkpoint.")]
DataOption = Annotated[
    str | None, typer.Option("--data", metavar="FILE", help="A file of this machine, or the id of one that is there.")
]
EvalOption = Annotated[str | None, typer.Option("--eval", metavar="FILE", help="What to evaluate on.")]


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine that a spec stands for: it is uploaded, and its id takes its place."""

    path: Path
    purpose: str


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The options of all kinds."""

    name: Annotated[str | None, typer.Option(help="What people call it.")] = None
    client_id: Annotated[
        str | None,
        typer.Option("--id", help="Submitted again under this id it is the same job."),
    ] = None
    priority: Annotated[
        int | None,
        typer.Option(min=-100, max=100, help="Among your own work.  [default: behind it]"),
    ] = None
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[any:]JOB",
            help="Wait until that job has succeeded, or with any: has ended; may be repeated.",
        ),
    ] = None
    notify: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Told when it begins, is tried again and ends."),
    ] = None
    max_attempts: Annotated[int, typer.Option(min=1, max=100, help="When it fails for a reason that may pass.")] = 3
    metadata: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with it.")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A field of its spec, like lr=1e-4."),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would take.")] = False
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for it.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON document a line: the job, what happens in it, the job at its end.")
    ] = False
    server: ServerFlag = None


def command_of(kind: str, options: Callable[..., Spec]) -> Callable[..., None]:
    """The command of a kind: its own options, which ``options`` makes a spec of, and those of all jobs."""
    shared_types = get_type_hints(Shared, include_extras=True)
    shared = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)
        for field, hint in ((field, shared_types[field.name]) for field in fields(Shared))
    ]
    own_types = get_type_hints(options, include_extras=True)
    own = [
        one.replace(annotation=own_types[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in inspect.signature(options).parameters.items()
    ]

    def run(**given: Any) -> None:
        from twinkle.cli.submitting import submit_job

        of_all = Shared(**{one.name: given.pop(one.name) for one in shared})
        spec = {name: value for name, value in options(**given).items() if value is not None}
        raise SystemExit(submit_job(kind, with_settings(spec, of_all.settings or []), of_all))

    run.__name__ = options.__name__
    run.__doc__ = options.__doc__
    run.__annotations__ = {}
    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return run


def data_of(text: str | None, *, purpose: str) -> str | LocalFile | None:
    """What ``--data`` means: a file of this machine, else the id of one that was uploaded or a data set of a hub.

    Raises:
        ConfigError: There is no such file.
    """
    if text is None or text.startswith(_REMOTE):
        return text
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"there is no file {text}; give one, or the id of an uploaded one (file-...)")
    return LocalFile(path, purpose)


def with_settings(spec: Spec, settings: list[str]) -> dict[str, object]:
    """A spec with what ``--set`` says; ``a.b=1`` is a field of a field. Values are JSON, or else texts.

    Raises:
        ConfigError: One has no ``=``, or stands below a field that is no object.
    """
    whole = dict(spec)
    for setting in settings:
        path, separator, text = setting.partition("=")
        if not separator or not path:
            raise ConfigError(f"--set {setting}: write FIELD=VALUE")
        place = whole
        *above, last = path.split(".")
        for step in above:
            below = place.setdefault(step, {})
            if not isinstance(below, dict):
                raise ConfigError(f"--set {setting}: {step} is {below!r}, which has no fields")
            place = below
        place[last] = _value(text)
    return whole


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
