"""The ``twinkle`` command, and the arguments of training scripts (``CLI.from_args()``).

Heavy things are imported by the command that needs them, never by ``--help``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.cli.app import main
    from twinkle.cli.arguments.script import CLI, Args

__all__ = ["CLI", "Args", "main"]

__getattr__ = lazy_attributes(
    __name__,
    {"CLI": "twinkle.cli.arguments.script", "Args": "twinkle.cli.arguments.script", "main": "twinkle.cli.app"},
)
