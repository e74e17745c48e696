"""Ranks on one machine: this process is rank 0, the others are its children behind pipes."""

from __future__ import annotations

from typing import Any

from twinkle.core.errors import ConfigError
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.settings import Settings
from twinkle.infra.platform import Platform
from twinkle.infra.process_group import leave_world
from twinkle.workers.engines.transformers_engine import TransformersEngine
from twinkle.workers.ranks.commands import Member, RankOrder, execute
from twinkle.workers.ranks.followers import Followers
from twinkle.workers.ranks.world import disagreement


class MachineWorld:
    """See :class:`twinkle.workers.ranks.world.RankWorld`."""

    def __init__(self, settings: Settings) -> None:
        """Start the other ranks and load the base model on all. Blocks; to be called by the main thread.

        Raises:
            ConfigError: There are fewer devices than ranks, or the model cannot be loaded.
        """
        num_devices = Platform.named(settings.device).num_devices()
        if settings.device != "cpu" and num_devices < settings.ranks:
            raise ConfigError(f"TWINKLE_RANKS: {settings.ranks} ranks need as many devices, there are {num_devices}")
        self._followers = Followers(settings)
        try:
            engine = TransformersEngine.from_settings(settings, self._followers.meet())
        except BaseException:
            self.close()
            raise
        self._member = Member(engine, {})

    @property
    def capabilities(self) -> MeshCapabilities:
        """What the engine says of itself."""
        return self._member.engine.capabilities

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return self._followers.pids

    def together(self, order: RankOrder) -> Any:
        """Tell the others, do it here, and see that they ended as this rank did."""
        self._followers.send(order)
        self._member.release(order.released)
        try:
            result, error, reply = execute(order.command, self._member)
        except Exception as failure:  # noqa: BLE001 - whatever it was, the ranks are out of step
            self._followers.give_up(f"{type(order.command).__name__} failed on rank 0: {failure}")
        if reply.error is not None:
            self._followers.hasten(0, reply.error)
        difference = disagreement(order.command, [reply, *self._followers.replies()])
        if difference is not None:
            self._followers.give_up(difference)
        if error is not None:
            raise error
        return result

    def first(self, order: RankOrder) -> Any:
        """Do it here."""
        self._member.release(order.released)
        return order.command.run(self._member)

    def close(self) -> None:
        """End the other ranks."""
        self._followers.close()
        leave_world()
