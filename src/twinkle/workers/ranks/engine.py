"""The engine of a mesh of several ranks, as its rank 0 offers it to the worker."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

from twinkle.core.adapter import AdapterConfig
from twinkle.core.errors import ConfigError
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.settings import Settings
from twinkle.infra.platform import Platform
from twinkle.infra.process_group import leave_world
from twinkle.scheduler.token_stream import TokenPiece
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.calls import Call
from twinkle.wire.sampling import SampleRequest
from twinkle.workers.engine import Pass, PassAnswer, SampleOutput
from twinkle.workers.ranks.commands import (
    AddSample,
    Adopt,
    ClearGradients,
    Command,
    Compare,
    Create,
    DropSample,
    DropSamples,
    Freeze,
    Load,
    LoadInto,
    MakeCall,
    Member,
    NoteFailure,
    OptimStep,
    Restore,
    RunPasses,
    StepSamples,
    execute,
)
from twinkle.workers.ranks.followers import Followers, Order
from twinkle.workers.transformers_engine import Trained, TransformersEngine


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

    def __init__(self, member: Member, followers: Followers, *, samples_together: bool) -> None:
        self._member = member
        self._followers = followers
        self._samples_together = samples_together
        self._handles = itertools.count()
        # Filled by the garbage collector, in whichever thread that runs.
        self._unreferenced: deque[int] = deque()
        self._to_release: list[int] = []

    @classmethod
    def start(cls, settings: Settings) -> Self:
        """Start the other ranks and load the base model on all. Blocks; to be called by the main thread.

        Raises:
            ConfigError: There are fewer devices than ranks, or the model cannot be loaded.
        """
        num_devices = Platform.named(settings.device).num_devices()
        if settings.device != "cpu" and num_devices < settings.ranks:
            raise ConfigError(f"TWINKLE_RANKS: {settings.ranks} ranks need as many devices, there are {num_devices}")
        followers = Followers(settings)
        try:
            engine = TransformersEngine.from_settings(settings, followers.meet())
        except BaseException:
            followers.close()
            leave_world()
            raise
        return cls(Member(engine, {}), followers, samples_together=settings.shard == "fsdp")

    @property
    def follower_pids(self) -> list[int]:
        """The processes of the other ranks."""
        return self._followers.pids

    @property
    def capabilities(self) -> MeshCapabilities:
        """What clients may ask of it."""
        return self._member.engine.capabilities

    # -- training -----------------------------------------------------------------------------------------------------

    def create(self, config: AdapterConfig) -> RankedAdapter:
        """A fresh trainable adapter on every rank."""
        handle = next(self._handles)
        self._together(Create(handle, config))
        return self._adapter(handle)

    def run_passes(self, passes: Sequence[Pass[RankedAdapter]]) -> list[PassAnswer]:
        """Share out all passes; see :class:`twinkle.workers.engine.Engine`."""
        answers: list[PassAnswer] = self._together(
            RunPasses(tuple((item.state.handle, item.body, item.cache_group) for item in passes))
        )
        return answers

    def optim_step(self, state: RankedAdapter, params: AdamParams) -> dict[str, float]:
        """The same step on every rank."""
        metrics: dict[str, float] = self._together(OptimStep(state.handle, params))
        return metrics

    def has_gradients(self, state: RankedAdapter) -> bool:
        """Whether gradients have been accumulated since the last step."""
        return self._member.engine.has_gradients(self._local(state))

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
        return self._member.engine.export(self._local(state), with_optimizer=with_optimizer)

    def load(
        self, config: AdapterConfig, files: dict[str, bytes], *, with_optimizer: bool, trainable: bool
    ) -> RankedAdapter:
        """An adapter from files; on rank 0 alone if it is for sampling and only rank 0 samples."""
        command = Load(next(self._handles), config, files, with_optimizer, trainable)
        is_shared = trainable or self._samples_together
        if is_shared:
            self._together(command)
        else:
            self._release()
            command.run(self._member)
        return self._adapter(command.handle, is_shared=is_shared)

    def load_into(self, state: RankedAdapter, files: dict[str, bytes], call: Call) -> tuple[RankedAdapter, bytes]:
        """The adapter with a checkpoint in it, on every rank."""
        handle = next(self._handles)
        body: bytes = self._together(LoadInto(handle, state.handle, files, call))
        return self._adapter(handle), body

    def freeze(self, state: RankedAdapter) -> RankedAdapter:
        """A copy of the weights on every rank that samples."""
        command = Freeze(next(self._handles), state.handle)
        if self._samples_together:
            self._together(command)
        else:
            self._release()
            command.run(self._member)
        return self._adapter(command.handle, is_shared=self._samples_together)

    def weights_bytes(self, state: RankedAdapter) -> int:
        """What they take up on one rank."""
        return self._member.engine.weights_bytes(self._local(state))

    def snapshot(self, state: RankedAdapter) -> bytes:
        """Rank 0's copy, once all ranks have shown that theirs is the same."""
        self._compare(state)
        return self._member.engine.snapshot(self._local(state))

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

    def step_samples(self) -> list[SampleOutput]:
        """Advance all queued samples by one device step; those that ended."""
        outputs: list[SampleOutput] = self._sampling(StepSamples())
        return outputs

    def drawn_so_far(self, request_id: str, known: Sequence[int]) -> list[TokenPiece]:
        """What rank 0 has drawn; all that sample have the same."""
        return self._member.engine.drawn_so_far(request_id, known)

    @property
    def num_samples_under_way(self) -> int:
        """Samples added and not yet returned."""
        return self._member.engine.num_samples_under_way

    def drop_sample(self, request_id: str) -> None:
        """Forget a sample."""
        self._sampling(DropSample(request_id))

    def drop_samples(self) -> None:
        """Forget every sample under way."""
        self._sampling(DropSamples())

    # -- ranks --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the other ranks."""
        self._followers.close()
        leave_world()

    def _together(self, command: Command) -> Any:
        released = self._release()
        self._followers.send(Order(command=command, released=released))
        self._to_release.clear()
        try:
            result, error, reply = execute(command, self._member)
        except Exception as failure:  # noqa: BLE001 - whatever it was, the ranks are out of step
            self._followers.give_up(f"{type(command).__name__} failed on rank 0: {failure}")
        for rank, theirs in enumerate(self._followers.replies(), start=1):
            if theirs != reply:
                self._followers.give_up(
                    f"{type(command).__name__} ended otherwise on rank {rank} ({theirs}) than on rank 0 ({reply})"
                )
        if error is not None:
            raise error
        return result

    def _sampling(self, command: Command) -> Any:
        return self._together(command) if self._samples_together else command.run(self._member)

    def _compare(self, state: RankedAdapter) -> None:
        if state.is_shared:
            self._together(Compare(state.handle))

    def _release(self) -> tuple[int, ...]:
        """Drop adapters nobody refers to here; the handles that the other ranks have yet to drop."""
        while self._unreferenced:
            self._to_release.append(self._unreferenced.popleft())
        self._member.release(self._to_release)
        return tuple(self._to_release)

    def _adapter(self, handle: int, *, is_shared: bool = True) -> RankedAdapter:
        adapter = RankedAdapter(handle, is_shared=is_shared)
        weakref.finalize(adapter, self._unreferenced.append, handle)
        return adapter

    def _local(self, state: RankedAdapter) -> Trained:
        return self._member.adapters[state.handle]
