"""The API over HTTP, and ``launch_server``, which starts the whole service from a ``server_config.yaml``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.server.launch.launcher import ServerLauncher, launch_server
    from twinkle.server.launch.schema import ServerConfig

__all__ = ["ServerConfig", "ServerLauncher", "launch_server"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "ServerConfig": "twinkle.server.launch.schema",
        "ServerLauncher": "twinkle.server.launch.launcher",
        "launch_server": "twinkle.server.launch.launcher",
    },
)
