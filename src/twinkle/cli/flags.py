"""What several commands have in common: flags, and the settings that they override."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from twinkle.core.settings import Settings

HomeFlag = Annotated[Path | None, typer.Option(help="Folder of the embedded stack.  [default: .twinkle]")]
ModelFlag = Annotated[str | None, typer.Option(help="Path or id of the frozen base model.")]
ModelNameFlag = Annotated[str | None, typer.Option(help="The name clients use for it.  [default: as in --model]")]
EngineFlag = Annotated[str | None, typer.Option(help="transformers, megatron, or null (computes nothing).")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
AtFlag = Annotated[
    int | None, typer.Option(metavar="STEP", min=0, help="After this step of the optimizer; 0: its start.")
]
AtOperationFlag = Annotated[int | None, typer.Option(min=0, help="Or after the operation of this number.")]
WaitFlag = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the mesh.")]
LimitFlag = Annotated[str | None, typer.Option(metavar="N", help="0 is no limit; `default` is the settings'.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]


def settings_of(**flags: object) -> Settings:
    """The process's settings, with logging set up by them."""
    from twinkle.core.process.logs import configure_logging
    from twinkle.core.settings import load_settings

    settings = load_settings(**flags)
    configure_logging(settings.log_level, settings.log_json)
    return settings


def settings_of_service(**flags: object) -> Settings:
    """The same for a process of the service: what it writes, the embedded home too, is for its owner's eyes only."""
    from twinkle.cli.embedded.home import keep_private

    keep_private()
    return settings_of(**flags)
