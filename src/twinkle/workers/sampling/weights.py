"""The weights that samples run on: copies on the device by what they are, the longest unused given up first.

What a checkpoint holds is read from the object store. Nameless weights are copied from the adapter as it stands when
they are saved; where the copy is gone they are made anew from the adapter's recovery points and the journal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias

import structlog

from twinkle.core.adapter import Checkpoint
from twinkle.core.clock import Clock
from twinkle.core.errors import InvalidInput, NotFound, StorageUnavailable
from twinkle.scheduler.fairness import PassRate, charge_of_time
from twinkle.scheduler.retry import PutOff
from twinkle.storage.sampling.ephemeral import EphemeralWeights
from twinkle.storage.sampling.sampling_sessions import SamplingSession
from twinkle.storage.stores import Stores
from twinkle.workers.adapters.adapter_memory import AdapterMemory
from twinkle.workers.adapters.artifacts import Artifacts
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.engine import Engine, State
from twinkle.workers.steps import Job, Steps, timed

_LOOK_EVERY_S = 5.0
_PIN_EVERY_S = 60.0

_log = structlog.get_logger()


_Key: TypeAlias = tuple[str, int] | tuple[str, ...]
"""An adapter and its operation, or the hashes of a checkpoint's files."""


@dataclass(frozen=True)
class Held:
    """A copy on the device: what it is of, and what it takes in bytes."""

    key: _Key
    num_bytes: int


@dataclass(frozen=True)
class WeightsToSample(Generic[State]):
    """What a sample is drawn from, the base model if there is no state, and what it is charged for what that took."""

    state: State | None
    charge: int = 0
    held: Held | None = None
    """As whoever draws says by ``in_use`` until it has ended."""


class SamplerWeights(Generic[State]):
    """At most ``limit`` copies, and no more than fit beside those in use: who needs another one waits in line.

    One that is larger than the memory for all of them is there alone. What has been open for ``pin_after_s`` gets a
    recovery point of its own.
    """

    def __init__(
        self,
        *,
        engine: Engine[State],
        artifacts: Artifacts[State],
        stores: Stores,
        residents: Residents[State],
        clock: Clock,
        limit: int,
        memory: AdapterMemory,
        mesh: str,
        pin_after_s: float,
        rate: PassRate,
    ) -> None:
        self._engine = engine
        self._artifacts = artifacts
        self._sampling_sessions = stores.sampling_sessions
        self._checkpoints = stores.checkpoints
        self._residents = residents
        self._clock = clock
        self._limit = limit
        self._memory = memory
        self._mesh = mesh
        self._pin_after_s = pin_after_s
        self._rate = rate
        self.in_use: Callable[[], Iterable[Held]] = list
        """What is drawn from now."""
        self._copies: OrderedDict[_Key, tuple[State, int]] = OrderedDict()
        self._being_made: dict[_Key, int] = {}
        self._line: list[object] = []
        self._nameless: dict[str, tuple[str, int]] = {}
        self._used: set[str] = set()
        self._next_look_at = 0.0
        self._next_pin_at = 0.0
        self._pinning: Job[None] | None = None
        self._failed: PutOff[tuple[str, int]] = PutOff(clock)

    @property
    def num_copies(self) -> int:
        """How many there are."""
        return len(self._copies)

    def keep(self, sampling_session: str, adapter: str, seq: int, state: State) -> int:
        """Copy an adapter's weights as they are after operation ``seq``; what they take up in bytes.

        Where there is no room beside those in use, the copy is made when it is asked for.
        """
        # The commit that opens these may end the longest unused: the others' last use counts.
        self._note_use()
        num_bytes = self._memory.of_copy(adapter)
        if self._has_room(num_bytes):
            self._make_room(num_bytes)
            self._nameless[sampling_session] = (adapter, seq)
            self._hold((adapter, seq), self._engine.freeze(state), num_bytes)
        return self._engine.weights_bytes(state)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is about to get a recovery point."""
        return self._pinning is None

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to do for that now."""
        return self._pinning is not None and self._pinning.can_go_on

    def of(self, sampling_session: str) -> Steps[WeightsToSample[State]]:
        """The weights of a sampling session.

        Whether it may still read them is asked for every sample, also of weights that are here already.

        Raises:
            InvalidInput: It may not: the content is gone or was taken back, or had no name and was ended.
            StorageUnavailable: They could not be read; worth another attempt.
        """
        session = self._sampling_sessions.find(sampling_session)
        if session.weights is not None:
            return (yield from self._nameless_of(session, session.weights))
        try:
            checkpoint = self._checkpoints.sampled(session)
        except NotFound as error:
            raise InvalidInput("model_path", error.message) from None
        if checkpoint is None:
            return WeightsToSample(None)
        key = tuple(sorted(file.sha256 for file in checkpoint.files.values()))
        num_bytes = self._memory.of_copy(checkpoint.config)
        return (yield from self._copy(key, num_bytes, lambda: self._read(checkpoint)))

    def forget_pinning(self) -> None:
        """The mesh is somebody else's now."""
        self._pinning = None

    def tend(self) -> None:
        """Note what was used, drop copies that nobody can sample from any more, go on storing what is used for long.

        Called between batches.
        """
        now = self._clock.now()
        try:
            if now >= self._next_look_at and (self._nameless or self._used):
                self._next_look_at = now + _LOOK_EVERY_S
                self._look()
            if now >= self._next_pin_at and self._pinning is None:
                self._next_pin_at = now + _PIN_EVERY_S
                to_pin = self._sampling_sessions.to_pin(self._mesh, older_than_s=self._pin_after_s)
                self._pinning = Job(self._pin(to_pin)) if to_pin else None
        except StorageUnavailable as error:
            _log.warning("sampler_weights.not_tended", error=error.message, next="tried again soon")
        if self._pinning is not None and self._pinning.can_go_on:
            self._go_on_pinning(self._pinning)

    def _go_on_pinning(self, job: Job[None]) -> None:
        job.go_on()
        if job.has_ended:
            self._pinning = None
        if job.error is not None:
            raise job.error

    def _note_use(self) -> None:
        self._sampling_sessions.note_use(self._used)
        self._used.clear()

    def _look(self) -> None:
        self._note_use()
        for key in set(self._nameless.values()) - self._sampling_sessions.open_among(self._nameless):
            self._drop(key)

    def _pin(self, candidates: list[tuple[str, int]]) -> Steps[None]:
        """Store the first that can be, one at a time: it takes from the device what others could have."""
        waiting = self._failed.waiting()
        for adapter, seq in candidates:
            if (adapter, seq) in waiting:
                continue
            try:
                yield from self._residents.store_past(adapter, seq)
            except StorageUnavailable as error:
                _log.warning("sampler_weights.not_tended", error=error.message, next="tried again soon")
                return
            except Exception as error:  # noqa: BLE001 - the border: what is wrong with one adapter disturbs no other
                facts = {"adapter": adapter, "seq": seq, "error": str(error), **self._failed.put_off((adapter, seq))}
                _log.error("sampler_weights.not_pinned", **facts, exc_info=error)
            else:
                self._failed.forget((adapter, seq))
                _log.info("sampler_weights.pinned", adapter=adapter, seq=seq)
                return

    def _nameless_of(self, session: SamplingSession, weights: EphemeralWeights) -> Steps[WeightsToSample[State]]:
        if weights.end_reason is not None:
            raise InvalidInput("sampling_session_id", f"{session.id} has ended: {weights.end_reason}")
        self._used.add(session.id)
        key = (weights.adapter, weights.seq)
        self._nameless[session.id] = key
        num_bytes = self._memory.of_copy(weights.adapter)
        return (yield from self._copy(key, num_bytes, lambda: self._rebuild(weights)))

    def _copy(
        self, key: _Key, num_bytes: int, make: Callable[[], Steps[WeightsToSample[State]]]
    ) -> Steps[WeightsToSample[State]]:
        """The copy that is here, else one that is made. Of those that want it at once the first makes it and pays.

        Where memory is short all wait in one line, so that no large one waits for ever while small ones go by.
        """
        yield from self._in_turn(key, num_bytes)
        while key not in self._copies and key in self._being_made:
            yield lambda: key not in self._being_made
            yield from self._in_turn(key, num_bytes)
        here = self._copies.get(key)
        if here is not None:
            self._copies.move_to_end(key)
            return WeightsToSample(here[0], held=Held(key, num_bytes))
        self._make_room(num_bytes)
        self._being_made[key] = num_bytes
        try:
            made = yield from make()
        finally:
            self._being_made.pop(key, None)
        assert made.state is not None
        self._hold(key, made.state, num_bytes)
        return replace(made, held=Held(key, num_bytes))

    def _in_turn(self, key: _Key, num_bytes: int) -> Steps[None]:
        """Wait until all before it have what they need, and there is room for it."""
        if not self._line and self._can_be_had(key, num_bytes):
            return
        place = object()
        self._line.append(place)
        try:
            while self._line[0] is not place or not self._can_be_had(key, num_bytes):
                yield lambda: self._line[0] is place and self._can_be_had(key, num_bytes)
        finally:
            self._line.remove(place)

    def _can_be_had(self, key: _Key, num_bytes: int) -> bool:
        return key in self._copies or key in self._being_made or self._has_room(num_bytes)

    @property
    def _staying(self) -> dict[_Key, int]:
        """What cannot leave the device now."""
        return {held.key: held.num_bytes for held in self.in_use()} | self._being_made

    def _has_room(self, num_bytes: int) -> bool:
        """Whether there is room for so many beside what stays; for the first there always is."""
        if not self._memory.sampled_bytes:
            return True
        staying = self._staying
        return not staying or sum(staying.values()) + num_bytes <= self._memory.sampled_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Let the longest unused leave, those in use aside, until so many bytes fit."""
        if not self._memory.sampled_bytes:
            return
        staying = self._staying
        idle = {key: size for key, (_, size) in self._copies.items() if key not in staying}
        excess = sum(staying.values()) + sum(idle.values()) + num_bytes - self._memory.sampled_bytes
        for key, size in idle.items():
            if excess <= 0:
                break
            self._drop(key)
            excess -= size

    def _rebuild(self, weights: EphemeralWeights) -> Steps[WeightsToSample[State]]:
        rebuilding = self._residents.state_after(weights.adapter, weights.seq, is_last=weights.is_current)
        (state, num_tokens), device_s = yield from timed(rebuilding, self._clock)
        _log.info("sampler_weights.rebuilt", adapter=weights.adapter, seq=weights.seq)
        charge = 0
        if num_tokens:
            charge = charge_of_time(device_s, tokens_per_s=self._rate.tokens_per_s, num_replayed=num_tokens)
        return WeightsToSample(self._engine.freeze(state), charge)

    def _read(self, checkpoint: Checkpoint) -> Steps[WeightsToSample[State]]:
        files = yield from self._artifacts.read_files(checkpoint)
        return WeightsToSample(self._engine.load(checkpoint.config, files, with_optimizer=False, trainable=False))

    def _hold(self, key: _Key, state: State, num_bytes: int) -> None:
        self._copies[key] = state, num_bytes
        self._copies.move_to_end(key)
        excess = len(self._copies) - self._limit
        if excess > 0:
            staying = {key, *self._staying}
            for each in [each for each in self._copies if each not in staying][:excess]:
                self._drop(each)

    def _drop(self, key: _Key) -> None:
        # There is none where making it anew has failed.
        self._copies.pop(key, None)
        self._nameless = {session: held for session, held in self._nameless.items() if held != key}
