"""Meshes that follow load: asked for while too much waits for those of their kind, given back when little does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from twinkle.cli.console import say
from twinkle.cli.embedded.stack import MeshPlan, flag_of, replica_name
from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.settings import Settings
from twinkle.scheduler.replicas import ReplicaRule, ReplicaWatch, even_out
from twinkle.storage.journal.meshes import MeshCensus, Meshes
from twinkle.storage.journal.moves import GIVEN_BACK, Moves


@dataclass
class _Kind:
    """Meshes that are alike but for their name."""

    plan: MeshPlan
    watch: ReplicaWatch
    settled: set[str] | None = None
    """Those that live and have had work, or did at the first look; ``None`` before that."""
    names: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = re.compile(rf"{re.escape(self.plan.name)}(-\d+)?")

    def number_of(self, mesh: str) -> int:
        """Which of them a mesh is: 1 for the one of the plan's own name."""
        return int(mesh.removeprefix(self.plan.name).removeprefix("-") or 1)

    def counts(self, mesh: MeshCensus) -> bool:
        """Whether it is to stay: it has a worker or is to have one."""
        is_to_be = mesh.alive or bool(mesh.asked_for) or self.number_of(mesh.name) <= self.watch.rule.least
        return is_to_be and not mesh.is_draining


class Replicas:
    """Looks now and then how much waits, and says in the journal which meshes are to be. Whoever reads that acts."""

    def __init__(
        self, settings: Settings, plans: Sequence[MeshPlan], meshes: Meshes, moves: Moves, clock: Clock
    ) -> None:
        """Watch those of the plans that say between how many meshes; nothing is read or written yet."""
        self._meshes = meshes
        self._moves = moves
        self._clock = clock
        self._kinds = [
            _Kind(
                plan,
                ReplicaWatch(
                    ReplicaRule(
                        least=plan.replicas[0],
                        most=plan.replicas[1],
                        operations_each=settings.replica_operations,
                        grow_after_s=settings.replica_grow_s,
                        shrink_after_s=settings.replica_shrink_s,
                    )
                ),
            )
            for plan in plans
            if plan.replicas is not None
        ]

    def look(self) -> None:
        """Look once. Raises as the journal does."""
        if not self._kinds:
            return
        census = self._meshes.census()
        for kind in self._kinds:
            self._tend(kind, [mesh for mesh in census if kind.names.fullmatch(mesh.name)])

    def _tend(self, kind: _Kind, meshes: list[MeshCensus]) -> None:
        staying = sorted((mesh for mesh in meshes if kind.counts(mesh)), key=lambda mesh: kind.number_of(mesh.name))
        wanted = kind.watch.number(
            num_open=sum(mesh.num_queued + mesh.num_running for mesh in meshes),
            num_busy=sum(mesh.num_busy for mesh in meshes),
            num_meshes=len(staying),
            now_s=self._clock.monotonic(),
        )
        if wanted > len(staying):
            self._grow(kind, {mesh.name for mesh in staying}, wanted)
        for mesh in staying[wanted:]:
            say(f"mesh {mesh.name} is given back: little waits for meshes like {kind.plan.name}")
            self._moves.drain(mesh.name)
            self._moves.give_back(mesh.name)
        self._share_with_new(kind, staying[:wanted])
        for mesh in meshes:
            if mesh.is_draining and not mesh.alive and mesh.asked_for == GIVEN_BACK:
                self._forget(mesh.name)

    def _grow(self, kind: _Kind, names: set[str], wanted: int) -> None:
        numbers = (number for number in range(1, kind.watch.rule.most + 1))
        free = [name for name in (replica_name(kind.plan.name, number) for number in numbers) if name not in names]
        for name in free[: wanted - len(names)]:
            say(f"mesh {name} is to be: much waits for meshes like {kind.plan.name}")
            self._moves.ask_for(name, flag_of(replace(kind.plan, name=name, replicas=None)))

    def _share_with_new(self, kind: _Kind, meshes: list[MeshCensus]) -> None:
        """Give a mesh that has come to life its part of what is under way on the others, as soon as there is some."""
        # Between taking its lease and saying what it can do, a mesh is alive and may be given nothing.
        alive = {mesh.name for mesh in meshes if mesh.alive and mesh.base_model is not None}
        settled = alive if kind.settled is None else kind.settled & alive
        if alive != settled:
            busy = {name: self._moves.busy(name) for name in alive}
            for lane, mesh in even_out(busy):
                try:
                    self._moves.begin(lane, mesh)
                except (NotFound, InvalidInput, Conflict) as error:
                    say(f"{lane} stays where it is: {error.message}")
                else:
                    busy[mesh].append(lane)
            settled |= {name for name in alive if busy[name]}
        kind.settled = settled

    def _forget(self, mesh: str) -> None:
        try:
            self._moves.remove(mesh)
        except Conflict:
            return  # Something is on its way still; the next look sees.
        say(f"mesh {mesh} is gone")
