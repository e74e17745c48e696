"""The sampling half of the step loop: samples are claimed, drawn for a while, and what has ended is recorded."""

from __future__ import annotations

from functools import partial
from typing import Generic

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim
from twinkle.core.process.crash import crash_point
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.scheduler.fusion import choose_samples
from twinkle.storage.disks import Disks
from twinkle.storage.journal.executing import Waiting
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.turns import Head
from twinkle.workers.clerk import Clerk
from twinkle.workers.endings import Endings, Execution, outcome_of_failure
from twinkle.workers.engine import State
from twinkle.workers.recording import Recorded, Recorder
from twinkle.workers.report import OperationReporter
from twinkle.workers.sampling.sampling import SLICE_S, SampleDesk

_SAMPLES_OFFERED = 16
_SELDOM_S = 0.05
_SHORTEST_S = 0.001
_LONGEST_S = 1.0
_NEVER = float("-inf")

_log = structlog.get_logger()


class DeviceShare:
    """How long samples may be drawn now, so that sampling has ``weight`` times the device that training has.

    What it did not use while it had nothing to draw is no credit; what it has overdrawn, since a step is never cut
    short, training gets before it is its turn again. Where nothing trains it has the device to itself.
    """

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._due_s = 0.0

    def turn_s(self, *, trained_s: float | None, draws: bool = True) -> float:
        """After training has had its turn. 0: it is training's turn again.

        Args:
            trained_s: Of so many seconds; ``None`` where nothing trains.
            draws: Whether there is anything to draw.
        """
        if trained_s is None:
            self._due_s = 0.0
            return SLICE_S
        # A turn too short to be measured is one all the same.
        own_s = max(trained_s, _SHORTEST_S) * self._weight
        self._due_s = min(self._due_s + own_s, _LONGEST_S if draws else 0.0)
        return max(self._due_s, 0.0)

    def note(self, drawn_s: float) -> None:
        """Samples were drawn for so long."""
        self._due_s -= drawn_s


class SampleRounds(Generic[State]):
    """One round after each step of training. On the step loop's thread, but for what the clerk does."""

    def __init__(
        self,
        *,
        journal: Journal,
        clerk: Clerk,
        samples: SampleDesk[State],
        endings: Endings,
        recorder: Recorder[State],
        reporter: OperationReporter,
        clock: Clock,
        disks: Disks,
        suspect_from: int,
        weight: float,
    ) -> None:
        self._journal = journal
        self._share = DeviceShare(weight)
        self._disks = disks
        self._clerk = clerk
        self._samples = samples
        self._endings = endings
        self._recorder = recorder
        self._reporter = reporter
        self._clock = clock
        self._suspect_from = suspect_from
        self._num_handed = 0
        """How many executions and looks the clerk has: until they are noted, a sample would be claimed twice."""
        self._asked_at = _NEVER
        self._none_waits = False
        """Whether the journal has just said so."""
        self._found: list[Claim] = []

    @property
    def has_claims(self) -> bool:
        """Whether samples were claimed that are to be taken in."""
        return bool(self._found)

    def ring(self) -> None:
        """Something new waits. On any thread."""
        self._asked_at = _NEVER
        self._none_waits = False

    def waiting(self, lease: Lease) -> Waiting:
        """What waits in the journal: where no sample does, this round's claim and the next look are spared."""
        # Noted first: whoever rings meanwhile has the last word.
        self._none_waits, self._asked_at = True, self._clock.now()
        waiting = self._journal.waiting(lease)
        if waiting.samples:
            self.ring()
        return waiting

    def drop(self) -> list[Claim]:
        """Forget what was claimed and not taken in; what goes back to the journal. The clerk is at nothing any more."""
        found, self._found = self._found, []
        self._num_handed = 0
        return found

    def look(self, lease: Lease) -> None:
        """Have it looked for samples while the device trains, every now and then: whoever submits one rings."""
        now = self._clock.now()
        is_known = self._num_handed > 0 or self.has_claims or now < self._asked_at + _SELDOM_S
        if is_known or not self._samples.is_idle:
            return
        self._asked_at = now
        self._num_handed += 1
        self._clerk.hand(partial(self._claim_if_possible, lease), self._note_claims, aside=True)

    def work_once(self, lease: Lease, *, is_training: bool, trained_s: float | None = None) -> bool:
        """Claim, draw for a while, have recorded what has ended; whether there is more to do now.

        Args:
            lease: The caller's.
            is_training: Whether the device has passes at hand, which do not wait until it is known that nobody samples.
            trained_s: How long it has just trained; ``None`` where nothing trains.
        """
        self._drop_ended(lease)
        claims, self._found = self._found, []
        is_left_to_look = is_training and self._samples.is_idle
        none_waits, self._none_waits = self._none_waits, False
        if not (claims or self._num_handed or is_left_to_look or none_waits):
            claims = self._claim(lease)
        draws = bool(claims) or not self._samples.is_idle
        turn_s = self._share.turn_s(trained_s=trained_s, draws=draws)
        if not draws:
            return False
        self._reporter.started(claims)
        if claims:
            crash_point("sampler.claimed")
        execution = Execution()
        fit = self._endings.end_poisonous(claims, execution)
        self._samples.admit(fit, execution)
        began_at = self._clock.now()
        self._samples.run_slice(execution, longest_s=turn_s)
        self._share.note(self._clock.now() - began_at)
        if not execution.is_empty:
            self._record(lease, execution)
        return bool(claims) or bool(execution.begun) or self._samples.can_go_on

    def _record(self, lease: Lease, execution: Execution) -> None:
        self._num_handed += 1
        try:
            self._clerk.hand(
                partial(self._recorder.record, lease, execution, half="sampler"), self._note_ended, aside=False
            )
        except BaseException:
            # They are in nobody's hands, and are claimed again.
            self._num_handed -= 1
            raise

    def _claim_if_possible(self, lease: Lease) -> list[Claim]:
        try:
            return self._claim(lease)
        except StorageUnavailable as error:
            _log.warning("claim.postponed", error=error.message, next="it is claimed later")
            return []

    def _claim(self, lease: Lease) -> list[Claim]:
        if self._disks.is_critical or not self._journal.waiting(lease).samples:
            return []
        # Without room there still is some for tenants that have nothing there.
        offered = max(self._samples.room, _SAMPLES_OFFERED)
        return self._journal.claim_samples(
            lease, with_virtual_time(self._choose), offered, under_way=self._samples.under_way
        )

    def _choose(self, heads: list[Head]) -> list[Head]:
        return choose_samples(
            heads,
            room=self._samples.room,
            is_idle=self._samples.is_idle,
            suspect_from=self._suspect_from,
            drawing=self._samples.tenants,
        )

    def _note_claims(self, claims: list[Claim]) -> None:
        self._num_handed -= 1
        self._found = claims

    def _note_ended(self, recorded: Recorded) -> None:
        self._num_handed -= 1
        self._recorder.note(recorded)

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
