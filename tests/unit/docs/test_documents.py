"""What the documents name exists: files, functions, settings, commands, routes, links."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
import typer.main

from twinkle.cli.app import app
from twinkle.client.endpoint import JOB_VARIABLE, KEY_VARIABLES, URL_VARIABLES
from twinkle.core.process.crash import VARIABLE as CRASH_VARIABLE
from twinkle.core.process.foreign_settings import FOREIGN_SETTINGS
from twinkle.core.settings import Settings
from twinkle.server import tinker

HERE = Path(__file__).parent
PORTS_OF_OTHERS = ("5555", "9090", "3000")
"""Of Flower, Prometheus and Grafana."""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


documents = load(HERE / "documents.py")
ROOT = documents.ROOT


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]

    assert missing == []


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.name)
def test_a_server_of_this_machine_listens_where_it_does_unless_told_otherwise(path: Path) -> None:
    ports = re.findall(r"https?://(?:127\.0\.0\.1|localhost):(\d+)", path.read_text())

    assert set(ports) <= {str(Settings().port), *PORTS_OF_OTHERS}


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.name)
def test_every_file_and_name_in_it_exists(path: Path) -> None:
    wrong = []
    for text in documents.in_backticks(path):
        match = re.fullmatch(r"([\w/.]+\.(?:py|yaml|md))(?:::([\w.]+))?", text)
        if match is None:
            continue
        places = [ROOT / match[1], ROOT / "src" / "twinkle" / match[1], path.parent / match[1]]
        found = next((place for place in places if place.is_file()), None)
        if found is None or (match[2] and match[2] not in names_in(found)):
            wrong.append(text)

    assert wrong == []


def names_in(path: Path) -> set[str]:
    """Classes, functions, and methods as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)))
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.name)
def test_every_setting_named_is_one(path: Path) -> None:
    known = {f"TWINKLE_{name.upper()}" for name in Settings.model_fields} | {
        *URL_VARIABLES,
        *KEY_VARIABLES,
        JOB_VARIABLE,
        *FOREIGN_SETTINGS,
        CRASH_VARIABLE,
    }

    assert set(re.findall(r"TWINKLE_[A-Z_]+[A-Z]", path.read_text())) <= known


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.name)
def test_every_port_named_is_the_default_one(path: Path) -> None:
    ports = re.findall(r"(?:127\.0\.0\.1|localhost):(\d+)", path.read_text())

    assert set(ports) <= {str(Settings.model_fields["port"].default)}


def test_the_table_of_settings_is_the_settings() -> None:
    table = load(ROOT / "docs" / "settings_table.py")
    document = table.DOCUMENT.read_text()

    assert table.with_table(document) == document, "run python docs/settings_table.py"


def test_the_tables_of_models_are_those_that_the_tests_run_over() -> None:
    tables = load(ROOT / "docs" / "models_table.py")
    document = tables.DOCUMENT.read_text()

    assert tables.with_tables(document) == document, "run python docs/models_table.py"


def test_every_route_of_the_protocol_is_in_the_list_and_no_other() -> None:
    text = (ROOT / "docs" / "tinker-compatibility.md").read_text()
    served = text.partition("## Served")[2].partition("## Flags")[0]
    listed = set(re.findall(r"`([a-z_/{}]+)`", served)) - {
        "archive",
        "delete",
        "publish",
        "ttl",
        "healthz",
        "readyz",
        "livez",
    }
    parts = [
        importlib.import_module(f"{tinker.__name__}.{part.name}")
        for part in pkgutil.iter_modules(tinker.__path__)
        if part.name != "routes"
    ]
    routes = {route.path.removeprefix("/") for part in parts if hasattr(part, "router") for route in part.router.routes}

    assert listed == {path for path in routes if "{segment}" not in path}


@pytest.mark.parametrize("snippet", list(documents.snippets(language="bash")), ids=str)
def test_every_command_shown_is_one_we_have(snippet: object) -> None:
    command = typer.main.get_command(app)
    makefile = (ROOT / "Makefile").read_text()
    for line in snippet.text.splitlines():  # type: ignore[attr-defined]
        words = shlex.split(line, comments=True)
        if words[:1] == ["twinkle"]:
            parse(command, words[1:])
        elif words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line


def parse(command: click.Command, words: list[str]) -> None:
    """Raises when a command or a flag does not exist; runs nothing."""
    context = command.make_context("twinkle", list(words), resilient_parsing=False)
    while isinstance(context.command, click.Group):
        name, found, rest = context.command.resolve_command(context, context.protected_args + context.args)
        assert found is not None and name is not None
        context = found.make_context(name, rest, parent=context)


@pytest.mark.parametrize("snippet", list(documents.snippets(language="python")), ids=str)
def test_every_python_snippet_compiles(snippet: object) -> None:
    compile(snippet.text, str(snippet), "exec")  # type: ignore[attr-defined]
