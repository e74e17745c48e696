"""``twinkle submit batch`` and ``script``: what is said on the command line is a spec that the server takes."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

from twinkle.cli.jobs.files import batch_options, script_options
from twinkle.cli.jobs.options import LocalFile, Spec
from twinkle.cli.jobs.submit import submit
from twinkle.wire.bodies.jobs_specs import parse_spec

OPTIONS: dict[str, Callable[..., Spec]] = {"batch": batch_options, "script": script_options}


@pytest.mark.parametrize(
    ("line", "name", "purpose", "fields"),
    [
        (
            "batch lines.jsonl --model m --endpoint /v1/completions --seed 3",
            "lines.jsonl",
            "batch",
            {"model": "m", "endpoint": "/v1/completions", "seed": 3},
        ),
        ("script loop.py -- --steps 3", "loop.py", "user_data", {"arguments": ("--steps", "3")}),
    ],
)
def test_a_command_line_is_a_spec(
    line: str, name: str, purpose: str, fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("{}\n")
    kind, *arguments = shlex.split(line)
    command = typer.main.get_command(submit).commands[kind]  # type: ignore[attr-defined]
    given = command.make_context(kind, arguments).params
    own = inspect.signature(OPTIONS[kind]).parameters

    said = OPTIONS[kind](**{option: value for option, value in given.items() if option in own})

    assert said["data"] == LocalFile(Path(name), purpose)
    values = {field: value for field, value in said.items() if value is not None} | {"data": "file-1"}
    spec = parse_spec(kind, values)
    assert {field: getattr(spec, field) for field in fields} == fields
