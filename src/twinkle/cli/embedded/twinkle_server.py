"""``twinkle-server``: the service from a ``server_config.yaml``, and what becomes of each of its keys."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinkle.cli.exit_codes import EXIT_ERROR
from twinkle.cli.table import print_table
from twinkle.core.errors import InvalidInput, TwinkleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinkle.server.launch.launcher import ServerLauncher

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The Twinkle service from a server_config.yaml. `twinkle` has everything else.",
)

ConfigFlag = Annotated[
    Path | None, typer.Option("-c", "--config", help="The YAML file.  [default: TWINKLE_SERVER_CONFIG]")
]
AnyKeyFlag = Annotated[
    bool, typer.Option("--any-key", help="Take any key, each for a tenant of its own; on this machine only.")
]


def main() -> None:
    """Run the command line. Our own errors become one line and an exit code."""
    try:
        app()
    except TwinkleError as error:
        print(f"twinkle-server: {error.message}", file=sys.stderr)
        raise SystemExit(EXIT_ERROR) from None


@app.command()
def launch(config: ConfigFlag = None, any_key: AnyKeyFlag = False) -> None:
    """Serve until Ctrl-C.

    twinkle-server launch -c server_config.yaml
    """
    raise SystemExit(_launcher(config, any_key).launch())


@app.command("check-config")
def check_config(
    config: ConfigFlag = None, as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False
) -> None:
    """Say key by key what is used, mapped on a setting of ours, taken otherwise, or meaningless here, and why.

    twinkle-server check-config -c server_config.yaml
    """
    from twinkle.core.process.foreign_settings import FOREIGN_SETTINGS

    plan = _launcher(config, False).plan
    rows = [(one.fate, one.key, one.note) for one in plan.findings]
    rows += [("meaningless", name, why) for name, why in FOREIGN_SETTINGS.items() if name in os.environ]
    if as_json:
        print(json.dumps([{"fate": fate, "key": key, "note": note} for fate, key, note in rows], indent=2))
    else:
        print_table(("fate", "key", "what becomes of it"), rows)


@app.command("print-config")
def print_config(config: ConfigFlag = None, any_key: AnyKeyFlag = False) -> None:
    """Print the settings and the command that it comes to.

    twinkle-server print-config -c server_config.yaml
    """
    launcher = _launcher(config, any_key)
    for name, value in sorted(launcher.plan.settings.items()):
        print(f"{name}={shlex.quote(os.environ.get(name, value))}")
    print(shlex.join(["twinkle", *launcher.command[3:]]))


@app.command()
def clear(what: Annotated[str, typer.Argument(metavar="persistence")], config: ConfigFlag = None) -> None:
    """Say where records are kept, and how to begin anew. Nothing is deleted: what was accepted is never lost.

    twinkle-server clear persistence -c server_config.yaml
    """
    if what != "persistence":
        raise InvalidInput("clear", f"knows persistence alone, not {what!r}")
    raise InvalidInput("persistence", _why_not_cleared({**_configured(config), **os.environ}))


def _configured(config: Path | None) -> dict[str, str]:
    from twinkle.server.launch.launcher import CONFIG_VARIABLE

    is_given = config is not None or CONFIG_VARIABLE in os.environ
    return _launcher(config, False).plan.settings if is_given else {}


def _why_not_cleared(settings: Mapping[str, str]) -> str:
    from twinkle.core.settings import load_settings

    home = load_settings(home=settings.get("TWINKLE_HOME")).home.absolute()
    elsewhere = [name for name in ("TWINKLE_DATABASE_URL", "TWINKLE_OBJECT_STORE") if settings.get(name)]
    places = " and ".join([str(home), *(f"what {name} names" for name in elsewhere)])
    changed = " and ".join(["TWINKLE_HOME", *elsewhere])
    return (
        f"nothing was deleted. Records are the runs, checkpoints and accepted operations of all tenants, in {places};"
        " no command deletes them, since what was accepted is never lost. To begin anew, start the service with another"
        f" {changed}; to be rid of the old ones, delete them by hand while it is stopped. Tenants delete their own"
        " checkpoints and files, and `twinkle vacuum` gives what the database no longer needs back to the disk"
    )


def _launcher(config: Path | None, any_key: bool) -> ServerLauncher:
    from twinkle.server.launch.cluster import running_cluster
    from twinkle.server.launch.launcher import ServerLauncher, config_from

    return ServerLauncher(config_from(None, config), any_key=any_key, cluster=running_cluster())
