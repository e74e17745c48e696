"""The package as `pip install .` gives it, without extras: what every command says there, in one line."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer
from typer.models import ArgumentInfo

from harness.environment import environment_python
from twinkle.cli.app import app

REPOSITORY = Path(__file__).resolve().parents[2]
NEED_NOTHING = {"version", "export", "submit", "jobs", "files"}
"""What speaks to a server over HTTP, or to nobody."""
COMPUTE = {"serve", "worker", "jobs-worker", "processors"}
AT_LEAST = 60

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def twinkle() -> Path:
    """The command in an environment of its own."""
    sources = [REPOSITORY / "pyproject.toml", *sorted((REPOSITORY / "src").rglob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

    def fill(python: Path) -> None:
        subprocess.run([python, "-m", "pip", "install", "--quiet", REPOSITORY], check=True)

    return environment_python(REPOSITORY / ".cache" / "bare-venv", made_from=digest, fill=fill).with_name("twinkle")


def commands(group: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Every command that does something, with a word or a number for each argument that it must have."""
    for command in group.registered_commands:
        assert command.callback is not None
        hints = get_type_hints(command.callback, include_extras=True)
        words = [*path, command.name or command.callback.__name__.replace("_", "-")]
        for parameter in inspect.signature(command.callback).parameters.values():
            if parameter.default is inspect.Parameter.empty:
                kind, info = get_args(hints.get(parameter.name, parameter.annotation))[:2]
                is_argument = isinstance(info, ArgumentInfo)
                words += [] if is_argument else [(info.param_decls or [f"--{parameter.name.replace('_', '-')}"])[0]]
                words.append("1" if kind in (int, float) else "x")
        yield words
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, (*path, str(inner.name)))


def test_every_command_says_which_extra_it_needs_or_needs_none(twinkle: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TWINKLE_", "TINKER_", "PYTHONPATH"))
    }
    said = {}
    for words in commands(app):
        done = subprocess.run(
            [twinkle, *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        said[" ".join(words)] = (done.returncode, done.stdout + done.stderr)

    wrong = {words: told for words, told in said.items() if not is_as_promised(words.split()[0], *told)}

    assert len(said) >= AT_LEAST
    assert wrong == {}


def is_as_promised(command: str, code: int, told: str) -> bool:
    """Whether a command ended as it should where nothing but the package is installed."""
    named = re.search(r"twinkle: .*not installed: pip install 'twinkle-queue\[(\w+)\]'\n\Z", told)
    if "Traceback" in told or (named is None and "not installed" in told):
        return False
    if command in NEED_NOTHING:
        return named is None and (code != 0) == (command != "version")
    expected = "worker" if command in COMPUTE else "scripts" if command == "data" else "server"
    return named is not None and code == 2 and named[1] == expected
