"""What a command says to the person who started it."""

from __future__ import annotations

import os
import sys


def complain(text: str) -> None:
    """Print a line beside what the command says, where no program reads it."""
    print(text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a line at once.

    Nobody may be listening any more (``twinkle serve | head``); the service goes on without a listener.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
