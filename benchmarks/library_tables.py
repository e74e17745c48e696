"""The tables of what scripts are made of: data, and a step of the training library."""

from __future__ import annotations

from markdown_table import Result, machine_line, table


def library_text(result: Result) -> str:
    """Returns the table of steps by our models and by others' trainers."""
    batch, threads = result["batch"], result["threads"]
    rows = [
        (compared, side, f"{figures['step_ms']:g}", f"{figures['of_the_first']:g}")
        for compared, of_sides in result["results"].items()
        for side, figures in of_sides.items()
    ]
    lines = [
        machine_line(result),
        "",
        f"{batch['rows']} rows of {batch['tokens']} tokens, {batch['layers']} layers of {batch['hidden_size']}, "
        f"{threads} thread{'s' if threads > 1 else ''} of torch.",
        "",
        *table(("trained", "by", "ms a step", "times the Trainer's, median of rounds"), rows),
    ]
    return "\n".join(lines)


def data_text(result: Result) -> str:
    """Returns the table of encoding and packing by us and by others."""
    rows = []
    for what in ("encode", "pack"):
        figures = result[what]
        times = figures.get("times_as_quick")
        for side, per_s in figures["rows_per_s"].items():
            is_ours = side == "twinkle" and times is not None
            told = f"{times['median']:g} ({times['quartiles'][0]:g} to {times['quartiles'][1]:g})" if is_ours else ""
            packed = result["packed_rows"][side] if what == "pack" else ""
            rows.append((what, side, f"{per_s:g}", told, packed))
    lines = [
        machine_line(result),
        "",
        f"{result['rows']} conversations, packed to {result['packed_length']} tokens; medians of {result['rounds']} "
        "rounds.",
        "",
        *table(("", "by", "rows a second", "ours, times as quick (quartiles)", "packed rows"), rows),
    ]
    return "\n".join(lines)
