"""The tables of what scripts are made of: data, and a step of the training library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markdown_table import Result, machine_line, table


def library_text(result: Result) -> str:
    """Returns the table of steps by our models and by others' trainers."""
    batch, threads = result["batch"], result["threads"]
    rows = [
        (
            compared,
            side,
            *(f"{figures[name]:g}" for name in ("step_ms", "of_the_first", "cpu_ms", "cpu_of_the_first")),
        )
        for compared, of_sides in result["results"].items()
        for side, figures in of_sides.items()
    ]
    lines = [
        machine_line(result),
        "",
        f"{batch['rows']} rows of {batch['tokens']} tokens, {batch['layers']} layers of {batch['hidden_size']}, "
        f"{threads} thread{'s' if threads > 1 else ''} of torch.",
        "",
        *table(("trained", "by", "ms a step", "times the Trainer's", "CPU ms a step", "times the Trainer's CPU"), rows),
    ]
    return "\n".join(lines)


def data_text(result: Result) -> str:
    """Returns the table of encoding and packing by us and by others."""
    rows = []
    for what in ("encode", "pack"):
        figures = result[what]
        for side, per_s in figures["rows_per_s"].items():
            of_ours = figures if side == "twinkle" else {}
            times = [_spread(of_ours.get(name)) for name in ("times_as_quick", "times_as_little_cpu")]
            packed = result["packed_rows"][side] if what == "pack" else ""
            rows.append((what, side, f"{per_s:g}", *times, packed))
    lines = [
        machine_line(result),
        "",
        f"{result['rows']} conversations, packed to {result['packed_length']} tokens; medians of {result['rounds']} "
        "rounds.",
        "",
        *table(
            ("", "by", "rows a second", "ours, times as quick (quartiles)", "the same by CPU time", "packed rows"), rows
        ),
    ]
    return "\n".join(lines)


def _spread(times: Mapping[str, Any] | None) -> str:
    return "" if times is None else f"{times['median']:g} ({times['quartiles'][0]:g} to {times['quartiles'][1]:g})"
