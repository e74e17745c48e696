"""Losses, whose names are sent to a server: the library's, for scripts that change their import paths only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle_client.same_names import attributes_of

if TYPE_CHECKING:
    from twinkle.loss import *  # noqa: F403

__getattr__ = attributes_of("twinkle.loss")
