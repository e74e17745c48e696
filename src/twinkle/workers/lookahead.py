"""What a worker claims while its device is at work: what follows of one adapter, or the next batch as a whole.

The claim, and the reading of requests, run on the clerk's thread, behind the commit of what had ended before. What
follows on an operation that fails, or whose outcome is not taken, goes back to the journal as if it had never been
claimed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from twinkle.core.errors import StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim
from twinkle.core.process.crash import crash_point
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.scheduler.fusion import Places, beside, choose_ahead
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.turns import Followed, Head
from twinkle.workers.clerk import Clerk
from twinkle.workers.endings import Execution
from twinkle.workers.requests import ReadAhead, Requests
from twinkle.workers.under_way import FOLLOWED

_HEADS_OFFERED = 256

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What was claimed ahead, the requests that were read of it, and what it was chosen from."""

    claims: list[Claim] = field(default_factory=list)
    bodies: Mapping[str, ReadAhead] = field(default_factory=dict)
    offered: list[Head] = field(default_factory=list)
    unfit: list[Claim] = field(default_factory=list)
    """What does not stand right behind what is in hand: one between has ended while it was being claimed."""


class Lookahead:
    """What was claimed ahead, from the claim until it is taken; one look at a time.

    The step loop asks whether a look is worth it (:meth:`would_look`), has it done beside the device (:meth:`look`),
    says what has failed meanwhile (:meth:`spoil`), and takes what was found (:meth:`take`) before it looks again.
    All but the claim itself runs on the step loop's thread.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        clerk: Clerk,
        requests: Requests,
        max_adapters: int,
        max_tokens: int,
        min_tokens: int,
        suspect_from: int,
    ) -> None:
        """Hold nothing yet.

        Args:
            journal: Where it claims.
            clerk: On whose thread.
            requests: Read what was claimed.
            max_adapters: Of one batch.
            max_tokens: Of one batch.
            min_tokens: Beyond as many a batch grows only as far as no tenant is served before its turn.
            suspect_from: Operations that have lost as many workers are not claimed ahead.
        """
        self._journal = journal
        self._clerk = clerk
        self._requests = requests
        self._max_adapters = max_adapters
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._suspect_from = suspect_from
        self.has_others = False
        """Whether adapters that nobody works on are likely to have something waiting."""
        self.has_next = False
        """Whether something is likely to wait behind what is in hand."""
        self._is_looking = False
        self._found: Ahead | None = None
        self._followed: set[str] = set()
        self._has_full_lanes = False
        self._spoilt: set[str] = set()

    @property
    def has_claims(self) -> bool:
        """Whether something was claimed that is to be taken."""
        return self._found is not None

    @property
    def is_under_way(self) -> bool:
        """Whether something was claimed, or is being claimed: the device will not rest."""
        return self._is_looking or self._found is not None

    @property
    def lanes(self) -> set[str]:
        """Those of what was claimed and not taken yet."""
        return set() if self._found is None else {claim.lane for claim in self._found.claims}

    def would_look(self, followed: Collection[Followed]) -> bool:
        """Whether something is likely to be found, and is not being looked for; the lanes in hand are ``followed``."""
        if not followed or self._is_looking or self._found is not None:
            return False
        return self.has_others or (self.has_next and any(lane.room > 0 for lane in followed))

    def look(self, lease: Lease, *, held: Collection[str], followed: Collection[Followed], places: Places) -> None:
        """Have it looked what is next. Only where :meth:`would_look`.

        Args:
            lease: The caller's.
            held: Lanes whose heads are not to be claimed.
            followed: Those of them whose operations are in hand.
            places: Which adapters of others may come to the device beside those at work.
        """
        self._is_looking = True
        self._followed, self._spoilt = {lane.lane for lane in followed}, set()
        self._has_full_lanes = any(lane.room == 0 for lane in followed)
        self._clerk.hand(partial(self._claim, lease, held, followed, places), self._note, aside=True)

    def take(self, execution: Execution, passing: Sequence[Claim] = ()) -> Ahead:
        """What was found, once. What followed on something that has failed meanwhile is returned.

        While others' passes are half through the model (``passing``), those are taken that may be begun beside them;
        the others wait until they can go through it together.
        """
        found, self._found = self._found, None
        if found is None:
            return Ahead()
        crash_point("worker.taken_ahead")
        execution.returned += found.unfit
        claims = found.claims
        if self._spoilt:
            execution.returned += [claim for claim in claims if claim.lane in self._spoilt]
            claims = [claim for claim in claims if claim.lane not in self._spoilt]
        if not passing:
            return Ahead(claims=claims, bodies=found.bodies, offered=found.offered)
        heads = [head for head in found.offered if head.lane not in self._followed]
        fit = {head.request_id for head in beside(heads, passing, large_tokens=self._max_tokens)}
        taken = [claim for claim in claims if claim.request_id in fit]
        if len(taken) < len(claims):
            waiting = [claim for claim in claims if claim not in taken]
            self._found = replace(found, claims=waiting, unfit=[])
        return replace(found, claims=taken, unfit=[])

    def spoil(self, execution: Execution) -> None:
        """Operations have failed, or go back: nothing is to follow on them."""
        for outcome in execution.outcomes:
            if outcome.failure is not None:
                self.spoil_lane(outcome.lane)
        for claim in (*(postponed.claim for postponed in execution.postponed), *execution.returned):
            self.spoil_lane(claim.lane)

    def spoil_lane(self, lane: str) -> None:
        """Nothing is to follow on what is in hand of a lane."""
        if lane in self._followed:
            self._spoilt.add(lane)

    def drop(self) -> list[Claim]:
        """Forget what was found; what goes back to the journal. The clerk is at nothing any more."""
        found, self._found = self._found, None
        self._is_looking = self.has_next = self.has_others = False
        return [] if found is None else [*found.claims, *found.unfit]

    def _claim(self, lease: Lease, held: Collection[str], followed: Collection[Followed], places: Places) -> Ahead:
        """On the clerk's thread."""
        offered: list[Head] = []
        chosen: list[Head] = []

        def choose(heads: list[Head]) -> list[Head]:
            offered[:] = heads
            chosen[:] = choose_ahead(
                heads,
                self._followed,
                max_adapters=self._max_adapters,
                max_tokens=self._max_tokens,
                min_tokens=self._min_tokens,
                suspect_from=self._suspect_from,
                places=places,
            )
            return chosen

        claims: list[Claim] = []
        try:
            if self._journal.waiting(lease).heads:
                choose_first = with_virtual_time(choose)
                claims = self._journal.claim(lease, choose_first, _HEADS_OFFERED, held=held, followed=followed)
        except StorageUnavailable as error:
            _log.warning("claim.postponed", error=error.message, next="it is claimed when the device has nothing to do")
            return Ahead()
        if claims:
            crash_point("worker.claimed_ahead")
        claims, unfit = in_line(claims, followed)
        bodies = {}
        for claim in claims:
            body = self._requests.read_ahead(claim) if claim.kind in FOLLOWED else None
            if body is not None:
                bodies[claim.request_id] = body
        return Ahead(claims=claims, bodies=bodies, offered=offered, unfit=unfit)

    def _note(self, found: Ahead) -> None:
        self._is_looking = False
        taken = {claim.request_id for claim in found.claims}
        self.has_others = any(
            head.lane not in self._followed and head.request_id not in taken for head in found.offered
        )
        is_cut = any(head.has_next or head.request_id not in taken for head in found.offered)
        self.has_next = self._has_full_lanes or is_cut
        if found.claims or found.unfit:
            self._found = found


def in_line(claims: list[Claim], followed: Collection[Followed]) -> tuple[list[Claim], list[Claim]]:
    """Those that may be begun one behind the other, and the others."""
    next_seq = {lane.lane: lane.last_seq + 1 for lane in followed}
    fit, unfit = [], []
    for claim in claims:
        if next_seq.get(claim.lane, claim.seq) == claim.seq:
            next_seq[claim.lane] = claim.seq + 1
            fit.append(claim)
        else:
            unfit.append(claim)
    return fit, unfit
