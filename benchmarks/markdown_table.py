"""What every table of the README is made with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
"""The content of a result file, or of a part of it."""


def machine_line(result: Result) -> str:
    """Returns one line on what the numbers were measured on."""
    machine, load = result["machine"], result["load_average"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, commit {machine['commit']}; "
        f"load average {load['before']} before, {load['after']} after. {versions}."
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns a Markdown table, line by line."""
    lines = [list(header), ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
