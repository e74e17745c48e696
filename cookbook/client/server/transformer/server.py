"""Serve what `server_config.yaml` describes, until Ctrl-C. With TWINKLE_ANY_KEY=1 clients need no key of it."""

from pathlib import Path

from twinkle.server import launch_server

launch_server(config_path=Path(__file__).with_name("server_config.yaml"))
