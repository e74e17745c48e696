"""``twinkle files``: what the server keeps for this tenant, and whether it can be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twinkle.cli.flags import JsonFlag
from twinkle.cli.jobs.options import ServerFlag

files = typer.Typer(
    help="Files: brought to the server, looked at, brought back.", no_args_is_help=True, rich_markup_mode=None
)

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="The file's id.")]


@files.command("upload")
def files_upload(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file of this machine: .jsonl, .csv, .parquet.")],
    purpose: Annotated[str, typer.Option(help="fine-tune, batch, user_data or evals.")] = "fine-tune",
    name: Annotated[str | None, typer.Option(help="What it is called there.  [default: as here]")] = None,
    days: Annotated[int | None, typer.Option(min=1, max=30, help="How long it stays.  [default: for ever]")] = None,
    server: ServerFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Bring a file to the server. After a break the same command sends what is missing. The id is the last line.

    twinkle files upload train.jsonl
    """
    from twinkle.cli.files.calls import upload_file

    upload_file(server, path, purpose=purpose, name=name, days=days, as_json=as_json)


@files.command("list")
def files_list(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many of the newest.")] = 20,
    purpose: Annotated[str | None, typer.Option(help="Only those for this.")] = None,
    server: ServerFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List the newest files.

    twinkle files list --purpose fine-tune
    """
    from twinkle.cli.files.calls import list_files

    list_files(server, limit=limit, purpose=purpose, as_json=as_json)


@files.command("show")
def files_show(file: FileArgument, server: ServerFlag = None, as_json: JsonFlag = False) -> None:
    """Show one file, and which of its lines are no JSON.

    twinkle files show file-0b1c...
    """
    from twinkle.cli.files.calls import show_file

    show_file(server, file, as_json=as_json)


@files.command("download")
def files_download(
    file: FileArgument,
    path: Annotated[Path | None, typer.Argument(metavar="PATH", help="Where to.  [default: its name, here]")] = None,
    server: ServerFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Bring a file here. After a break the same command fetches what is missing.

    twinkle files download file-0b1c... results.jsonl
    """
    from twinkle.cli.files.calls import download_file

    download_file(server, file, path, as_json=as_json)


@files.command("delete")
def files_delete(
    file: Annotated[list[str], typer.Argument(metavar="FILE...", help="The files' ids.")],
    server: ServerFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """End files. Jobs that read them fail.

    twinkle files delete file-0b1c...
    """
    from twinkle.cli.files.calls import delete_files

    delete_files(server, file, as_json=as_json)


@files.command("check")
def files_check(
    data: Annotated[str, typer.Argument(metavar="FILE", help="A file of this machine, the id of one, or a data set.")],
    model: Annotated[str, typer.Option(help="A base model that the server serves.")],
    use: Annotated[str, typer.Option(help="supervised, preference or prompts.")] = "supervised",
    template: Annotated[str, typer.Option(help="The class that makes tokens of chats.")] = "Template",
    max_length: Annotated[int | None, typer.Option(min=2, help="In tokens.  [default: the model's]")] = None,
    truncation: Annotated[str, typer.Option(help="raise, left, right, split or delete.")] = "raise",
    server: ServerFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Name the rows that cannot be trained on, and tell how long the others are and what of them trains.

    Ends with 1 if a row is wrong. The server does it; a fine-tuning on the same data finds it done.

    twinkle files check train.jsonl --model Qwen/Qwen3.5-4B
    """
    from twinkle.cli.files.calls import check_file

    spec = {
        "model": model,
        "use": use,
        "template": template,
        "max_length": max_length,
        "truncation": truncation,
    }
    raise SystemExit(check_file(server, data, spec, as_json=as_json))
