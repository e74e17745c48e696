"""What a mesh worker needs of whatever computes. Adapter states are opaque to the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from twinkle.core.adapter import AdapterConfig
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.slices import Slices
from twinkle.scheduler.token_stream import TokenPiece
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.calls import Call
from twinkle.wire.sampling import SampleRequest
from twinkle.wire.training import ForwardBackwardBody
from twinkle.wire.training_result import ForwardBackwardResult

State = TypeVar("State")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass(Generic[State]):
    """One forward (and backward) operation of one adapter, ready to be fused with others, in either dialect."""

    state: State
    body: ForwardBackwardBody | Call
    cache_group: str = ""
    """What is computed of its pictures is used for passes and samples of the same group, and for no others."""
    is_again: bool = False
    """Whether it was accepted and done before: what may be refused of it is not judged again."""


@dataclass(frozen=True, kw_only=True)
class CallAnswer:
    """What a pass that was called comes to: the JSON body of its HTTP response, and what it took."""

    body: bytes
    num_tokens: int
    passed_tokens: int
    """Its tokens, as often as they went through the model."""


PassAnswer: TypeAlias = ForwardBackwardResult | CallAnswer | Exception


@dataclass(frozen=True, kw_only=True)
class SampleOutput:
    """A finished sample operation: its result in wire form, or the error it ended with."""

    request_id: str
    result: bytes | None = None
    error: Exception | None = None
    num_tokens: int = 0


class StateCopy(Protocol):
    """An adapter's state at one moment, which is still to be written."""

    @property
    def num_bytes(self) -> int:
        """About how large it will be."""
        ...

    def data(self) -> bytes:
        """What ``Engine.restore`` reads. Any thread may ask, once."""
        ...


@dataclass(frozen=True)
class WrittenState:
    """One that is written already."""

    content: bytes

    @property
    def num_bytes(self) -> int:
        """How large it is."""
        return len(self.content)

    def data(self) -> bytes:
        """The content."""
        return self.content


@dataclass(frozen=True)
class FailedCopy:
    """One that could not be made: whoever is to write it learns why."""

    error: Exception
    num_bytes: int = 0

    def data(self) -> bytes:
        """Raises the error."""
        raise self.error


class Engine(Protocol[State]):
    """One frozen base model and the adapters on it. Not thread-safe: the worker calls from one thread at a time."""

    @property
    def capabilities(self) -> MeshCapabilities:
        """What clients may ask of it."""
        ...

    def memory_held(self) -> dict[str, int]:
        """Who holds how much of the first device's memory, in bytes by name; empty where nobody counts."""
        ...

    def create(self, config: AdapterConfig) -> State:
        """A fresh trainable adapter, wholly determined by ``config``."""
        ...

    def start_passes(self, passes: Sequence[Pass[State]]) -> Slices[list[PassAnswer]]:
        """Forward (and backward, accumulating gradients) for all passes together; one answer each, same order.

        A slice goes through the model once. Between two of them anything may be done with other adapters; of these
        nothing may be read or changed until the last, nor ever again where it is not awaited.

        A pass that fails leaves its adapter exactly as it was, and its neighbours unharmed. A call is answered by a
        :class:`CallAnswer`.
        """
        ...

    def run_passes(self, passes: Sequence[Pass[State]]) -> list[PassAnswer]:
        """The same in one go."""
        ...

    def call(self, state: State, call: Call) -> bytes:
        """Do what a call says that needs no pass: set something, step, answer a question; the response's JSON body.

        Of a ``save`` it notes what the adapter is to remember; the files are ``export``'s.

        Raises:
            InvalidInput: It cannot be done; the adapter is unchanged.
        """
        ...

    def note_failure(self, state: State) -> None:
        """An operation of the adapter has failed: what it would have replaced is not taken for its result.

        A ``backward`` after a ``forward`` that failed must not find the one before.
        """
        ...

    def load_into(self, state: State, files: dict[str, bytes], call: Call) -> tuple[State, bytes]:
        """The adapter with a checkpoint in it, as a ``load`` or ``resume_from_checkpoint`` says, and the JSON body.

        What was set for it stays set. ``state`` is as it was.

        Raises:
            InvalidInput: The files do not fit it, or lack what is asked for.
        """
        ...

    def adopt(self, state: State, config: AdapterConfig) -> State:
        """A state that another run's operations made, as the start of one with this configuration."""
        ...

    def optim_step(self, state: State, params: AdamParams) -> dict[str, float]:
        """Apply the accumulated gradients and clear them; the metrics.

        Raises:
            InvalidInput: A parameter is outside its limits; the adapter is unchanged.
        """
        ...

    def has_gradients(self, state: State) -> bool:
        """Whether gradients have been accumulated since the last step."""
        ...

    def clear_gradients(self, state: State) -> None:
        """Forget the accumulated gradients, and the window that they were of."""
        ...

    def export(self, state: State, *, with_optimizer: bool) -> dict[str, bytes]:
        """The adapter as PEFT files (and the optimizer's state beside them), by file name."""
        ...

    def load(self, config: AdapterConfig, files: dict[str, bytes], *, with_optimizer: bool, trainable: bool) -> State:
        """An adapter from files that ``export`` (or plain PEFT) wrote.

        Raises:
            InvalidInput: The files do not fit the base model or ``config``.
        """
        ...

    def freeze(self, state: State) -> State:
        """A copy of an adapter's weights as they are now, on the device, to sample from; it is never trained."""
        ...

    def weights_bytes(self, state: State) -> int:
        """What an adapter's weights take up in the precision they are trained in, without the optimizer's state."""
        ...

    def snapshot(self, state: State) -> bytes:
        """Everything needed to go on bit by bit, accumulated gradients included."""
        ...

    def copy_state(self, state: State) -> StateCopy:
        """The same, copied now and written later: the state may change as soon as this returns."""
        ...

    def restore(self, data: bytes) -> State:
        """What ``snapshot`` wrote, as a trainable adapter."""
        ...

    def add_sample(self, request_id: str, state: State | None, request: SampleRequest, *, cache_group: str) -> None:
        """Queue a sample on an adapter's weights, or on the base model.

        What is computed of its prompt is used for samples of the same ``cache_group`` and for no others, which learn of
        it neither by time nor by the count of cached tokens.

        Raises:
            InvalidInput: The request is outside the model's limits.
        """
        ...

    def step_samples(self) -> list[SampleOutput]:
        """Advance all queued samples by one device step; those that ended."""
        ...

    def drawn_so_far(self, request_id: str, known: Sequence[int]) -> list[TokenPiece]:
        """What a sample under way has drawn, of each of its sequences beyond the first ``known`` tokens.

        A sequence that was begun anew and has fewer tokens now is given from its start. Nothing is computed.
        """
        ...

    @property
    def num_samples_under_way(self) -> int:
        """Samples added and not yet returned."""
        ...

    def drop_sample(self, request_id: str) -> None:
        """Forget a sample; one that is not under way is no error."""
        ...

    def drop_samples(self) -> None:
        """Forget every sample under way."""
        ...

    def close(self) -> None:
        """End what it started. Nothing is called after this."""
        ...


def copy_of(engine: Engine[State], state: State) -> StateCopy:
    """A copy of a state; where none can be made one that says why: the recovery point fails then, and nothing else."""
    try:
        return engine.copy_state(state)
    except Exception as error:  # noqa: BLE001 - the border: no operation has to do with it
        return FailedCopy(error)
