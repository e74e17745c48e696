"""The adapters in the device's memory: put there by restore and replay, kept current, snapshotted, evicted.

An adapter that has to leave the device is parked in host memory first, from where it comes back without a replay; one
that has to leave that too is left to its snapshot and the journal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.process.crash import crash_point
from twinkle.scheduler.fusion import Places
from twinkle.scheduler.residency import leaving_first
from twinkle.storage.adapters.adapters import Adapters
from twinkle.storage.journal.turns import Head
from twinkle.workers.adapters.adapter_memory import AdapterMemory
from twinkle.workers.adapters.parked import Coverage, Parked, ParkedAdapter, Resident
from twinkle.workers.adapters.replay import Replay
from twinkle.workers.adapters.snapshots import Snapshots
from twinkle.workers.engine import Engine, State, StateCopy, WrittenState, copy_of
from twinkle.workers.steps import Steps

_PINS_KNOWN_S = 1.0
"""How long nobody asks again which adapters are pinned."""

_NOTED_EVERY_S = 5.0
"""How often it is said who holds how much of the device."""

_log = structlog.get_logger()


class Residents(Generic[State]):
    """At most ``limit`` adapters on the device, and no more than fit; before others come, those needed last are parked.

    One that is larger than the memory for all of them is there alone.
    """

    def __init__(
        self,
        *,
        engine: Engine[State],
        replay: Replay[State],
        snapshots: Snapshots,
        adapters: Adapters,
        clock: Clock,
        limit: int,
        memory: AdapterMemory,
        parked_bytes: int,
        note_memory: Callable[[dict[str, int]], None] = lambda held: None,
    ) -> None:
        self._engine = engine
        self._note_memory = note_memory
        self._noted_at = 0.0
        self._replay = replay
        self._snapshots = snapshots
        self._adapters = adapters
        self._clock = clock
        self._limit = limit
        self._memory = memory
        self._residents: OrderedDict[str, Resident[State]] = OrderedDict()
        self._parked = Parked(parked_bytes)
        self._pinned: list[str] = []
        self._asked_for: set[str] = set()
        self._asked_at = 0.0
        self._in_use: dict[str, int] = {}
        """The last operation begun with each that may be ahead of the journal."""
        self._overdue: set[str] = set()

    def room_ahead(self, adapter: str, last_seq: int) -> int:
        """How many operations behind ``last_seq`` may be begun before that one is committed.

        A snapshot is copied as the adapter goes by. It comes to rest where the next is due and the last is not written,
        since then it is to be held, and for payloads, which are counted when they are committed.
        """
        resident = self._residents.get(adapter)
        if resident is None or adapter in self._overdue:
            return 0
        if resident.copied is None and resident.coverage.unsaved_bytes >= self._snapshots.pace.every_bytes:
            return 0
        covered = resident.coverage.snapshot_seq if resident.copied is None else resident.copied[0]
        is_written = resident.copied is None and self._snapshots.is_idle(adapter)
        # Within a window it is due at twice the measure.
        measure = 2 if is_written else 1
        return max(measure * self._snapshots.pace.every_ops - (last_seq - covered), 0)

    def places_ahead(self, at_work: Collection[str], *, at_most: int) -> Places:
        """Who may come to those at work: so many as have room beside them and the pinned ones. Any thread may ask."""
        room = self.room_for_batch(at_most=at_most)
        staying = {*self._pinned, *self._in_use, *at_work}
        is_tight = room < at_most or len(staying | self._residents.keys()) + at_most > self._limit
        return Places(
            spare=self._limit - len(staying) if is_tight else at_most,
            fit=lambda lanes: self._memory.num_fitting(lanes, beside=staying - set(lanes)) == len(lanes),
        )

    @property
    def held(self) -> set[str]:
        """Adapters that may not go on before a snapshot of theirs is written: what a crash may undo has a bound."""
        return set(self._overdue)

    def state_before(self, adapter: str, seq: int) -> Steps[State]:
        """The adapter with exactly the operations below ``seq`` applied, restored and replayed if need be.

        Until ``seq`` is noted as applied or the adapter forgotten, its state may be ahead of the journal: it neither
        leaves the device nor is it stored.

        Raises:
            StorageUnavailable: A snapshot or a payload could not be read; worth another attempt.
        """
        self._in_use[adapter] = seq
        resident = yield from self._resident_before(adapter, seq)
        self._residents.move_to_end(adapter)
        resident.coverage.used_at = self._clock.now()
        return resident.state

    def state_after(self, adapter: str, seq: int, *, is_last: bool) -> Steps[tuple[State, int]]:
        """A past state of the adapter, right after operation ``seq``; to be read, not changed.

        Beside it stand the tokens that were replayed for it alone. If ``is_last``, nothing was done with it since:
        whoever goes on with it finds it in memory, so bringing it there is not for this alone.

        Raises:
            StorageUnavailable: A snapshot or a payload could not be read; worth another attempt.
            TwinkleError: The journal does not hold what it takes.
        """
        resident = self._residents.get(adapter)
        if resident is not None and resident.coverage.applied_seq == seq and adapter not in self._in_use:
            return resident.state, 0
        if not is_last or adapter in self._in_use:
            rebuilt = yield from self._replay.state_after(adapter, seq)
            return rebuilt.state, rebuilt.num_tokens
        self.room_for_batch(at_most=1)
        self.make_room([adapter], dict)
        resident = self._unpark(adapter, seq + 1) or (yield from self._restore(adapter, seq + 1))
        # Unless its own next operation has come meanwhile, and brought it here itself.
        if adapter not in self._residents and adapter not in self._in_use:
            self._residents[adapter] = resident
        return resident.state, 0

    def store_past(self, adapter: str, seq: int) -> Steps[None]:
        """Write a recovery point of a past state, soon. Raises as ``state_after`` does."""
        rebuilt = yield from self._replay.state_after(adapter, seq)
        yield from self._snapshots.transfers.room()
        self._snapshots.write(adapter, seq, self._engine.copy_state(rebuilt.state))

    def put(self, adapter: str, seq: int, state: State, *, snapshot_seq: int = -1) -> None:
        """Take in the state that operation ``seq`` has made. It counts once noted."""
        now = self._clock.now()
        self._parked.take(adapter)
        coverage = Coverage(applied_seq=seq - 1, snapshot_seq=snapshot_seq, snapshot_at=now, used_at=now)
        self._residents[adapter] = Resident(state, coverage, done_seq=seq - 1)

    def note_done(self, adapter: str, seq: int) -> None:
        """Operation ``seq`` is in memory: the next one may be done with it before this one is committed.

        Where a snapshot is due its state is copied now, to be written once it is committed: until then nobody else
        knows of it, and should it never be, the copy goes with the adapter's memory.
        """
        resident = self._residents.get(adapter)
        if resident is None:
            return
        resident.done_seq = seq
        if resident.copied is None and self._may_save(adapter, resident, seq):
            resident.copied = seq, copy_of(self._engine, resident.state)
            crash_point("snapshot.copied")

    def note_applied(self, adapter: str, seq: int, *, num_bytes: int) -> None:
        """Operation ``seq``, with so large a payload, is committed: the resident may be due for a snapshot."""
        if self._in_use.get(adapter, seq) <= seq:
            self._in_use.pop(adapter, None)
        resident = self._residents.get(adapter)
        if resident is None:
            return
        coverage = resident.coverage
        coverage.applied_seq = seq
        resident.done_seq = max(resident.done_seq, seq)
        coverage.unsaved_bytes += num_bytes
        if resident.copied is not None and seq >= resident.copied[0]:
            (copied_seq, copy), resident.copied = resident.copied, None
            self._write(adapter, coverage, copied_seq, copy)
        if adapter not in self._in_use and self._may_save(adapter, resident, seq):
            self._save(adapter, resident)

    def tend(self) -> None:
        """Take the snapshots that had to wait for another one, and say now and then who holds the device's memory."""
        now = self._clock.now()
        if now >= self._noted_at + _NOTED_EVERY_S:
            self._noted_at = now
            self._note_memory(self._engine.memory_held())
        for adapter in list(self._overdue):
            resident = self._residents.get(adapter)
            if resident is None:
                self._overdue.discard(adapter)
            elif adapter not in self._in_use and self._may_save(adapter, resident, resident.coverage.applied_seq):
                self._save(adapter, resident)

    def _may_save(self, adapter: str, resident: Resident[State], seq: int) -> bool:
        """Whether the state, which is that after operation ``seq``, is to be a recovery point now.

        An adapter whose last snapshot is still under way is held when the next is due, not when it is taken: what a
        crash undoes is to be three measures, not four.
        """
        self._overdue.discard(adapter)
        if not self._is_due(resident.coverage, seq, has_gradients=False):
            return False
        if not self._snapshots.is_idle(adapter) or not self._has_room:
            self._overdue.add(adapter)
            return False
        return self._is_due(resident.coverage, seq, has_gradients=self._engine.has_gradients(resident.state))

    @property
    def _has_room(self) -> bool:
        """Whether another copy may be taken, beside what is on its way and what waits for its commit."""
        copies = (resident.copied for resident in self._residents.values())
        num_bytes = sum(copied[1].num_bytes for copied in copies if copied is not None)
        return self._snapshots.transfers.has_room_beside(num_bytes)

    def note_failure(self, adapter: str) -> None:
        """An operation of an adapter has failed; one that is rebuilt learns of it by the journal."""
        resident = self._residents.get(adapter)
        if resident is not None:
            self._engine.note_failure(resident.state)

    def forget(self, adapter: str) -> None:
        """Drop what is in memory: it may be ahead of the journal."""
        self._residents.pop(adapter, None)
        self._parked.take(adapter)
        self._in_use.pop(adapter, None)
        self._overdue.discard(adapter)

    def forget_all(self) -> None:
        """Drop everything: the mesh is somebody else's now."""
        self._residents.clear()
        self._parked.clear()
        self._in_use.clear()
        self._overdue.clear()

    def room_for_batch(self, *, at_most: int) -> int:
        """How many adapters a batch may need, so that they and the pinned ones fit."""
        has_bytes = 2 * self._memory.of(self._residents) <= self._memory.trained_bytes
        if has_bytes and len(self._residents) + at_most <= self._limit:
            return at_most
        now = self._clock.now()
        if now >= self._asked_at + _PINS_KNOWN_S or not self._residents.keys() <= self._asked_for:
            self._asked_for, self._asked_at = set(self._residents), now
            pinned = self._adapters.pinned(list(self._residents))[: self._limit // 2]
            self._pinned = pinned[: self._memory.num_fitting(pinned, part=0.5)]
        return min(at_most, self._limit - len({*self._pinned, *self._in_use}))

    def fitting(self, batch: list[Head], *, beside: Collection[str] = ()) -> list[Head]:
        """As much of a batch, from its first on, as has its adapters on the device together, beside those that stay.

        Pinned ones make room where the first does not fit beside them; it waits for those that are in use.
        """
        lanes = list(dict.fromkeys(head.lane for head in batch))
        staying = {*self._pinned, *self._in_use, *beside} - set(lanes)
        num_fitting = self._memory.num_fitting(lanes, beside=staying)
        if num_fitting == len(lanes):
            return batch
        if not num_fitting:
            self._pinned = []
            in_use = {*self._in_use, *beside} - set(lanes)
            num_fitting = self._memory.num_fitting(lanes, beside=in_use) or int(not in_use)
        together = set(lanes[:num_fitting])
        return list(takewhile(lambda head: head.lane in together, batch))

    def make_room(self, adapters: Collection[str], places: Callable[[], Mapping[str, int]]) -> None:
        """Let so many leave that these fit. Called before a batch, when every resident is as the journal says.

        Pinned adapters stay, the longest pinned first, but never in more than half of the places or of the memory.

        Args:
            adapters: What the batch needs, no more than it may.
            places: In which order adapters will be needed next; those that nobody waits for have none.
        """
        together = self._residents.keys() | set(adapters)
        excess, excess_bytes = len(together) - self._limit, self._memory.excess(together)
        if excess <= 0 and excess_bytes <= 0:
            return
        if excess_bytes > 0:
            _log.info("adapters.too_large_together", excess_bytes=excess_bytes, **self._engine.memory_held())
        for adapter in leaving_first(self._residents, places(), pinned={*adapters, *self._pinned, *self._in_use}):
            if excess <= 0 and excess_bytes <= 0:
                break
            excess, excess_bytes = excess - 1, excess_bytes - self._memory.of([adapter])
            self._park(adapter, self._residents.pop(adapter))

    def _park(self, adapter: str, resident: Resident[State]) -> None:
        facts = {"adapter": adapter, "seq": resident.coverage.applied_seq}
        try:
            data = self._engine.snapshot(resident.state)
        except Exception as error:  # noqa: BLE001 - the border: nobody who comes to the device has to do with it
            _log.error("adapter.not_copied", **facts, error=str(error), next="it is made anew", exc_info=error)
            return
        _log.info("adapter.parked", **facts)
        for name, left in self._parked.put(adapter, ParkedAdapter(data, resident.coverage)):
            self._save_parked(name, left)
            _log.info("adapter.evicted", adapter=name, seq=left.coverage.applied_seq)

    def save_all(self) -> Steps[None]:
        """Snapshot every adapter in memory that has none of its present state, as far as nothing is under way with it.

        Ends when they are written. One that could not be is tried again by whoever calls this again.
        """
        waiting = [*self._residents, *(adapter for adapter, _ in self._parked.items())]
        while waiting:
            for adapter in [name for name in waiting if self._snapshots.is_idle(name)]:
                if self._snapshots.transfers.has_room:
                    waiting.remove(adapter)
                    self._save_if_incomplete(adapter)
            if waiting:
                yield lambda: self._snapshots.transfers.has_room and any(map(self._snapshots.is_idle, waiting))
        yield from self._snapshots.all_settled()

    def _save_if_incomplete(self, adapter: str) -> None:
        resident, parked = self._residents.get(adapter), self._parked.get(adapter)
        if resident is not None and not resident.coverage.is_complete and adapter not in self._in_use:
            self._save(adapter, resident)
        elif parked is not None:
            self._save_parked(adapter, parked)

    def used(self, *, within_s: float) -> list[str]:
        """The adapters in memory that something was done with not so long ago."""
        since = self._clock.now() - within_s
        used = [adapter for adapter, resident in self._residents.items() if resident.coverage.used_at > since]
        return used + [adapter for adapter, parked in self._parked.items() if parked.coverage.used_at > since]

    def evict(self, adapter: str, last_seq: int) -> Steps[bool]:
        """Leave an adapter to the object store alone; false, and it stays, while that has not taken it.

        Raises:
            StorageUnavailable: It is not in memory, and could not be restored to be stored.
        """
        if not (yield from self._snapshots.covers(adapter, last_seq)):
            self.room_for_batch(at_most=1)
            self.make_room([adapter], dict)
            resident = yield from self._resident_before(adapter, last_seq + 1)
            yield from self._snapshots.transfers.room()
            self._save(adapter, resident)
            if not (yield from self._snapshots.covers(adapter, last_seq)):
                return False
        self.forget(adapter)
        _log.info("adapter.evicted", adapter=adapter, seq=last_seq)
        return True

    def _resident_before(self, adapter: str, seq: int) -> Steps[Resident[State]]:
        resident = self._residents.get(adapter)
        if resident is None or resident.done_seq != seq - 1:
            resident = self._unpark(adapter, seq) or (yield from self._restore(adapter, seq))
            self._residents[adapter] = resident
        return resident

    def _is_due(self, coverage: Coverage, seq: int, *, has_gradients: bool) -> bool:
        return coverage.is_due(self._snapshots.pace, seq, now=self._clock.now(), has_gradients=has_gradients)

    def _unpark(self, adapter: str, seq: int) -> Resident[State] | None:
        parked = self._parked.take(adapter)
        if parked is None or parked.coverage.applied_seq != seq - 1:
            return None
        _log.info("adapter.unparked", adapter=adapter, seq=parked.coverage.applied_seq)
        return Resident(self._engine.restore(parked.data), parked.coverage, done_seq=seq - 1)

    def _save(self, adapter: str, resident: Resident[State]) -> None:
        coverage = resident.coverage
        self._write(adapter, coverage, coverage.applied_seq, copy_of(self._engine, resident.state))

    def _save_parked(self, adapter: str, parked: ParkedAdapter) -> None:
        if not parked.coverage.is_complete:
            self._write(adapter, parked.coverage, parked.coverage.applied_seq, WrittenState(parked.data))

    def _write(self, adapter: str, coverage: Coverage, seq: int, copy: StateCopy) -> None:
        coverage.writing = self._snapshots.write(adapter, seq, copy)
        coverage.snapshot_seq, coverage.snapshot_at = seq, self._clock.now()
        coverage.unsaved_bytes = 0

    def _restore(self, adapter: str, seq: int) -> Steps[Resident[State]]:
        yield from self._snapshots.settled(adapter)
        rebuilt = yield from self._replay.state_after(adapter, seq - 1)
        self._adapters.resume(adapter)
        now = self._clock.now()
        coverage = Coverage(
            applied_seq=seq - 1,
            snapshot_seq=rebuilt.snapshot_seq,
            snapshot_at=now,
            used_at=now,
            unsaved_bytes=rebuilt.num_bytes,
        )
        resident = Resident(rebuilt.state, coverage, done_seq=seq - 1)
        if self._is_due(coverage, seq - 1, has_gradients=False):
            # Else every further crash would find a little more to replay.
            yield from self._snapshots.transfers.room()
            self._save(adapter, resident)
            yield from self._snapshots.settled(adapter)
        return resident
