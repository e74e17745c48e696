"""``launch_server``: the service of a ``server_config.yaml``, until it is told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from twinkle.core.errors import ConfigError
from twinkle.core.process.foreign_settings import FOREIGN_SETTINGS
from twinkle.server.launch.cluster import Cluster, running_cluster
from twinkle.server.launch.mapping import plan_of
from twinkle.server.launch.plan import Plan
from twinkle.server.launch.schema import ServerConfig, parse_config, read_config

CONFIG_VARIABLE = "TWINKLE_SERVER_CONFIG"
_SHOWN = ("changed", "meaningless")


class ServerLauncher:
    """Starts ``twinkle serve`` as a file says."""

    def __init__(
        self, config: ServerConfig | Mapping[str, Any], *, any_key: bool = False, cluster: Cluster | None = None
    ) -> None:
        """Read what is to be started; nothing is.

        Args:
            config: What a file holds.
            cluster: The Ray cluster whose nodes are to have the devices; none: this machine.
            any_key: Take any key, each for a tenant of its own: to try things, on this machine only.

        Raises:
            ConfigError: The file holds what it may not.
        """
        self.plan = plan_of(config if isinstance(config, ServerConfig) else parse_config(config), cluster=cluster)
        self._any_key = any_key

    @property
    def command(self) -> list[str]:
        """What is run."""
        flags = [word for mesh in self.plan.meshes for word in ("--mesh", mesh)]
        return [sys.executable, "-m", "twinkle.cli", "serve", *flags, *(["--any-key"] if self._any_key else [])]

    @property
    def environment(self) -> dict[str, str]:
        """What it is run with. Variables that are set already win over the file, as everywhere."""
        return {**self.plan.settings, **os.environ}

    def launch(self) -> int:
        """Serve until SIGTERM or Ctrl-C; the exit code."""
        for line in told(self.plan):
            print(line, flush=True)
        process = subprocess.Popen(self.command, env=self.environment)

        def pass_on(number: int, _: FrameType | None) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch_server(
    config: Mapping[str, Any] | None = None, config_path: str | Path | None = None, *, any_key: bool = False
) -> None:
    """Serve what a ``server_config.yaml`` describes, until SIGTERM or Ctrl-C. Blocks.

    Where a Ray cluster runs (``RAY_ADDRESS``, or `ray start` on this machine), the ranks of all meshes are its actors.

    Args:
        config: What the file would hold.
        config_path: The file; by default the one that ``TWINKLE_SERVER_CONFIG`` names.
        any_key: Take any key, each for a tenant of its own: to try things, on this machine only.

    Raises:
        ConfigError: There is neither or both, or the file holds what it may not.
        SystemExit: The service ended with an error; with its code.
    """
    code = ServerLauncher(
        config_from(config, config_path), any_key=any_key, cluster=running_cluster(os.environ)
    ).launch()
    if code:
        raise SystemExit(code)


def config_from(config: Mapping[str, Any] | None, config_path: str | Path | None) -> ServerConfig:
    """What is to be served: what is given, or what the file holds.

    Raises:
        ConfigError: There is neither or both, or it holds what it may not.
    """
    path = config_path or (None if config is not None else os.environ.get(CONFIG_VARIABLE))
    if (config is None) == (path is None):
        raise ConfigError(f"config_path: name a server_config.yaml, here or in {CONFIG_VARIABLE}, or give a config")
    return parse_config(config) if config is not None else read_config(Path(str(path)))


def told(plan: Plan) -> list[str]:
    """What whoever starts it should know: what is taken otherwise than the file says, and what not at all."""
    lines = [f"{one.key}: {one.note}" for one in plan.findings if one.fate == "changed"]
    unused = [one.key for one in plan.findings if one.fate == "meaningless"]
    if unused:
        lines.append(f"{len(unused)} keys mean nothing here; `twinkle-server check-config` says which and why")
    lines += [
        f"{name}: {why}" for name, why in FOREIGN_SETTINGS.items() if name in os.environ and name != CONFIG_VARIABLE
    ]
    return lines
