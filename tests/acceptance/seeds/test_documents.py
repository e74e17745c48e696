"""What is taken from the documents is what they show."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from harness.seeds import Script

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
EXTRA = "scripts"

HERE = {"000:32", "000:60", "000:106", "002:38", "002:78", "002:141"}
"""Document and line of what needs neither Ray nor Megatron nor a server; the tests beside this one run them."""


def test_every_script_is_python_and_has_the_words_of_its_document(scripts: list[Script]) -> None:
    for script in scripts:
        compile(script.text, script.name, "exec")
        shown = [line.strip() for line in script.lines if line.strip()]
        assert [line.strip() for line in script.text.splitlines() if line.strip()] == shown, script.name


def test_no_script_that_could_run_here_is_left_out(scripts: list[Script]) -> None:
    assert {script.name for script in scripts if script.is_whole and not script.needs} == HERE


def test_one_extra_brings_all_that_the_scripts_import(scripts: list[Script]) -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    named = {name.lower() for each in project["dependencies"] for name in _names(each)}
    waiting = [EXTRA]
    while waiting:
        for each in extras[waiting.pop()]:
            inner = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", each)
            waiting += inner[1].split(",") if inner else []
            named |= {name.lower() for name in _names(each)}
    imported = {name for script in scripts for name in _imports(script.text)} - set(sys.stdlib_module_names)
    ours = {"twinkle", "twinkle_client", "twinkle_agentic"}
    distributions = packages_distributions()

    assert imported & ours and {"peft", "tinker"} <= imported
    lacking = {name for name in imported - ours if not {each.lower() for each in distributions[name]} & named}
    assert lacking == set()


def _names(requirement: str) -> list[str]:
    return re.findall(r"^[\w.-]+", requirement)


def _imports(text: str) -> set[str]:
    """The packages that a script imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


def test_two_prints_of_a_script_have_the_same_shape(scripts: list[Script]) -> None:
    """The English text lost its indentation and the Chinese one did not: they nest the same words alike."""
    named = {script.name: script for script in scripts}
    for one, other in (("000:32", "002:38"), ("000:60", "002:78"), ("000:106", "002:141")):
        assert _shape(named[one].text) == _shape(named[other].text)


def _shape(text: str) -> list[tuple[int, str]]:
    """Level and first word of every line of code outside of strings."""
    code = [line for line in text.partition('"""')[0].splitlines() if line.strip() and not line.strip().startswith("#")]
    return [(len(line) - len(line.lstrip()), line.split("(")[0].strip()) for line in code]
