"""What every ``twinkle submit KIND`` takes beside the options of its kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

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
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUES",
            help="Once for each value: 8,16,32 or log:1e-5:1e-3:5 (lin:, int:); may be repeated. %N: so many at once.",
        ),
    ] = None
    sweep_mode: Annotated[
        str | None, typer.Option(metavar="grid|random", help="All combinations, or some.  [default: grid]")
    ] = None
    sweep_runs: Annotated[int | None, typer.Option(min=1, max=1000, help="How many of a random sweep.")] = None
    sweep_seed: Annotated[int | None, typer.Option(min=0, help="What they are drawn by.  [default: 0]")] = None
    at_once: Annotated[int | None, typer.Option(min=1, help="How many of a sweep run at the same time.")] = None
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="By which a sweep's best is found, like eval_loss.")
    ] = None
    goal: Annotated[str | None, typer.Option(metavar="min|max", help="Of the metric.")] = None
    require: Annotated[str | None, typer.Option(metavar="any|all", help="Of a sweep, to succeed.  [default: any]")] = (
        None
    )
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would take.")] = False
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where the file goes that comes of it, such as answers."),
    ] = None
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for it.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON document a line: the job, what happens in it, the job at its end.")
    ] = False
    server: ServerFlag = None


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
