"""The loop of a mesh worker: claim, execute, commit, report, until a claim comes back empty."""

from __future__ import annotations

import threading
import time
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.crash import crash_point
from twinkle.core.errors import LeaseLost, StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim, OperationKind
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.scheduler.fusion import alone_from, beside, choose_batch, choose_samples
from twinkle.scheduler.residency import places_in_line
from twinkle.storage.disks import Disks
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.turns import Head
from twinkle.workers.absence import Absences
from twinkle.workers.departures import Departures
from twinkle.workers.endings import Endings, Execution, Recorder, outcome_of_failure
from twinkle.workers.engine import State
from twinkle.workers.execute import Executor
from twinkle.workers.lease_keeper import LeaseKeeper
from twinkle.workers.report import OperationReporter
from twinkle.workers.residents import Residents
from twinkle.workers.sampler_weights import SamplerWeights
from twinkle.workers.sampling import SampleDesk
from twinkle.workers.steps import Job, Transfers

_STORAGE_RETRY_S = 0.5
_HEADS_OFFERED = 256
_SAMPLES_OFFERED = 16
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
        self._working = threading.Lock()
        self._stopping = False

    def drain(self, *, budget_s: float) -> bool:
        """Work until nothing is left or the time is up; whether there may be more.

        Training and sampling take turns: one training batch, then one slice of sampling.
        """
        with self._working:
            ends_at = self._clock.now() + budget_s
            while not self._stopping and self._clock.now() < ends_at:
                lease = self._keeper.current()
                if lease is None:
                    return False
                self._enter(lease)
                self._transfers.changed.clear()
                if self._work_once(lease):
                    continue
                if not self._has_under_way:
                    return False
                # What is under way waits for the object store: its answer ends this, or a ring.
                self._transfers.changed.wait(min(ends_at - self._clock.now(), _LONGEST_WAIT_S))
            return not self._stopping

    def ring(self) -> None:
        """Something new waits: look into the journal, should all that is under way be waiting."""
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
                    request_ids = [claim.request_id for claim in self._executor.drop()] + self._samples.abandon()
                    self._journal.give_back(lease, request_ids, is_blameless=True)
                except (LeaseLost, StorageUnavailable) as error:
                    _log.warning("worker.give_back_failed", error=error.message, next="the next holder takes them")
                    self._executor.drop()
            self._transfers.at_once(self._residents.save_all())
            self._reporter.close()

    @property
    def _has_under_way(self) -> bool:
        return not (
            self._executor.is_idle
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

    def _drop_all(self) -> None:
        self._executor.drop()
        self._absences.forget_all()
        self._departures.forget_all()
        self._residents.forget_all()
        self._samples.abandon()
        self._sampler_weights.forget_pinning()

    def _work_once(self, lease: Lease) -> bool:
        """Whether there is more to do now."""
        try:
            trained = self._train_once(lease)
            sampled = self._sample_once(lease)
        except LeaseLost as error:
            _log.warning("worker.fenced", error=error.message)
            self._drop_all()
            self._keeper.give_up()
            return False
        except StorageUnavailable as error:
            _log.warning("worker.storage_unavailable", error=error.message, retry_s=_STORAGE_RETRY_S)
            self._clock.sleep(_STORAGE_RETRY_S)
            return True
        held = self._residents.held | self._leaving
        self._residents.tend()
        self._absences.park(besides=self._executor.lanes | self._departures.lanes)
        self._departures.depart(besides=self._executor.lanes | self._absences.lanes)
        self._sampler_weights.tend()
        is_released = not held <= self._residents.held | self._leaving
        can_leave = self._absences.can_go_on or self._departures.can_go_on
        return trained or sampled or is_released or can_leave or self._sampler_weights.can_go_on

    # -- training -----------------------------------------------------------------------------------------------------

    def _train_once(self, lease: Lease) -> bool:
        self._offered, self._chosen = [], []
        self._room = self._residents.room_for_batch(at_most=self._max_adapters)
        held = self._executor.lanes | self._residents.held | self._leaving
        claims: list[Claim] = []
        # On a disk that is full nothing could be recorded of what it began.
        if not self._disks.is_critical:
            claims = self._journal.claim(lease, with_virtual_time(self._choose), _HEADS_OFFERED, held=held)
        execution = Execution()
        if claims:
            self._previous_was_light = claims[0].kind in _LIGHT
            self._reporter.started(claims)
            crash_point("worker.claimed")
            fit = self._endings.end_poisonous(claims, execution)
            self._residents.make_room(
                [claim.lane for claim in fit], lambda: places_in_line(self._offered, self._chosen)
            )
            self._executor.begin(fit)
        else:
            self._previous_was_light = False
        if self._executor.is_idle and not execution.outcomes:
            return False
        self._go_on(lease, execution)
        return bool(claims) or bool(execution.begun) or self._executor.can_go_on

    def _go_on(self, lease: Lease, execution: Execution) -> None:
        """Do for a while what can be done, and record what has ended by then: nobody waits for the slowest one."""
        try:
            self._executor.go_on(execution)
            committed = self._recorder.record(lease, execution, half="worker")
        except BaseException:
            # Memory may be ahead of the journal.
            self._executor.drop()
            for claim, _ in execution.begun.values():
                self._residents.forget(claim.lane)
            raise
        self._recorder.conclude(lease, execution, committed, half="worker")

    def _choose(self, heads: list[Head]) -> list[Head]:
        self._offered = heads
        if self._room <= 0:
            return []
        self._chosen = choose_batch(
            beside(heads, self._executor.passing, large_tokens=self._max_tokens, suspect_from=self._suspect_from),
            max_adapters=self._room,
            max_tokens=self._max_tokens,
            min_tokens=self._min_tokens,
            previous_was_light=self._previous_was_light,
            suspect_from=self._suspect_from,
            has_suspect=max(self._samples.max_suspicions, self._executor.max_suspicions) >= self._suspect_from,
        )
        return self._chosen

    # -- sampling -----------------------------------------------------------------------------------------------------

    def _sample_once(self, lease: Lease) -> bool:
        self._drop_ended(lease)
        # Without room there still is some for tenants that have nothing there.
        offered = max(self._samples.room, _SAMPLES_OFFERED)
        claims: list[Claim] = []
        if not self._disks.is_critical:
            claims = self._journal.claim_samples(
                lease, with_virtual_time(self._choose_samples), offered, under_way=self._samples.under_way
            )
        self._reporter.started(claims)
        if claims:
            crash_point("sampler.claimed")
        execution = Execution()
        fit = self._endings.end_poisonous(claims, execution)
        self._samples.admit(fit, execution)
        self._samples.run_slice(execution)
        committed = self._recorder.record(lease, execution, half="sampler")
        self._recorder.conclude(lease, execution, committed, half="sampler")
        return bool(claims) or bool(execution.begun) or self._samples.can_go_on

    def _choose_samples(self, heads: list[Head]) -> list[Head]:
        return choose_samples(
            heads,
            room=self._samples.room,
            is_idle=self._samples.is_idle,
            suspect_from=self._suspect_from,
            drawing=self._samples.tenants,
        )

    def _drop_ended(self, lease: Lease) -> None:
        """Free what samples hold that were cancelled or are overdue.

        They have their outcome; their events are left, and what the device has done for them, which is paid for.
        """
        if self._samples.is_idle:
            return
        failures = self._journal.failed_meanwhile(self._samples.under_way)
        dropped = self._samples.drop(list(failures))
        ended = [outcome_of_failure(claim, failures[claim.request_id], charge=charge) for claim, charge in dropped]
        if ended:
            self._journal.charge(lease, ended)
        self._reporter.ended(ended, self._clock.now())
