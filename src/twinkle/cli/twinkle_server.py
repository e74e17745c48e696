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
from twinkle.core.errors import TwinkleError

if TYPE_CHECKING:
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
    from twinkle.core.foreign_settings import FOREIGN_SETTINGS

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


def _launcher(config: Path | None, any_key: bool) -> ServerLauncher:
    from twinkle.server.launch.cluster import running_cluster
    from twinkle.server.launch.launcher import ServerLauncher, config_from

    return ServerLauncher(config_from(None, config), any_key=any_key, cluster=running_cluster())
