"""The ``twinkle`` command. Heavy things are imported by the command that needs them, never by ``--help``."""

from __future__ import annotations

from twinkle.cli.app import main

__all__ = ["main"]
