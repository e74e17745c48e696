"""The loop of a mesh worker: claim, execute, commit, report, until a claim comes back empty."""

from __future__ import annotations

import threading
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.crash import crash_point
from twinkle.core.errors import LeaseLost, StatementFailed, StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim, OperationKind
from twinkle.scheduler.channels import CompletionPublisher
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

_COMMIT_RETRY_S = 0.5
_HEADS_OFFERED = 256
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
                if not self._work_once(lease):
                    return False
            return not self._stopping

    def close(self) -> None:
        """Finish the batch at hand, give back what is under way, snapshot everything."""
        self._stopping = True
        with self._working:
            lease = self._keeper.current()
            if lease is not None:
                try:
                    self._journal.give_back(lease, self._samples.abandon(), is_blameless=True)
                except (LeaseLost, StorageUnavailable) as error:
                    _log.warning("worker.give_back_failed", error=error.message, next="the next holder takes them")
            self._residents.save_all()
            self._reporter.close()

    def _enter(self, lease: Lease) -> None:
        """Begin a new epoch with nothing: the mesh was not ours in between, and what we held was not ours since."""
        if lease.epoch != self._epoch:
            self._residents.forget_all()
            self._samples.abandon()
            self._epoch = lease.epoch

    def _work_once(self, lease: Lease) -> bool:
        try:
            trained = self._train_once(lease)
            sampled = self._sample_once(lease)
        except LeaseLost as error:
            _log.warning("worker.fenced", error=error.message)
            self._residents.forget_all()
            self._samples.abandon()
            self._keeper.give_up()
            return False
        except StorageUnavailable as error:
            _log.warning("worker.storage_unavailable", error=error.message, retry_s=_COMMIT_RETRY_S)
            self._clock.sleep(_COMMIT_RETRY_S)
            return True
        self._absences.park()
        self._samples.tend()
        return trained or sampled

    # -- training -----------------------------------------------------------------------------------------------------

    def _train_once(self, lease: Lease) -> bool:
        self._offered, self._chosen = [], []
        self._room = self._residents.room_for_batch(at_most=self._max_adapters)
        claims = self._journal.claim(lease, self._choose, _HEADS_OFFERED)
        if not claims:
            self._previous_was_light = False
            return False
        self._previous_was_light = claims[0].kind in _LIGHT
        started_at = self._clock.now()
        self._reporter.started(claims)
        crash_point("worker.claimed")
        execution = Execution()
        fit = self._end_poisonous(claims, execution)
        try:
            self._residents.make_room(
                [claim.lane for claim in fit], lambda: places_in_line(self._offered, self._chosen)
            )
            self._executor.execute(fit, execution)
            crash_point("worker.executed")
            committed = self._commit(lease, execution)
        except BaseException:
            # Memory may be ahead of the journal.
            for claim in claims:
                self._residents.forget(claim.lane)
            raise
        crash_point("worker.committed")
        num_bytes = {claim.request_id: claim.payload.size_bytes for claim in claims}
        for outcome in committed.recorded:
            self._residents.note_applied(outcome.lane, outcome.seq, num_bytes=num_bytes[outcome.request_id])
        self._tell(committed, started_at)
        crash_point("worker.published")
        self._give_back(lease, execution)
        return True

    def _choose(self, heads: list[Head]) -> list[Head]:
        self._offered = heads
        self._chosen = choose_batch(
            heads,
            max_adapters=self._room,
            max_tokens=self._max_tokens,
            min_tokens=self._min_tokens,
            previous_was_light=self._previous_was_light,
            suspect_from=self._suspect_from,
            has_suspect=self._samples.max_suspicions >= self._suspect_from,
        )
        return self._chosen

    # -- sampling -----------------------------------------------------------------------------------------------------

    def _sample_once(self, lease: Lease) -> bool:
        self._drop_ended()
        claims: list[Claim] = []
        if self._samples.room > 0:
            claims = self._journal.claim_samples(
                lease, self._choose_samples, self._samples.room, under_way=self._samples.under_way
            )
            self._reporter.started(claims)
        if claims:
            crash_point("sampler.claimed")
        execution = Execution()
        fit = self._end_poisonous(claims, execution)
        started_at = self._clock.now()
        self._samples.admit(fit, execution)
        self._samples.run_slice(execution)
        if execution.outcomes:
            crash_point("sampler.executed")
        committed = self._commit(lease, execution)
        if execution.outcomes:
            crash_point("sampler.committed")
        self._tell(committed, started_at)
        self._give_back(lease, execution)
        return bool(claims) or not self._samples.is_idle

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

    def _tell(self, committed: Committed, started_at: float) -> None:
        """Say what has ended. Of what had ended before, nobody may have heard; what it came to is not ours to say."""
        ended = [*committed.recorded, *committed.ended_before]
        self._publisher.publish([outcome.request_id for outcome in ended])
        self._reporter.ended(committed.recorded, started_at)
