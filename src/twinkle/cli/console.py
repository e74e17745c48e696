"""What a command says to the person who started it."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Print a line at once.

    Nobody may be listening any more (``twinkle serve | head``); the service goes on without a listener.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
