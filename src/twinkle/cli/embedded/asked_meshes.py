"""Meshes that come and go while the embedded stack runs: their workers are started and stopped as the journal says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from twinkle.cli.console import say
from twinkle.cli.embedded.replicas import Replicas
from twinkle.cli.embedded.stack import MeshPlan, parse_meshes
from twinkle.cli.embedded.supervisor import Child
from twinkle.core.errors import ConfigError, TwinkleError
from twinkle.core.settings import Settings
from twinkle.storage.journal.meshes import Meshes, MeshStatus
from twinkle.storage.journal.moves import GIVEN_BACK, Moves

_LOOK_EVERY_S = 1.0


class AskedMeshes:
    """The workers of meshes that are asked for, beside those that the stack was started with."""

    def __init__(
        self,
        settings: Settings,
        meshes: Meshes,
        moves: Moves,
        *,
        replicas: Replicas,
        started: Mapping[str, Child],
        make_child: Callable[[MeshPlan], Child],
    ) -> None:
        """Take the workers that run already, by mesh; start nothing."""
        self._settings = settings
        self._meshes = meshes
        self._moves = moves
        self._replicas = replicas
        self._make_child = make_child
        self._unreadable: set[str] = set()
        self.workers = dict(started)

    async def follow(self, hurry: asyncio.Event) -> None:
        """Look every second, until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self._replicas.look)
                for mesh in await asyncio.to_thread(self._meshes.all):
                    await self._heed(mesh, hurry)
            except TwinkleError as error:
                say(f"the journal did not say which meshes are asked for: {error.message}; asked again")
            except OSError as error:
                say(f"no process can be started for a mesh that is asked for: {error}; tried again")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _heed(self, mesh: MeshStatus, hurry: asyncio.Event) -> None:
        if mesh.asked_for == GIVEN_BACK and mesh.name in self.workers:
            if await asyncio.to_thread(self._moves.is_empty, mesh.name):
                say(f"mesh {mesh.name} is empty and was given back: its worker stops")
                await self.workers.pop(mesh.name).stop(hurry)
        elif mesh.asked_for and mesh.name not in self.workers and mesh.asked_for not in self._unreadable:
            try:
                [plan] = parse_meshes([mesh.asked_for], self._settings)
            except ConfigError as error:
                self._unreadable.add(mesh.asked_for)
                say(f"mesh {mesh.name} is asked for, but {error.message}")
                return
            say(f"mesh {mesh.name} is asked for: its worker starts")
            child = self._make_child(plan)
            await child.start()
            self.workers[mesh.name] = child
