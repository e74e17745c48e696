"""Where lines of JSON were looked at before; see :mod:`twinkle.wire.jsonl`."""

from twinkle.wire.jsonl import *  # noqa: F403
