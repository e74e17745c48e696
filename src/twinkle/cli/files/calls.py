"""What ``twinkle files`` asks the server, and how it shows the answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.cli.console import say
from twinkle.cli.exit_codes import EXIT_FOUND
from twinkle.cli.jobs.options import LocalFile, data_of
from twinkle.cli.table import minute_of, print_table
from twinkle.client import Client
from twinkle.core.errors import ConfigError
from twinkle.wire.bodies.files import FileInfo

_DAY_S = 24 * 3600
_MEGABYTE = 10**6
_MOST_SHOWN = 100


def upload_file(
    server: str | None, path: Path, *, purpose: str, name: str | None, days: int | None, as_json: bool
) -> None:
    """Bring a file to the server."""
    with Client(server) as client:
        file = client.files.upload(
            path,
            purpose=purpose,
            name=name,
            expires_after_s=None if days is None else days * _DAY_S,
            progress=Progress(path.name),
        )
    if as_json:
        say(file.model_dump_json())
        return
    if file.problem:
        say(file.problem)
    say(file.id)


def list_files(server: str | None, *, limit: int, purpose: str | None, as_json: bool) -> None:
    """Print the newest files."""
    with Client(server) as client:
        found = client.files.page(limit=limit, purpose=purpose).files
    if as_json:
        say(json.dumps([file.model_dump(mode="json") for file in found]))
        return
    print_table(("file", "name", "purpose", "MB", "lines", "status", "created", "ends"), [_row(one) for one in found])


def show_file(server: str | None, file_id: str, *, as_json: bool) -> None:
    """Print one file."""
    with Client(server) as client:
        file = client.files.show(file_id)
    if as_json:
        say(file.model_dump_json())
        return
    say(f"{file.id}: {file.filename}, {file.size_bytes} bytes, for {file.purpose}, {file.status}")
    end = "" if file.expires_at is None else f", ends {minute_of(file.expires_at)}"
    say(f"created {minute_of(file.created_at)}{end}")
    say(f"SHA-256 {file.sha256}")
    if file.num_lines is not None:
        say(f"{file.num_lines} lines")
    if file.problem:
        say(file.problem)


def download_file(server: str | None, file_id: str, path: Path | None, *, as_json: bool) -> None:
    """Bring a file here.

    Raises:
        ConfigError: There is something of this name already.
    """
    with Client(server) as client:
        # A stranger's name is no path.
        target = path or Path(Path(client.files.show(file_id).filename).name or file_id)
        if target.exists():
            raise ConfigError(f"{target} is there already; give another path")
        client.files.download(file_id, target, progress=Progress(target.name))
    say(json.dumps({"id": file_id, "path": str(target)}) if as_json else str(target))


def delete_files(server: str | None, file_ids: Sequence[str], *, as_json: bool) -> None:
    """End files."""
    with Client(server) as client:
        for file_id in file_ids:
            client.files.delete(file_id)
            if not as_json:
                say(f"{file_id} is deleted")
    if as_json:
        say(json.dumps([{"id": file_id, "deleted": True} for file_id in file_ids]))


def check_file(server: str | None, data: str, spec: Mapping[str, Any], *, as_json: bool) -> int:
    """Have data looked at, and wait for what comes of it; the exit code."""
    with Client(server) as client:
        found = data_of(data, purpose="fine-tune")
        if isinstance(found, LocalFile):
            found = client.files.upload(found.path, purpose=found.purpose, progress=Progress(found.path.name)).id
        given = {name: value for name, value in spec.items() if value is not None}
        job = client.jobs.submit("check", {**given, "data": found})
        ended = job.wait()
        shown = job.show()
    if as_json:
        say(json.dumps(shown.model_dump(mode="json")))
    elif ended.failure is None:
        _print_report(shown.result or {})
    else:
        say(ended.failure.message)
        for error in ended.failure.details.get("errors", [])[:_MOST_SHOWN]:
            place = f"row {error['row']}" if error["line"] is None else f"line {error['line']}"
            character = "" if error["character"] is None else f", character {error['character']}"
            say(f"  {place}{character}: {': '.join(part for part in (error['column'], error['reason']) if part)}")
    return 0 if ended.failure is None else EXIT_FOUND


def _print_report(result: Mapping[str, Any]) -> None:
    tokens, cut = result["report"]["tokens"], result["report"]["truncation"]
    say(f"{result['rows']} rows ({result['format']}), none wrong")
    say(
        f"tokens: {tokens['all']} in all, {tokens['training']} train; a row has {tokens['median']} (median),"
        f" {tokens['p95']} (95 %), {tokens['longest']} (longest)"
    )
    most = max((part["rows"] for part in tokens["histogram"]), default=1)
    for part in tokens["histogram"]:
        bar = "#" * -(-part["rows"] * 40 // most)
        say(f"  {part['from']:>7} to {part['to']:>7}  {part['rows']:>7}  {bar}".rstrip())
    if cut["rows"]:
        say(
            f"{cut['rows']} rows are longer than {cut['max_length']}: {cut['tokens']} tokens are lost"
            f" ({cut['strategy']}), {cut['training_tokens']} of which train"
        )
    say("which tokens train: those in [[ ]]")
    for preview in result["report"]["preview"]:
        text = "".join(f"[[{piece['text']}]]" if piece["trains"] else piece["text"] for piece in preview["pieces"])
        say("\n".join(f"  {line}" for line in text.split("\n")))


def _row(file: FileInfo) -> tuple[str, ...]:
    return (
        file.id,
        file.filename,
        file.purpose,
        f"{file.size_bytes / _MEGABYTE:.1f}",
        "" if file.num_lines is None else str(file.num_lines),
        file.status,
        minute_of(file.created_at),
        "" if file.expires_at is None else minute_of(file.expires_at),
    )


class Progress:
    """A line on a terminal that says how far it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, num_bytes: int, size_bytes: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if num_bytes >= size_bytes else ""
            text = f"\r{self._name}: {num_bytes / _MEGABYTE:.0f} of {size_bytes / _MEGABYTE:.0f} MB"
            print(text, end=end, file=sys.stderr, flush=True)
