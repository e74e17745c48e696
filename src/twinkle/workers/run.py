"""The loop of a mesh worker: claim, execute, commit, report, until a claim comes back empty."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import LeaseLost, StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim, OperationKind
from twinkle.core.process.crash import crash_point
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.scheduler.fusion import alone_from, beside, choose_batch
from twinkle.scheduler.residency import places_in_line
from twinkle.storage.disks import Disks
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.turns import Followed, Head
from twinkle.workers.adapters.departures import Absences, Departures
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.clerk import Clerk
from twinkle.workers.endings import Endings, Execution
from twinkle.workers.engine import State
from twinkle.workers.execute import Executor
from twinkle.workers.lease_keeper import LeaseKeeper
from twinkle.workers.lookahead import Lookahead
from twinkle.workers.recording import Half, Recorded, Recorder
from twinkle.workers.report import OperationReporter
from twinkle.workers.sampling.rounds import SampleRounds
from twinkle.workers.sampling.sampling import SampleDesk
from twinkle.workers.sampling.weights import SamplerWeights
from twinkle.workers.steps import Job, Transfers

_STORAGE_RETRY_S = 0.5
_HEADS_OFFERED = 256
_LONGEST_WAIT_S = 1.0
_FINISH_S = 10.0
_LIGHT = frozenset(OperationKind) - {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD}

_log = structlog.get_logger()


class MeshWorker(Generic[State]):
    """Executes a mesh's operations. ``drain`` may be called from several threads; one works at a time."""

    def __init__(
        self,
        *,
        journal: Journal,
        keeper: LeaseKeeper,
        executor: Executor[State],
        residents: Residents[State],
        absences: Absences[State],
        departures: Departures[State],
        samples: SampleDesk[State],
        sampler_weights: SamplerWeights[State],
        clerk: Clerk,
        lookahead: Lookahead,
        sampling: SampleRounds[State],
        endings: Endings,
        recorder: Recorder[State],
        reporter: OperationReporter,
        clock: Clock,
        transfers: Transfers,
        disks: Disks,
        max_adapters: int,
        max_tokens: int,
        min_tokens: int,
        max_attempts: int,
    ) -> None:
        self._journal = journal
        self._keeper = keeper
        self._executor = executor
        self._residents = residents
        self._absences = absences
        self._departures = departures
        self._samples = samples
        self._sampler_weights = sampler_weights
        self._clerk = clerk
        self._lookahead = lookahead
        self._sampling = sampling
        self._endings = endings
        self._recorder = recorder
        self._reporter = reporter
        self._clock = clock
        self._transfers = transfers
        self._disks = disks
        self._max_adapters = max_adapters
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._suspect_from = alone_from(max_attempts)
        self._previous_was_light = False
        self._offered: list[Head] = []
        self._chosen: list[Head] = []
        self._room = max_adapters
        self._epoch = 0
        self._settling: Counter[str] = Counter()
        """Adapters with outcomes that the clerk has in hand."""
        self._working = threading.Lock()
        self._stopping = False

    def drain(self, *, budget_s: float) -> bool:
        """Work until nothing is left or the time is up; whether there may be more.

        Training and sampling take turns: one training batch, then as much sampling as is its share.
        """
        with self._working:
            ends_at = self._clock.now() + budget_s
            while not self._stopping and self._clock.now() < ends_at:
                lease = self._keeper.current()
                if lease is None:
                    self._leave()
                    return False
                self._enter(lease)
                self._transfers.changed.clear()
                if self._work_once(lease):
                    continue
                if not self._has_under_way:
                    return False
                # What is under way waits for the object store: its answer ends this, or a ring.
                self._transfers.changed.wait(min(ends_at - self._clock.now(), _LONGEST_WAIT_S))
            if not self._clerk.is_idle:
                # It is noted by whoever drains next: the device does not wait for it.
                crash_point("worker.drained")
            return not self._stopping

    def ring(self) -> None:
        """Something new waits: look into the journal, should all that is under way be waiting."""
        self._lookahead.has_others = self._lookahead.has_next = True
        self._sampling.ring()
        self._transfers.changed.set()

    def close(self) -> None:
        """Finish what is under way, as far as it ends soon, and give back the rest; snapshot everything."""
        self._stopping = True
        self._recorder.lose_patience()
        self._transfers.changed.set()
        with self._working:
            lease = self._keeper.current()
            if lease is not None:
                try:
                    self._finish(lease)
                    self._clerk.settle()
                    request_ids = [claim.request_id for claim in self._drop_training([])] + self._samples.abandon()
                    self._journal.give_back(lease, request_ids, is_blameless=True)
                except (LeaseLost, StorageUnavailable) as error:
                    _log.warning("worker.give_back_failed", error=error.message, next="the next holder takes them")
                    self._drop_training([])
            self._clerk.close()
            self._recorder.close()
            self._transfers.at_once(self._residents.save_all())
            self._reporter.close()

    @property
    def _has_under_way(self) -> bool:
        return not (
            self._executor.is_idle
            and self._clerk.is_idle
            and not self._lookahead.has_claims
            and not self._sampling.has_claims
            and self._samples.is_idle
            and not self._residents.held
            and not self._leaving
            and self._sampler_weights.is_idle
        )

    @property
    def _leaving(self) -> set[str]:
        """Adapters that are on their way to the object store, or to another mesh."""
        return self._absences.lanes | self._departures.lanes

    def _finish(self, lease: Lease) -> None:
        """Begin nothing new; a little while is given to what waits for the object store.

        Whatever nothing is under way with is snapshotted beside it.
        """
        saving = Job(self._residents.save_all())
        ends_at = time.monotonic() + _FINISH_S
        while not self._executor.is_idle and (left_s := ends_at - time.monotonic()) > 0:
            self._transfers.changed.clear()
            self._take_back()
            self._go_on(lease, Execution())
            if saving.can_go_on:
                saving.go_on()
            if not self._executor.can_go_on and not self._executor.is_idle:
                self._transfers.changed.wait(left_s)

    def _enter(self, lease: Lease) -> None:
        """Begin a new epoch with nothing: the mesh was not ours in between, and what we held was not ours since."""
        if lease.epoch != self._epoch:
            self._drop_all()
            self._epoch = lease.epoch

    def _leave(self) -> None:
        """The mesh is somebody else's, as the keeper has found out: what is in hand is not ours to go on with."""
        if self._has_under_way:
            _log.warning("worker.fenced", error="the lease has ended", next="whoever holds the mesh goes on with it")
            self._drop_all()

    def _drop_all(self) -> None:
        self._drop_training([])
        self._absences.forget_all()
        self._departures.forget_all()
        self._residents.forget_all()
        self._samples.abandon()
        self._sampler_weights.forget_pinning()

    def _work_once(self, lease: Lease) -> bool:
        """Whether there is more to do now."""
        return self._guarded(lease, self._take_turns)

    def _guarded(self, lease: Lease, work: Callable[[Lease], bool]) -> bool:
        """What work says, unless the mesh is lost or the storage is away: whether there is more to do now."""
        try:
            return work(lease)
        except LeaseLost as error:
            _log.warning("worker.fenced", error=error.message)
            self._drop_all()
            self._keeper.give_up()
            return False
        except StorageUnavailable as error:
            _log.warning("worker.storage_unavailable", error=error.message, retry_s=_STORAGE_RETRY_S)
            self._clock.sleep(_STORAGE_RETRY_S)
            return True

    def _take_turns(self, lease: Lease) -> bool:
        """Train, sample, then see to what leaves; whether there is more to do now."""
        self._take_back()
        began_at = self._clock.now()
        trained = self._train_once(lease)
        trained_s = self._clock.now() - began_at if trained or self._executor.can_go_on else None
        sampled = self._sampling.work_once(lease, is_training=self._is_busy, trained_s=trained_s)
        held = self._residents.held | self._leaving
        self._residents.tend()
        is_noted = self._take_back()
        at_work = self._executor.lanes | self._lookahead.lanes | set(self._settling)
        self._absences.park(besides=at_work | self._departures.lanes)
        self._departures.depart(besides=at_work | self._absences.lanes)
        self._sampler_weights.tend()
        is_released = not held <= self._residents.held | self._leaving
        can_leave = self._absences.can_go_on or self._departures.can_go_on
        can_be_noted = is_noted or self._clerk.can_go_on or self._lookahead.has_claims or self._sampling.has_claims
        return trained or sampled or is_released or can_leave or can_be_noted or self._sampler_weights.can_go_on

    # -- training -----------------------------------------------------------------------------------------------------

    def _train_once(self, lease: Lease) -> bool:
        execution = Execution()
        ahead = self._lookahead.take(execution, self._executor.passing if self._executor.is_half_through else ())
        claims = ahead.claims
        if claims:
            self._offered, self._chosen, self._previous_was_light = ahead.offered, ahead.offered, False
        elif self._clerk.is_idle and not execution.returned and not self._lookahead.would_look(self._followed()):
            claims = self._claim_heads(lease)
        if claims:
            self._reporter.started(claims)
            crash_point("worker.claimed")
            fit = self._endings.end_poisonous(claims, execution)
            lanes = {claim.lane for claim in fit} | self._lookahead.lanes
            self._residents.make_room(lanes, lambda: places_in_line(self._offered, self._chosen))
            self._executor.begin(fit, ahead.bodies)
        if self._executor.is_idle and execution.is_empty:
            return False
        self._look_ahead(lease)
        if self._is_busy:
            self._sampling.look(lease)
        self._go_on(lease, execution)
        return bool(claims or execution.begun or execution.returned) or self._executor.can_go_on

    @property
    def _is_busy(self) -> bool:
        """Whether the device would be kept waiting for passes that are at hand."""
        return self._executor.can_go_on and not self._executor.is_half_through

    def _claim_heads(self, lease: Lease) -> list[Claim]:
        self._offered, self._chosen = [], []
        self._room = self._residents.room_for_batch(at_most=self._max_adapters) - len(self._lookahead.lanes)
        held = self._executor.lanes | self._lookahead.lanes | self._residents.held | self._leaving
        claims: list[Claim] = []
        # On a disk that is full nothing could be recorded of what it began.
        if self._sampling.waiting(lease).heads and not self._disks.is_critical:
            claims = self._journal.claim(lease, with_virtual_time(self._choose), _HEADS_OFFERED, held=held)
        self._previous_was_light = bool(claims) and claims[0].kind in _LIGHT
        if claims or self._executor.is_idle:
            self._lookahead.has_others = len(self._offered) > len(claims)
            self._lookahead.has_next = any(head.has_next for head in self._chosen)
        return claims

    def _look_ahead(self, lease: Lease) -> None:
        """Have what is next claimed while the device is at work."""
        followed = self._followed()
        if self._lookahead.would_look(followed):
            held = self._executor.lanes | self._residents.held | self._leaving
            places = self._residents.places_ahead(self._executor.lanes, at_most=self._max_adapters)
            self._lookahead.look(lease, held=held, followed=followed, places=places)

    def _followed(self) -> list[Followed]:
        """The lanes in hand, if what is next may be claimed: only where nothing could be blamed on it wrongly."""
        executor = self._executor
        if self._stopping or self._disks.is_critical or not executor.can_go_on or executor.is_half_through:
            return []
        if max(self._samples.max_suspicions, executor.max_suspicions) > 0:
            return []
        return executor.followed()

    def _go_on(self, lease: Lease, execution: Execution) -> None:
        """Do for a while what can be done, and have recorded what has ended by then: none waits for the slowest one."""
        try:
            self._executor.go_on(execution)
            self._lookahead.spoil(execution)
            self._hand_over(lease, execution, half="worker", aside=self._has_more)
        except BaseException:
            # Memory may be ahead of the journal.
            self._drop_training([claim.lane for claim, _ in execution.begun.values()])
            raise

    @property
    def _has_more(self) -> bool:
        """Whether the device has something to do while what has ended is written."""
        return self._executor.can_go_on or self._lookahead.is_under_way

    # -- recording ----------------------------------------------------------------------------------------------------

    def _hand_over(self, lease: Lease, execution: Execution, *, half: Half, aside: bool) -> None:
        """Have written what came of a batch; beside the device where that has something to do."""
        if execution.is_empty:
            return
        lanes = [outcome.lane for outcome in execution.outcomes]
        self._settling.update(lanes)
        record = partial(self._recorder.record, lease, execution, half=half, aside=aside)
        self._clerk.hand(record, partial(self._note, lease, lanes), aside=aside)
        if aside:
            crash_point("worker.handed_over")

    def _note(self, lease: Lease, lanes: list[str], recorded: Recorded) -> None:
        """Let memory follow the journal; what was made of a state that was not taken goes back."""
        self._settling.subtract(lanes)
        self._settling += Counter()
        self._recorder.note(recorded)
        if not recorded.spoilt:
            return
        returned = Execution()
        for lane in recorded.spoilt:
            self._executor.return_lane(lane, returned)
            self._lookahead.spoil_lane(lane)
        self._clerk.hand(
            partial(self._put_right, lease, returned, recorded.spoilt), lambda _: None, aside=self._executor.can_go_on
        )

    def _put_right(self, lease: Lease, returned: Execution, lanes: frozenset[str]) -> None:
        self._recorder.record(lease, returned, half="worker")
        self._recorder.cure(lanes)

    def _take_back(self) -> bool:
        """Whether the clerk had something to tell: what waited for it can be claimed now."""
        try:
            return self._clerk.take_back()
        except BaseException:
            self._drop_training([])
            raise

    def _drop_training(self, lanes: Iterable[str]) -> list[Claim]:
        """Forget every adapter that may be ahead of the journal; what was in hand."""
        self._clerk.forget()
        self._recorder.forget_all()
        dropped = self._executor.drop() + self._lookahead.drop() + self._sampling.drop()
        for lane in {*lanes, *self._settling}:
            self._residents.forget(lane)
        self._settling.clear()
        return dropped

    def _choose(self, heads: list[Head]) -> list[Head]:
        self._offered = heads
        if self._room <= 0:
            return []
        batch = choose_batch(
            beside(heads, self._executor.passing, large_tokens=self._max_tokens, suspect_from=self._suspect_from),
            max_adapters=self._room,
            max_tokens=self._max_tokens,
            min_tokens=self._min_tokens,
            previous_was_light=self._previous_was_light,
            suspect_from=self._suspect_from,
            has_suspect=max(self._samples.max_suspicions, self._executor.max_suspicions) >= self._suspect_from,
        )
        self._chosen = self._residents.fitting(batch, beside=self._lookahead.lanes)
        return self._chosen
