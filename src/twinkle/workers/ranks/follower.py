"""The process of one rank but the first: does what rank 0 tells it, and ends with it.

``python -m twinkle.workers.ranks.follower FD``, with a channel to rank 0 behind the file descriptor.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

import structlog

from twinkle.core.errors import ConfigError
from twinkle.core.process.logs import configure_logging
from twinkle.core.process.parent_death import dies_with
from twinkle.core.settings import Settings
from twinkle.infra.platform import Platform
from twinkle.infra.process_group import find_store, join_store, leave_world
from twinkle.infra.rank_group import RankGroup
from twinkle.workers.engines.transformers_engine import TransformersEngine
from twinkle.workers.ranks.commands import Member, RankOrder, execute
from twinkle.workers.ranks.followers import Welcome

_log = structlog.get_logger()

_REFUSAL_S = 10.0
"""How long rank 0 may need to find out what is wrong with the settings."""


def main(descriptor: int) -> None:
    """Follow until rank 0 closes the channel, or is gone."""
    bind_to_parent = dies_with(os.getppid())
    if bind_to_parent is not None:
        bind_to_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for rank 0, which finishes its batch and then lets us go
    channel = Connection(descriptor)
    try:
        _follow(channel)
    except (EOFError, ConnectionError):
        leave_world()


def _follow(channel: Connection) -> None:
    welcome = channel.recv()
    assert isinstance(welcome, Welcome)
    settings = welcome.settings
    configure_logging(settings.log_level, settings.log_json)
    structlog.contextvars.bind_contextvars(rank=welcome.rank)
    timeout_s = settings.rank_timeout_s
    store = find_store(welcome.port, size=settings.ranks, timeout_s=timeout_s)
    platform = Platform.named(settings.device)
    ranks = join_store(platform, store, rank=welcome.rank, size=settings.ranks, timeout_s=timeout_s)
    member = Member(_engine(settings, ranks, channel), {})
    while True:
        order = channel.recv()
        assert isinstance(order, RankOrder)
        member.release(order.released)
        _, _, reply = execute(order.command, member)
        channel.send(reply)


def _engine(settings: Settings, ranks: RankGroup, channel: Connection) -> TransformersEngine:
    try:
        return TransformersEngine.from_settings(settings, ranks)
    except ConfigError as error:
        # Rank 0 finds the same and refuses; ending before it does would look like a crash.
        _log.error("rank.refused", reason=error.message)
        channel.poll(_REFUSAL_S)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(int(sys.argv[1]))
