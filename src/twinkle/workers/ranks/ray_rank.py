"""One rank as an actor of a Ray cluster, on whatever node its bundle lies."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
import structlog
from ray.util import get_node_ip_address

from twinkle.core.errors import ConfigError, TwinkleError
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.process.logs import configure_logging
from twinkle.core.settings import Settings
from twinkle.infra.platform import Platform
from twinkle.infra.process_group import find_store, join_store, open_store
from twinkle.infra.rank_group import ALONE, RankGroup
from twinkle.workers.engines.threads import kind_of_cpu
from twinkle.workers.engines.transformers_engine import TransformersEngine
from twinkle.workers.ranks.commands import Member, RankOrder, Reply, execute

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank stands."""

    node: str
    host: str
    pid: int
    cpu: str


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What a rank says once it has its base model, or why it has none."""

    capabilities: MeshCapabilities | None
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank says about an order. ``fatal`` is why the ranks are out of step; the rest is rank 0's."""

    reply: Reply = field(default_factory=Reply)
    result: Any = None
    error: Exception | None = None
    fatal: str | None = None


class RayRank:
    """Does what its mesh's owner tells it, one order after the other.

    Args:
        settings: Of the mesh.
        rank: Which of its ranks this is.
        hubs: What its owner's environment says of hubs; that of the node says nothing of them.
    """

    def __init__(self, settings: Settings, rank: int, hubs: Mapping[str, str]) -> None:
        os.environ.update(hubs)
        configure_logging(settings.log_level, settings.log_json)
        structlog.contextvars.bind_contextvars(mesh=settings.mesh, rank=rank)
        self._settings = settings
        self._rank = rank
        self._member: Member | None = None

    def place(self) -> RankPlace:
        """Where this rank stands."""
        return RankPlace(
            node=ray.get_runtime_context().get_node_id(),
            host=_own_host(),
            pid=os.getpid(),
            cpu=kind_of_cpu(),
        )

    def open_store(self) -> int:
        """Keep the place where all ranks meet; the port under which they find it at this rank's host."""
        self._store, port = open_store(
            size=self._settings.ranks, timeout_s=self._settings.rank_timeout_s, host=_own_host()
        )
        return port

    def join(self, host: str, port: int) -> Joined:
        """Meet the others and load the base model. Blocks until all have done so."""
        try:
            engine = TransformersEngine.from_settings(self._settings, self._ranks(host, port))
        except ConfigError as error:
            return Joined(capabilities=None, refusal=error.message)
        self._member = Member(engine, {})
        return Joined(capabilities=engine.capabilities)

    def follow(self, message: bytes) -> bytes:
        """Do what an order says; the answer."""
        assert self._member is not None, "orders follow join()"
        order = pickle.loads(message)
        assert isinstance(order, RankOrder)
        self._member.release(order.released)
        try:
            result, error, reply = execute(order.command, self._member)
        except Exception as failure:  # noqa: BLE001 - whatever it was, the ranks are out of step
            _log.exception("rank.failed", command=type(order.command).__name__)
            return pickle.dumps(Answer(fatal=f"{type(order.command).__name__} failed on rank {self._rank}: {failure}"))
        return _packed(Answer(reply=reply, result=result, error=error) if self._rank == 0 else Answer(reply=reply))

    def presence(self) -> None:
        """Never ends while this rank lives."""
        threading.Event().wait()

    def _ranks(self, host: str, port: int) -> RankGroup:
        settings = self._settings
        if settings.ranks == 1:
            return ALONE
        timeout_s = settings.rank_timeout_s
        if self._rank != 0:
            self._store = find_store(port, size=settings.ranks, timeout_s=timeout_s, host=host)
        return join_store(
            Platform.named(settings.device),
            self._store,
            rank=self._rank,
            size=settings.ranks,
            timeout_s=timeout_s,
            interface=_interface_of(_own_host()),
            device_number=0,  # Ray shows an actor its own devices only.
        )


def _own_host() -> str:
    """The address under which this node is known to its cluster."""
    return str(get_node_ip_address())  # type: ignore[no-untyped-call]


def _interface_of(host: str) -> str | None:
    """The network of this machine that has an address; none for one that is translated on the way."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host and address.family == socket.AF_INET for address in addresses):
            return str(name)
    return "lo" if host.startswith("127.") else None


def _packed(answer: Answer) -> bytes:
    """The answer as it travels: an error that does not is replaced by what it said."""
    try:
        data = pickle.dumps(answer)
        if answer.error is not None or isinstance(answer.result, list):
            pickle.loads(data)
    except Exception as reason:  # noqa: BLE001 - the border: foreign errors pickle as they like
        _log.warning("rank.error_replaced", reason=str(reason))
        result = [_plain(one) for one in answer.result] if isinstance(answer.result, list) else answer.result
        return pickle.dumps(Answer(reply=answer.reply, result=result, error=_plain(answer.error)))
    return data


def _plain(value: Any) -> Any:
    if not isinstance(value, Exception) or isinstance(value, TwinkleError):
        return value
    return RuntimeError(f"{type(value).__name__}: {value}")
