"""What rank 0 tells the other ranks to do, and does itself: every change of an adapter, and every forward pass.

Adapters are named by handles that rank 0 gives out; each rank holds an adapter of its own behind the same handle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from twinkle.core.adapter import AdapterConfig
from twinkle.core.slices import Slices
from twinkle.scheduler.token_stream import TokenPiece
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.calls import Call
from twinkle.wire.sampling import SampleRequest
from twinkle.wire.training import ForwardBackwardBody
from twinkle.workers.engine import Pass, PassAnswer, SampleOutput, StateCopy
from twinkle.workers.engines.transformers_engine import Trained, TransformersEngine


@dataclass
class Member:
    """One rank's engine and the adapters on it."""

    engine: TransformersEngine
    adapters: dict[int, Trained]
    under_way: dict[int, Slices[list[PassAnswer]]] = field(default_factory=dict)
    """Passes that are done slice by slice."""

    def next_slice(self, number: int) -> list[PassAnswer] | None:
        """Do one slice of passes; their answers with the last."""
        try:
            next(self.under_way[number])
        except StopIteration as end:
            del self.under_way[number]
            answers: list[PassAnswer] = end.value
            return answers
        return None

    def release(self, handles: Iterable[int]) -> None:
        """Forget adapters; those that never came to be here are no error."""
        for handle in handles:
            self.adapters.pop(handle, None)


class Command(ABC):
    """One call that all ranks make."""

    must_succeed: ClassVar[bool] = False
    """Whether an error means that the ranks are out of step, whichever ranks it befell."""
    must_agree: ClassVar[bool] = False
    """Whether the result is the same on all ranks, and small: it is compared."""

    @abstractmethod
    def run(self, member: Member) -> Any:
        """Make the call on this rank."""


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """A command, and the adapters that nobody refers to any more."""

    command: Command
    released: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What a rank says about a command: the class of the error it ended with, or a result to be compared."""

    error: str | None = None
    result: str | None = None


def execute(command: Command, member: Member) -> tuple[Any, Exception | None, Reply]:
    """Run a command: its result or its error, and what to say about it.

    An error of a command that must succeed is raised.
    """
    try:
        result = command.run(member)
    except Exception as error:
        if command.must_succeed:
            raise
        return None, error.with_traceback(None), Reply(error=type(error).__name__)
    return result, None, Reply(result=repr(result) if command.must_agree else None)


@dataclass(frozen=True)
class Create(Command):
    """A fresh adapter."""

    handle: int
    config: AdapterConfig

    def run(self, member: Member) -> None:
        """See the engine's ``create``."""
        member.adapters[self.handle] = member.engine.create(self.config)


@dataclass(frozen=True)
class Load(Command):
    """An adapter from files."""

    handle: int
    config: AdapterConfig
    files: dict[str, bytes]
    with_optimizer: bool
    trainable: bool

    def run(self, member: Member) -> None:
        """See the engine's ``load``."""
        member.adapters[self.handle] = member.engine.load(
            self.config, self.files, with_optimizer=self.with_optimizer, trainable=self.trainable
        )


@dataclass(frozen=True)
class Freeze(Command):
    """A copy of an adapter's weights, to sample from."""

    handle: int
    source: int

    def run(self, member: Member) -> None:
        """See the engine's ``freeze``."""
        member.adapters[self.handle] = member.engine.freeze(member.adapters[self.source])


@dataclass(frozen=True)
class Restore(Command):
    """An adapter from a snapshot."""

    handle: int
    data: bytes

    def run(self, member: Member) -> None:
        """See the engine's ``restore``."""
        member.adapters[self.handle] = member.engine.restore(self.data)


@dataclass(frozen=True)
class StartPasses(Command):
    """Passes of any adapters, each given by its handle, its body, its group and whether it is one again; a slice."""

    must_succeed: ClassVar[bool] = True
    number: int
    passes: tuple[tuple[int, ForwardBackwardBody | Call, str, bool], ...]

    def run(self, member: Member) -> list[PassAnswer] | None:
        """See the engine's ``start_passes``; None while there is more to do."""
        member.under_way[self.number] = member.engine.start_passes(
            [
                Pass(state=member.adapters[handle], body=body, cache_group=cache_group, is_again=is_again)
                for handle, body, cache_group, is_again in self.passes
            ]
        )
        return member.next_slice(self.number)


@dataclass(frozen=True)
class NextSlice(Command):
    """The next slice of passes under way."""

    must_succeed: ClassVar[bool] = True
    number: int

    def run(self, member: Member) -> list[PassAnswer] | None:
        """The answers; None while there is more to do."""
        return member.next_slice(self.number)


@dataclass(frozen=True)
class DropPasses(Command):
    """Forget passes under way, whose adapters are of no more use."""

    must_succeed: ClassVar[bool] = True
    number: int

    def run(self, member: Member) -> None:
        """End them where they are."""
        member.under_way.pop(self.number).close()


@dataclass(frozen=True)
class OptimStep(Command):
    """One step of an adapter. Its metrics are compared: they hold the gradient's norm to the last bit."""

    must_agree: ClassVar[bool] = True
    handle: int
    params: AdamParams

    def run(self, member: Member) -> dict[str, float]:
        """See the engine's ``optim_step``."""
        return member.engine.optim_step(member.adapters[self.handle], self.params)


@dataclass(frozen=True)
class MakeCall(Command):
    """A call of the Twinkle dialect that needs no pass. What it answers may hold times: rank 0's counts."""

    handle: int
    call: Call

    def run(self, member: Member) -> bytes:
        """See the engine's ``call``."""
        return member.engine.call(member.adapters[self.handle], self.call)


@dataclass(frozen=True)
class NoteFailure(Command):
    """An operation of an adapter has failed."""

    handle: int

    def run(self, member: Member) -> None:
        """See the engine's ``note_failure``."""
        member.engine.note_failure(member.adapters[self.handle])


@dataclass(frozen=True)
class LoadInto(Command):
    """An adapter with a checkpoint in it."""

    handle: int
    source: int
    files: dict[str, bytes]
    call: Call

    def run(self, member: Member) -> bytes:
        """See the engine's ``load_into``."""
        loaded, body = member.engine.load_into(member.adapters[self.source], self.files, self.call)
        member.adapters[self.handle] = loaded
        return body


@dataclass(frozen=True)
class Adopt(Command):
    """Another run's state as the start of one."""

    handle: int
    source: int
    config: AdapterConfig

    def run(self, member: Member) -> None:
        """See the engine's ``adopt``."""
        member.adapters[self.handle] = member.engine.adopt(member.adapters[self.source], self.config)


@dataclass(frozen=True)
class ClearGradients(Command):
    """Forget an adapter's accumulated gradients."""

    handle: int

    def run(self, member: Member) -> None:
        """See the engine's ``clear_gradients``."""
        member.engine.clear_gradients(member.adapters[self.handle])


@dataclass(frozen=True)
class Compare(Command):
    """See that all ranks hold the same adapter."""

    must_agree: ClassVar[bool] = True
    handle: int

    def run(self, member: Member) -> str:
        """A hash of the adapter's state."""
        return member.engine.fingerprint(member.adapters[self.handle])


@dataclass(frozen=True)
class AddSample(Command):
    """Queue a sample on an adapter, or (None) on the base model."""

    request_id: str
    handle: int | None
    request: SampleRequest
    cache_group: str

    def run(self, member: Member) -> None:
        """See the engine's ``add_sample``."""
        adapter = None if self.handle is None else member.adapters[self.handle]
        member.engine.add_sample(self.request_id, adapter, self.request, cache_group=self.cache_group)


@dataclass(frozen=True)
class StepSamples(Command):
    """One step of the sampler."""

    must_agree: ClassVar[bool] = True

    def run(self, member: Member) -> list[SampleOutput]:
        """See the engine's ``step_samples``."""
        return member.engine.step_samples()


@dataclass(frozen=True)
class DropSample(Command):
    """Forget one sample."""

    request_id: str

    def run(self, member: Member) -> None:
        """See the engine's ``drop_sample``."""
        member.engine.drop_sample(self.request_id)


@dataclass(frozen=True)
class DropSamples(Command):
    """Forget every sample."""

    def run(self, member: Member) -> None:
        """See the engine's ``drop_samples``."""
        member.engine.drop_samples()


# What rank 0 alone is asked. Nothing changes by it.


@dataclass(frozen=True)
class HasGradients(Command):
    """Whether an adapter has accumulated gradients."""

    handle: int

    def run(self, member: Member) -> bool:
        """See the engine's ``has_gradients``."""
        return member.engine.has_gradients(member.adapters[self.handle])


@dataclass(frozen=True)
class Export(Command):
    """An adapter as PEFT files."""

    handle: int
    with_optimizer: bool

    def run(self, member: Member) -> dict[str, bytes]:
        """See the engine's ``export``."""
        return member.engine.export(member.adapters[self.handle], with_optimizer=self.with_optimizer)


@dataclass(frozen=True)
class WeightsBytes(Command):
    """What an adapter's weights take up."""

    handle: int

    def run(self, member: Member) -> int:
        """See the engine's ``weights_bytes``."""
        return member.engine.weights_bytes(member.adapters[self.handle])


@dataclass(frozen=True)
class MemoryHeld(Command):
    """Who holds how much of a rank's device."""

    def run(self, member: Member) -> dict[str, int]:
        """See the engine's ``memory_held``."""
        return member.engine.memory_held()


@dataclass(frozen=True)
class CopyState(Command):
    """All that an adapter is, on its way to the host's memory."""

    handle: int

    def run(self, member: Member) -> StateCopy:
        """See the engine's ``copy_state``."""
        return member.engine.copy_state(member.adapters[self.handle])


@dataclass(frozen=True)
class DrawnSoFar(Command):
    """What a sample under way has drawn."""

    request_id: str
    known: Sequence[int]

    def run(self, member: Member) -> list[TokenPiece]:
        """See the engine's ``drawn_so_far``."""
        return member.engine.drawn_so_far(self.request_id, self.known)
