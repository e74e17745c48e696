"""Ranks as actors of a Ray cluster: this process has no device, owns the mesh, and tells all of them what to do.

The actors and their placement group are this process's: Ray ends them when it ends. When one of them ends, or its node
does, this process ends; its successor takes a placement group of its own.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import ray
import structlog
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinkle.core.errors import ConfigError, MeshUnavailable
from twinkle.core.hub_settings import VARIABLES
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.process.answering import is_answered
from twinkle.core.process.ray_token import TOKEN_HINT
from twinkle.core.settings import Settings
from twinkle.infra.rank_end import patience_s
from twinkle.infra.ray.calls import ended_of
from twinkle.workers.ranks.commands import RankOrder
from twinkle.workers.ranks.ray_rank import Answer, Joined, RankPlace, RayRank
from twinkle.workers.ranks.world import disagreement, end_process

PLACEMENT_S = 300.0
"""How long a mesh waits for room on the cluster before its worker begins anew."""

_SAY_EVERY_S = 15.0
_ANSWERS_S = 10.0
_INLINE_BYTES = 100_000
"""Larger orders are put on each node once, not sent to each rank."""
_RESOURCES = {"cpu": None, "cuda": "GPU", "npu": "NPU", "xpu": "GPU"}
"""What Ray calls the kinds of devices."""

_PRESENCE = "presence"
"""The group of calls that do not wait for orders, nor orders for them."""

_log = structlog.get_logger()


class RayWorld:
    """See :class:`twinkle.workers.ranks.world.RankWorld`."""

    def __init__(self, settings: Settings, *, give_up: Callable[[str], NoReturn] = end_process) -> None:
        """Take room for the ranks, start them and load the base model on all. Blocks; to be called by the main thread.

        Raises:
            ConfigError: There is no cluster, or the model cannot be loaded.
            MeshUnavailable: The cluster has had no room for the ranks for a while.
        """
        self._give_up = give_up
        self._timeout_s = settings.rank_timeout_s
        self._closing = threading.Event()
        settings = settings.model_copy(update={"threads": settings.threads or max(1, int(settings.rank_cpus))})
        join_cluster(settings)
        try:
            self._room = _take_room(settings)
            _log.info("ranks.placed", ranks=settings.ranks)
            self._ranks = [self._start(settings, rank) for rank in range(settings.ranks)]
            self._presences = [rank.presence.options(concurrency_group=_PRESENCE).remote() for rank in self._ranks]
            self._places = self._ask([rank.place.remote() for rank in self._ranks])
            self.capabilities = self._join(settings)
        except BaseException:
            ray.shutdown()
            raise
        threading.Thread(target=self._watch, name="watch ranks", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes of all ranks, on whatever nodes."""
        return [place.pid for place in self._places]

    @property
    def places(self) -> list[RankPlace]:
        """Where the ranks stand, by rank."""
        return list(self._places)

    def together(self, order: RankOrder) -> Any:
        """Tell every rank, and see that all ended alike."""
        answers = self._tell(order, self._ranks)
        difference = disagreement(order.command, [answer.reply for answer in answers])
        if difference is not None:
            self._give_up(difference)
        return _outcome(answers[0])

    def first(self, order: RankOrder) -> Any:
        """Tell rank 0."""
        return _outcome(self._tell(order, self._ranks[:1])[0])

    def close(self) -> None:
        """End the ranks, give their room back, and leave the cluster."""
        self._closing.set()
        for rank in self._ranks:
            ray.kill(rank)
        remove_placement_group(self._room)
        ray.shutdown()

    def _start(self, settings: Settings, rank: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=rank)
        device = _RESOURCES[settings.device_type]
        actor = ray.remote(concurrency_groups={_PRESENCE: 1})(RayRank).options(  # type: ignore[call-overload]
            name=f"{settings.mesh} rank {rank}",
            scheduling_strategy=strategy,
            num_cpus=settings.rank_cpus,
            num_gpus=1 if device == "GPU" else 0,
            resources={device: 1} if device not in (None, "GPU") else None,
            max_restarts=0,
        )
        hubs = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        return actor.remote(settings, rank, hubs)

    def _join(self, settings: Settings) -> MeshCapabilities:
        host, port = self._places[0].host, 0
        if settings.ranks > 1:
            [port] = self._ask([self._ranks[0].open_store.remote()])
        joined: list[Joined] = self._ask([rank.join.remote(host, port) for rank in self._ranks])
        for rank, one in enumerate(joined):
            if one.refusal is not None:
                raise ConfigError(f"rank {rank} on {self._places[rank].host}: {one.refusal}")
        capabilities = joined[0].capabilities
        assert capabilities is not None
        for rank, place in enumerate(self._places):
            _log.info("rank.started", rank=rank, node=place.node, host=place.host, pid=place.pid)
        if settings.device_type == "cpu" and len({place.cpu for place in self._places}) > 1:
            _log.warning("ranks.different_processors", next="replays may differ from the first time in the last bits")
            return capabilities.model_copy(update={"determinism": "none"})
        return capabilities

    def _tell(self, order: RankOrder, ranks: list[Any]) -> list[Answer]:
        message = pickle.dumps(order)
        sent = ray.put(message) if len(message) > _INLINE_BYTES and len(ranks) > 1 else message
        return [pickle.loads(data) for data in self._ask([rank.follow.remote(sent) for rank in ranks], pickle.loads)]

    def _ask(self, calls: list[Any], read: Callable[[Any], Answer] = lambda _: Answer()) -> list[Any]:
        """What the ranks answer. The first that is lost, or has failed, is not waited for by the others."""
        pending, started_s = list(calls), time.monotonic()
        ends_at = started_s + self._timeout_s
        late = f"has not answered for {self._timeout_s:.0f} s"
        while pending:
            ended = ended_of(pending, timeout_s=max(0.0, ends_at - time.monotonic()))
            pending = [call for call in pending if call not in ended]
            if not ended:
                self._give_up(f"rank {', '.join(str(calls.index(call)) for call in pending)} {late}")
            for call in ended:
                rank = calls.index(call)
                answer = read(self._look(call, rank=rank))
                if answer.fatal is not None:
                    self._give_up(answer.fatal)
                now_s = time.monotonic()
                left_s = patience_s(now_s - started_s)
                if answer.reply.error is not None and now_s + left_s < ends_at:
                    ends_at = now_s + left_s
                    late = f"has not answered for {left_s:.0f} s after rank {rank} ended with {answer.reply.error}"
        return list(ray.get(calls))

    def _look(self, call: Any, *, rank: int) -> Any:
        try:
            return ray.get(call)
        except RayError as error:
            self._give_up(f"rank {rank} is gone: {str(error).strip().splitlines()[0]}")

    def _watch(self) -> None:
        """End this process when a rank ends while nobody asks it anything."""
        ended, _ = ray.wait(self._presences, num_returns=1)
        if self._closing.is_set():
            return
        rank = self._presences.index(ended[0])
        self._give_up(f"rank {rank} (pid {self._places[rank].pid} on {self._places[rank].host}) ended")


def join_cluster(settings: Settings) -> None:
    """Be a driver of the cluster that the settings name, else of the one this machine is a node of.

    Raises:
        ConfigError: There is none.
    """
    address = settings.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto" and not is_answered(address, timeout_s=_ANSWERS_S):
        raise _no_cluster(address, "nobody answers")  # Ray itself would try for minutes
    # Ray's own would end the process in the middle of a batch.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=address, log_to_driver=True, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise _no_cluster(address, str(error).strip().partition("\n")[0]) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _no_cluster(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"TWINKLE_RAY_ADDRESS: no Ray cluster at {address!r} ({reason}); start one with `ray start --head`, or join"
        f" this machine to one with `ray start --address=HOST:PORT`; {TOKEN_HINT}"
    )


def _take_room(settings: Settings) -> PlacementGroup:
    device = _RESOURCES[settings.device_type]
    bundle = {"CPU": settings.rank_cpus} | ({} if device is None else {device: 1.0})
    room: PlacementGroup = placement_group(
        [bundle] * settings.ranks, strategy="PACK", name=f"twinkle mesh {settings.mesh}"
    )
    ends_at = time.monotonic() + PLACEMENT_S
    while not room.wait(min(_SAY_EVERY_S, max(0.1, ends_at - time.monotonic()))):
        available: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        free = {name: amount for name, amount in available.items() if name in bundle}
        if time.monotonic() >= ends_at:
            raise MeshUnavailable(f"the cluster has no room for {settings.ranks} ranks of {bundle} each; free: {free}")
        _log.warning("ranks.wait_for_room", ranks=settings.ranks, each=bundle, free=free, next="it goes on waiting")
    return room


def _outcome(answer: Answer) -> Any:
    if answer.error is not None:
        raise answer.error
    return answer.result
