"""The loop of a mesh worker: claim, execute, commit, report, until a claim comes back empty."""

from __future__ import annotations

import threading
import time
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.crash import crash_point
from twinkle.core.errors import LeaseLost, StatementFailed, StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim, OperationKind
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.scheduler.fusion import alone_from, choose_batch, choose_samples
from twinkle.scheduler.residency import places_in_line
from twinkle.storage.journal.journal import Committed, Journal
from twinkle.storage.journal.turns import Head
from twinkle.workers.absence import Absences
from twinkle.workers.endings import Endings, Execution, condemn, outcome_of_failure
from twinkle.workers.engine import State
from twinkle.workers.execute import Executor
from twinkle.workers.lease_keeper import LeaseKeeper
from twinkle.workers.report import OperationReporter
from twinkle.workers.residents import Residents
from twinkle.workers.sampling import SampleDesk
from twinkle.workers.steps import Transfers

_COMMIT_RETRY_S = 0.5
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
        samples: SampleDesk[State],
        endings: Endings,
        publisher: CompletionPublisher,
        reporter: OperationReporter,
        clock: Clock,
        transfers: Transfers,
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
        self._samples = samples
        self._endings = endings
        self._publisher = publisher
        self._reporter = reporter
        self._clock = clock
        self._transfers = transfers
        self._max_adapters = max_adapters
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._max_attempts = max_attempts
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
            self._residents.save_all()
            self._reporter.close()

    @property
    def _has_under_way(self) -> bool:
        return not (
            self._executor.is_idle
            and self._samples.is_idle
            and not self._residents.held
            and not self._absences.adapters
        )

    def _finish(self, lease: Lease) -> None:
        """Begin nothing new; a little while is given to what waits for the object store."""
        ends_at = time.monotonic() + _FINISH_S
        while not self._executor.is_idle and (left_s := ends_at - time.monotonic()) > 0:
            self._transfers.changed.clear()
            self._go_on(lease, Execution())
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
        self._residents.forget_all()
        self._samples.abandon()

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
            _log.warning("worker.storage_unavailable", error=error.message, retry_s=_COMMIT_RETRY_S)
            self._clock.sleep(_COMMIT_RETRY_S)
            return True
        held = self._residents.held | self._absences.adapters
        self._residents.tend()
        self._absences.park(besides=self._executor.lanes)
        self._samples.tend()
        is_released = not held <= self._residents.held | self._absences.adapters
        return trained or sampled or is_released or self._absences.can_go_on

    # -- training -----------------------------------------------------------------------------------------------------

    def _train_once(self, lease: Lease) -> bool:
        self._offered, self._chosen = [], []
        self._room = self._residents.room_for_batch(at_most=self._max_adapters)
        held = self._executor.lanes | self._residents.held | self._absences.adapters
        claims = self._journal.claim(lease, with_virtual_time(self._choose), _HEADS_OFFERED, held=held)
        execution = Execution()
        if claims:
            self._previous_was_light = claims[0].kind in _LIGHT
            self._reporter.started(claims)
            crash_point("worker.claimed")
            fit = self._end_poisonous(claims, execution)
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
        """Do for a while what can be done, and commit what has ended by then: nobody waits for the slowest one."""
        try:
            self._executor.go_on(execution)
            if execution.outcomes:
                crash_point("worker.executed")
            committed = self._commit(lease, execution)
        except BaseException:
            # Memory may be ahead of the journal.
            self._executor.drop()
            for claim, _ in execution.begun.values():
                self._residents.forget(claim.lane)
            raise
        if execution.outcomes:
            crash_point("worker.committed")
        for outcome in committed.recorded:
            claim, _ = execution.begun[outcome.request_id]
            self._residents.note_applied(outcome.lane, outcome.seq, num_bytes=claim.payload.size_bytes)
        self._tell(committed, execution)
        if execution.outcomes:
            crash_point("worker.published")
        self._give_back(lease, execution)

    def _choose(self, heads: list[Head]) -> list[Head]:
        self._offered = heads
        if self._room <= 0:
            return []
        self._chosen = choose_batch(
            heads,
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
        self._drop_ended()
        claims: list[Claim] = []
        if self._samples.room > 0:
            claims = self._journal.claim_samples(
                lease, with_virtual_time(self._choose_samples), self._samples.room, under_way=self._samples.under_way
            )
            self._reporter.started(claims)
        if claims:
            crash_point("sampler.claimed")
        execution = Execution()
        fit = self._end_poisonous(claims, execution)
        self._samples.admit(fit, execution)
        self._samples.run_slice(execution)
        if execution.outcomes:
            crash_point("sampler.executed")
        committed = self._commit(lease, execution)
        if execution.outcomes:
            crash_point("sampler.committed")
        self._tell(committed, execution)
        self._give_back(lease, execution)
        return bool(claims) or bool(execution.begun) or self._samples.can_go_on

    def _choose_samples(self, heads: list[Head]) -> list[Head]:
        return choose_samples(
            heads, room=self._samples.room, is_idle=self._samples.is_idle, suspect_from=self._suspect_from
        )

    def _drop_ended(self) -> None:
        """Free what samples hold that were cancelled or are overdue. They have their outcome; their events are left."""
        if self._samples.is_idle:
            return
        failures = self._journal.failed_meanwhile(self._samples.under_way)
        dropped = self._samples.drop(list(failures))
        ended = [outcome_of_failure(claim, failures[claim.request_id]) for claim in dropped]
        self._reporter.ended(ended, self._clock.now())

    # -- both ---------------------------------------------------------------------------------------------------------

    def _end_poisonous(self, claims: list[Claim], execution: Execution) -> list[Claim]:
        """End those that have taken the worker down too often; the others, which are to be executed."""
        fit = []
        for claim in claims:
            if claim.suspicions >= self._max_attempts:
                execution.begun[claim.request_id] = (claim, self._clock.now())
                self._endings.end_poisonous(execution, claim)
            else:
                fit.append(claim)
        return fit

    def _commit(self, lease: Lease, execution: Execution) -> Committed:
        """Record outcomes; those that the journal will never take end as failures, or they would be tried for ever."""
        try:
            committed = self._commit_patiently(lease, execution)
        except StatementFailed as error:
            for outcome in execution.outcomes:
                self._residents.forget(outcome.lane)
            condemn(execution, error)
            committed = self._commit_patiently(lease, execution)
        self._forget_untaken(committed)
        return committed

    def _commit_patiently(self, lease: Lease, execution: Execution) -> Committed:
        """Record outcomes however long the database stays away: the work is done and the lease may still hold.

        Raises:
            LeaseLost: Another epoch holds the mesh, as far as the journal or the keeper knows.
            StorageUnavailable: The database is away and the worker is to end; whoever is next does the work again.
            StatementFailed: The journal will never take them.
        """
        while execution.outcomes:
            try:
                return self._journal.commit(lease, execution.outcomes, execution.records)
            except StorageUnavailable as error:
                if self._stopping:
                    raise
                if self._keeper.current() is not lease:
                    raise LeaseLost(f"mesh {lease.mesh}: epoch {lease.epoch} has ended", mesh=lease.mesh) from error
                count = len(execution.outcomes)
                _log.warning("commit.postponed", error=error.message, retry_s=_COMMIT_RETRY_S, count=count)
                self._clock.sleep(_COMMIT_RETRY_S)
        return Committed()

    def _forget_untaken(self, committed: Committed) -> None:
        """Where an outcome was not taken, memory and journal may differ about that adapter, and about no other one."""
        for untaken, next_step in (
            (committed.ended_before, "what was recorded before stands"),
            (committed.not_held, "it is claimed again"),
        ):
            for outcome in untaken:
                self._residents.forget(outcome.lane)
                _log.warning("outcome.not_taken", op=outcome.request_id, kind=outcome.kind.value, next=next_step)

    def _give_back(self, lease: Lease, execution: Execution) -> None:
        for postponed in execution.postponed:
            retry = postponed.retry
            self._journal.give_back(
                lease,
                [postponed.claim.request_id],
                delay_s=retry.delay_s,
                is_suspect=retry.is_suspect,
                reason=retry.reason,
            )
            self._reporter.retried(postponed.claim, postponed.retry.reason)

    def _tell(self, committed: Committed, execution: Execution) -> None:
        """Say what has ended. Of what had ended before, nobody may have heard; what it came to is not ours to say."""
        ended = [*committed.recorded, *committed.ended_before]
        self._publisher.publish([outcome.request_id for outcome in ended])
        for outcome in committed.recorded:
            self._reporter.ended([outcome], execution.begun[outcome.request_id][1])
