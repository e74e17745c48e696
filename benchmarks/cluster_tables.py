"""The tables of what groups of workers, weights on their way and moves between meshes cost."""

from __future__ import annotations

from markdown_table import Result, machine_line, table


def calls_text(result: Result) -> str:
    """Returns the table of calls on workers."""
    rows = [
        (
            cell["mode"],
            cell["workers"],
            *(cell[way]["p50_ms"] for way in ("call", "slice_dp_8_rows_a_rank", "echo_64_kib", "echo_16_mib")),
            cell.get("submitted_per_s", ""),
            cell.get("echo_mib_per_s", ""),
            cell.get("start_s", ""),
        )
        for cell in result["cells"]
    ]
    header = (
        *(
            "mode",
            "workers",
            "empty call ms",
            "`slice_dp`, 8 rows each, ms",
            "64 KiB and back ms",
            "16 MiB and back ms",
        ),
        *("calls/s not waited for", "MiB/s there and back", "start s"),
    )
    return "\n".join([machine_line(result), "", "Medians.", "", *table(header, rows)])


def weights_text(result: Result) -> str:
    """Returns the table of weight synchronisation."""
    keys = ("load", "samplers", "mib", "meet_ms", "sync_ms", "sync_mib_per_s", "file_mib_per_s", "copy_mib_per_s")
    header = (
        *("what", "samplers", "MiB", "meeting ms", "synchronised ms", "synchronised MiB/s", "written and read MiB/s"),
        *("copied in memory MiB/s", "times a copy", "file: times as long"),
    )
    rows = [[cell[key] for key in (*keys, "sync_to_copy", "file_to_sync")] for cell in result["cells"]]
    return "\n".join([machine_line(result), "", "Medians; bytes a second at each sampler.", "", *table(header, rows)])


def moves_text(result: Result) -> str:
    """Returns the table of moves between meshes."""
    rows = [
        [row[key] for key in ("rank", "snapshot_mib", "step_s", "handed_over_s", "moved_step_s", "the_move_s")]
        for row in result["rows"]
    ]
    header = (
        *("adapter's rank", "snapshot MiB", "step where it was s", "until handed over s"),
        *("step that waits for the move s", "the move alone s"),
    )
    said = f"Medians of {result['rounds']} moves each."
    return "\n".join([machine_line(result), "", said, "", *table(header, rows)])
