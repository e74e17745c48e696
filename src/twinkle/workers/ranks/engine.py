"""The engine of a mesh of several ranks, as the process that holds the mesh offers it to the worker."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Self

from twinkle.core.adapter import AdapterConfig
from twinkle.core.errors import ConfigError
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.process.ray_token import take_token
from twinkle.core.settings import Settings
from twinkle.core.slices import Slices, finished
from twinkle.scheduler.token_stream import TokenPiece
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.calls import Call
from twinkle.wire.sampling import SampleRequest
from twinkle.workers.engine import Pass, PassAnswer, SampleOutput, StateCopy
from twinkle.workers.ranks.commands import (
    AddSample,
    Adopt,
    ClearGradients,
    Command,
    Compare,
    CopyState,
    Create,
    DrawnSoFar,
    DropPasses,
    DropSample,
    DropSamples,
    Export,
    Freeze,
    HasGradients,
    Load,
    LoadInto,
    MakeCall,
    MemoryHeld,
    NextSlice,
    NoteFailure,
    OptimStep,
    RankOrder,
    Restore,
    StartPasses,
    StepSamples,
    WeightsBytes,
)
from twinkle.workers.ranks.on_machine import MachineWorld
from twinkle.workers.ranks.world import RankWorld


class RankedAdapter:
    """An adapter by its handle; when nobody refers to this object, the ranks drop their copies.

    ``is_shared`` is false where only rank 0 has one, for sampling.
    """

    def __init__(self, handle: int, *, is_shared: bool) -> None:
        self.handle = handle
        self.is_shared = is_shared


class RankedEngine:
    """Every rank has the base model (whole, or its share of each layer) and every adapter.

    Training is shared out: each rank computes some datums of each operation, gradients are added up in the order of
    ranks, and each rank makes the same optimizer steps. Sampling runs on rank 0 alone where that has the model whole;
    where layers are spread, all ranks run the same sampler. An error all ranks have in common is the operation's; any
    other, and any inside a pass between ranks, ends the process.
    """

    def __init__(self, world: RankWorld, *, samples_together: bool) -> None:
        self._world = world
        self._samples_together = samples_together
        self._handles = itertools.count()
        self._under_way: set[str] = set()
        self._numbers = itertools.count()
        # Filled by the garbage collector, in whichever thread that runs.
        self._unreferenced: deque[int] = deque()
        self._to_release: list[int] = []

    @classmethod
    def start(cls, settings: Settings) -> Self:
        """Start the ranks and load the base model on all. Blocks; to be called by the main thread.

        Raises:
            ConfigError: There are fewer devices than ranks, no cluster, or the model cannot be loaded.
            MeshUnavailable: A cluster has had no room for the ranks for a while.
        """
        world = _on_cluster(settings) if settings.ranks_on == "ray" else MachineWorld(settings)
        return cls(world, samples_together=settings.shard == "fsdp")

    @property
    def follower_pids(self) -> list[int]:
        """The processes of the ranks that are not this one."""
        return self._world.pids

    @property
    def capabilities(self) -> MeshCapabilities:
        """What clients may ask of it."""
        return self._world.capabilities

    def memory_held(self) -> dict[str, int]:
        """On rank 0; the others hold no more."""
        held: dict[str, int] = self._first(MemoryHeld())
        return held

    # -- training -----------------------------------------------------------------------------------------------------

    def create(self, config: AdapterConfig) -> RankedAdapter:
        """A fresh trainable adapter on every rank."""
        handle = next(self._handles)
        self._together(Create(handle, config))
        return self._adapter(handle)

    def run_passes(self, passes: Sequence[Pass[RankedAdapter]]) -> list[PassAnswer]:
        """Share out all passes; see :class:`twinkle.workers.engine.Engine`."""
        return finished(self.start_passes(passes))

    def start_passes(self, passes: Sequence[Pass[RankedAdapter]]) -> Slices[list[PassAnswer]]:
        """The same slice by slice, as many on every rank."""
        number = next(self._numbers)
        answers: list[PassAnswer] | None = self._together(
            StartPasses(
                number, tuple((item.state.handle, item.body, item.cache_group, item.is_again) for item in passes)
            )
        )
        while answers is None:
            try:
                yield
            except GeneratorExit:
                self._together(DropPasses(number))
                raise
            answers = self._together(NextSlice(number))
        return answers

    def optim_step(self, state: RankedAdapter, params: AdamParams) -> dict[str, float]:
        """The same step on every rank."""
        metrics: dict[str, float] = self._together(OptimStep(state.handle, params))
        return metrics

    def has_gradients(self, state: RankedAdapter) -> bool:
        """Whether gradients have been accumulated since the last step."""
        return bool(self._first(HasGradients(state.handle)))

    def clear_gradients(self, state: RankedAdapter) -> None:
        """Forget the accumulated gradients on every rank."""
        self._together(ClearGradients(state.handle))

    def call(self, state: RankedAdapter, call: Call) -> bytes:
        """The same call on every rank; rank 0's answer."""
        body: bytes = self._together(MakeCall(state.handle, call))
        return body

    def note_failure(self, state: RankedAdapter) -> None:
        """Let every rank know."""
        self._together(NoteFailure(state.handle))

    def adopt(self, state: RankedAdapter, config: AdapterConfig) -> RankedAdapter:
        """The start of another run, on every rank."""
        handle = next(self._handles)
        self._together(Adopt(handle, state.handle, config))
        return self._adapter(handle)

    # -- files --------------------------------------------------------------------------------------------------------

    def export(self, state: RankedAdapter, *, with_optimizer: bool) -> dict[str, bytes]:
        """Rank 0's copy as PEFT files, once all ranks have shown that theirs is the same."""
        self._compare(state)
        files: dict[str, bytes] = self._first(Export(state.handle, with_optimizer))
        return files

    def load(
        self, config: AdapterConfig, files: dict[str, bytes], *, with_optimizer: bool, trainable: bool
    ) -> RankedAdapter:
        """An adapter from files; on rank 0 alone if it is for sampling and only rank 0 samples."""
        command = Load(next(self._handles), config, files, with_optimizer, trainable)
        is_shared = trainable or self._samples_together
        if is_shared:
            self._together(command)
        else:
            self._first(command)
        return self._adapter(command.handle, is_shared=is_shared)

    def load_into(self, state: RankedAdapter, files: dict[str, bytes], call: Call) -> tuple[RankedAdapter, bytes]:
        """The adapter with a checkpoint in it, on every rank."""
        handle = next(self._handles)
        body: bytes = self._together(LoadInto(handle, state.handle, files, call))
        return self._adapter(handle), body

    def freeze(self, state: RankedAdapter) -> RankedAdapter:
        """A copy of the weights on every rank that samples."""
        command = Freeze(next(self._handles), state.handle)
        self._sampling(command)
        return self._adapter(command.handle, is_shared=self._samples_together)

    def weights_bytes(self, state: RankedAdapter) -> int:
        """What they take up on one rank."""
        return int(self._first(WeightsBytes(state.handle)))

    def snapshot(self, state: RankedAdapter) -> bytes:
        """See ``copy_state``."""
        return self.copy_state(state).data()

    def copy_state(self, state: RankedAdapter) -> StateCopy:
        """Rank 0's copy, once all ranks have shown that theirs is the same; anybody may write it meanwhile."""
        self._compare(state)
        copy: StateCopy = self._first(CopyState(state.handle))
        return copy

    def restore(self, data: bytes) -> RankedAdapter:
        """What ``snapshot`` wrote, on every rank."""
        handle = next(self._handles)
        self._together(Restore(handle, data))
        return self._adapter(handle)

    # -- sampling -----------------------------------------------------------------------------------------------------

    def add_sample(
        self, request_id: str, state: RankedAdapter | None, request: SampleRequest, *, cache_group: str
    ) -> None:
        """Queue a sample where samples run."""
        self._sampling(AddSample(request_id, None if state is None else state.handle, request, cache_group))
        self._under_way.add(request_id)

    def step_samples(self) -> list[SampleOutput]:
        """Advance all queued samples by one device step; those that ended."""
        outputs: list[SampleOutput] = self._sampling(StepSamples())
        self._under_way.difference_update(output.request_id for output in outputs)
        return outputs

    def drawn_so_far(self, request_id: str, known: Sequence[int]) -> list[TokenPiece]:
        """What rank 0 has drawn; all that sample have the same."""
        pieces: list[TokenPiece] = self._first(DrawnSoFar(request_id, known))
        return pieces

    @property
    def num_samples_under_way(self) -> int:
        """Samples added and not yet returned."""
        return len(self._under_way)

    def drop_sample(self, request_id: str) -> None:
        """Forget a sample."""
        self._sampling(DropSample(request_id))
        self._under_way.discard(request_id)

    def drop_samples(self) -> None:
        """Forget every sample under way."""
        self._sampling(DropSamples())
        self._under_way.clear()

    # -- ranks --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the ranks."""
        self._world.close()

    def _together(self, command: Command) -> Any:
        order = self._order(command)
        self._to_release.clear()
        return self._world.together(order)

    def _first(self, command: Command) -> Any:
        # What is released is told to the others when they are next told anything.
        return self._world.first(self._order(command))

    def _sampling(self, command: Command) -> Any:
        return self._together(command) if self._samples_together else self._first(command)

    def _compare(self, state: RankedAdapter) -> None:
        if state.is_shared:
            self._together(Compare(state.handle))

    def _order(self, command: Command) -> RankOrder:
        """A command, and the adapters that nobody refers to here."""
        while self._unreferenced:
            self._to_release.append(self._unreferenced.popleft())
        return RankOrder(command=command, released=tuple(self._to_release))

    def _adapter(self, handle: int, *, is_shared: bool = True) -> RankedAdapter:
        adapter = RankedAdapter(handle, is_shared=is_shared)
        weakref.finalize(adapter, self._unreferenced.append, handle)
        return adapter


def _on_cluster(settings: Settings) -> RankWorld:
    if find_spec("ray") is None:
        raise ConfigError("TWINKLE_RANKS: ranks on Ray need Ray; install twinkle-queue[ray] here and on its nodes")
    take_token(settings.ray_address or os.environ.get("RAY_ADDRESS"))
    from twinkle.workers.ranks.on_ray import RayWorld  # noqa: PLC0415 - an extra, and slow to import

    return RayWorld(settings)
