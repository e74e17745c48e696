"""The sampling half of a mesh worker: slices of continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic

from twinkle.core.clock import Clock
from twinkle.core.operation import Claim, Payload
from twinkle.scheduler.fairness import charge_of_tokens
from twinkle.scheduler.token_stream import ListenedSample
from twinkle.storage.blobs import BlobStore
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.sampling import check_prompt_and_scores
from twinkle.workers.endings import Endings, Execution, of_a_batch, refuse_rejected
from twinkle.workers.engine import Engine, SampleOutput, State
from twinkle.workers.sampling.token_reports import TokenReports
from twinkle.workers.sampling.weights import Held, SamplerWeights
from twinkle.workers.steps import Job, Steps, Transfers

SLICE_S = 0.1
"""How long samples are drawn at most before training is asked again."""


@dataclass(eq=False)
class _UnderWay:
    """A sample in our hands: what is known of it once the engine has taken it in, and what its weights took."""

    claim: Claim
    started_at: float
    num_prompt_tokens: int = 0
    weights_charge: int = 0
    weights: Held | None = None

    def charge(self, num_tokens: int) -> int:
        """What it is charged once so many tokens are drawn."""
        return charge_of_tokens(self.num_prompt_tokens + num_tokens) + self.weights_charge


@dataclass(frozen=True)
class _Leaving:
    """A sample whose result is being stored."""

    of: _UnderWay
    job: Job[Payload]
    elapsed_s: float
    num_tokens: int

    @property
    def charge(self) -> int:
        """What it is charged: all of it is drawn."""
        return self.of.charge(self.num_tokens)


class CacheGroups:
    """Who shares computed prompts with whom: each tenant with itself, and with those the operator put into its group.

    Args:
        tenants_by_group: Names of tenants, by a name for them together; one tenant is in one group at most.
        name_of_tenant: From a tenant's id; asked once for each, and only if there are groups.
    """

    def __init__(self, tenants_by_group: Mapping[str, Sequence[str]], name_of_tenant: Callable[[str], str]) -> None:
        self._group_by_name = {name: group for group, names in tenants_by_group.items() for name in names}
        self._name_of_tenant = cache(name_of_tenant)

    def of(self, tenant: str) -> str:
        """The group of a tenant. No name of a group is taken for a tenant's id: they begin otherwise."""
        group = self._group_by_name.get(self._name_of_tenant(tenant)) if self._group_by_name else None
        return f"tenant:{tenant}" if group is None else f"group:{group}"


class SampleDesk(Generic[State]):
    """Takes claimed samples in, advances them a slice at a time, hands back outcomes."""

    def __init__(
        self,
        *,
        engine: Engine[State],
        weights: SamplerWeights[State],
        blobs: BlobStore,
        clock: Clock,
        slots: int,
        endings: Endings,
        reports: TokenReports[State],
        cache_groups: CacheGroups,
        transfers: Transfers,
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._blobs = blobs
        self._clock = clock
        self._slots = slots
        self._endings = endings
        self._reports = reports
        self._cache_groups = cache_groups
        self._transfers = transfers
        self._entering: dict[str, tuple[_UnderWay, Job[ListenedSample]]] = {}
        self._drawing: dict[str, _UnderWay] = {}
        self._leaving: dict[str, _Leaving] = {}
        weights.in_use = self._weights_in_use

    @property
    def room(self) -> int:
        """How many more sequences may be drawn at once."""
        return max(self._slots - sum(claim.num_sequences for claim in self._placed), 0)

    @property
    def tenants(self) -> set[str]:
        """Whose samples are drawn, or are about to be."""
        return {claim.tenant for claim in self._placed}

    @property
    def _placed(self) -> list[Claim]:
        """The samples that have places, or are about to."""
        return [one.claim for one in self._with_places()]

    def _with_places(self) -> list[_UnderWay]:
        return [*self._drawing.values(), *(entering for entering, _ in self._entering.values())]

    def _weights_in_use(self) -> list[Held]:
        return [one.weights for one in self._with_places() if one.weights is not None]

    @property
    def under_way(self) -> list[str]:
        """The futures it works on."""
        return [*self._entering, *self._drawing, *self._leaving]

    @property
    def is_idle(self) -> bool:
        """Whether no sample is under way."""
        return not (self._entering or self._drawing or self._leaving)

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to do now, and nothing to wait for first."""
        if any(job.can_go_on for _, job in self._entering.values()):
            return True
        return bool(self._drawing) or any(leaving.job.can_go_on for leaving in self._leaving.values())

    @property
    def max_suspicions(self) -> int:
        """How suspect the most suspect of the samples under way is."""
        return max((claim.suspicions for claim in self._placed), default=0)

    def admit(self, claims: list[Claim], execution: Execution) -> None:
        """Start samples; those whose request cannot be served end at once."""
        now = self._clock.now()
        for claim in claims:
            entering = _UnderWay(claim, now)
            self._entering[claim.request_id] = (entering, Job(self._enter(entering)))
        self._take_steps(execution)

    def run_slice(self, execution: Execution, *, longest_s: float = SLICE_S) -> None:
        """Advance everything under way until something ends or the slice is over; of no length it draws nothing."""
        self._take_steps(execution)
        ends_at = self._clock.now() + longest_s
        while self._drawing and not execution.outcomes and self._clock.now() < ends_at:
            try:
                outputs = self._engine.step_samples()
            except Exception as error:  # noqa: BLE001 - the border: the device failed, so every sample under way did
                self._fail_drawing(execution, error)
                return
            for output in outputs:
                self._finish(execution, output)
            self._reports.report()

    def _enter(self, entering: _UnderWay) -> Steps[ListenedSample]:
        claim = entering.claim
        refuse_rejected(claim)
        request = parse_body(ListenedSample, (yield from self._transfers.read(self._blobs, claim.payload)))
        check_prompt_and_scores(request)
        weights = yield from self._weights.of(claim.lane)
        entering.weights_charge, entering.weights = weights.charge, weights.held
        group = self._cache_groups.of(claim.tenant)
        self._engine.add_sample(claim.request_id, weights.state, request, cache_group=group)
        entering.num_prompt_tokens = request.num_prompt_tokens
        return request

    def _take_steps(self, execution: Execution) -> None:
        """Let samples go on that are on their way into the engine, or out of it."""
        ends_at = self._clock.now() + SLICE_S
        for request_id, (entering, job) in list(self._entering.items()):
            while job.can_go_on and self._clock.now() < ends_at:
                job.go_on()
            if not job.has_ended:
                continue
            del self._entering[request_id]
            if job.error is not None:
                self._fail(execution, entering, job.error)
                continue
            self._drawing[request_id] = entering
            if job.result.listener is not None:
                self._reports.begin(request_id, job.result.listener, num_samples=job.result.num_samples)
        for request_id, leaving in list(self._leaving.items()):
            if leaving.job.can_go_on:
                leaving.job.go_on()
            if leaving.job.has_ended:
                del self._leaving[request_id]
                self._end(execution, leaving)

    def drop(self, request_ids: list[str]) -> list[tuple[Claim, int]]:
        """Stop some samples for ever; the claims of those that were under way, and what each is charged until here."""
        dropped = []
        for request_id in request_ids:
            charge = self._charge_so_far(request_id)
            under_way = self._forget(request_id)
            if under_way is not None:
                self._engine.drop_sample(request_id)
                self._reports.end(request_id)
                dropped.append((under_way.claim, charge))
        return dropped

    def abandon(self) -> list[str]:
        """Stop everything under way; the futures that go back to the journal."""
        request_ids = self.under_way
        self._engine.drop_samples()
        self._reports.end_all()
        self._entering.clear()
        self._drawing.clear()
        self._leaving.clear()
        return request_ids

    def _charge_so_far(self, request_id: str) -> int:
        """What the device has done for a sample that nobody wants any more."""
        if request_id in self._leaving:
            return self._leaving[request_id].charge
        under_way = self._drawing.get(request_id)
        if under_way is None:
            return 1
        pieces = self._engine.drawn_so_far(request_id, [0] * under_way.claim.num_sequences)
        return under_way.charge(sum(len(piece.tokens) for piece in pieces))

    def _forget(self, request_id: str) -> _UnderWay | None:
        if request_id in self._entering:
            return self._entering.pop(request_id)[0]
        if request_id in self._leaving:
            return self._leaving.pop(request_id).of
        return self._drawing.pop(request_id, None)

    def _finish(self, execution: Execution, output: SampleOutput) -> None:
        under_way = self._drawing.pop(output.request_id)
        self._reports.end(output.request_id)
        if output.result is None:
            error = output.error or RuntimeError("the engine ended a sample with neither result nor error")
            self._fail(execution, under_way, error)
            return
        job = Job(self._endings.store(under_way.claim, output.result))
        elapsed_s = self._clock.now() - under_way.started_at
        leaving = _Leaving(under_way, job, elapsed_s=elapsed_s, num_tokens=output.num_tokens)
        job.go_on()
        if job.has_ended:
            self._end(execution, leaving)
        else:
            self._leaving[output.request_id] = leaving

    def _end(self, execution: Execution, leaving: _Leaving) -> None:
        claim, job = leaving.of.claim, leaving.job
        if job.error is not None:
            self._fail(execution, leaving.of, job.error)
            return
        execution.begun[claim.request_id] = (claim, leaving.of.started_at)
        self._endings.succeed(
            execution,
            claim,
            job.result,
            device_s=leaving.elapsed_s,
            num_tokens=leaving.num_tokens,
            charge=leaving.charge,
        )

    def _fail(self, execution: Execution, under_way: _UnderWay, error: Exception) -> None:
        execution.begun[under_way.claim.request_id] = (under_way.claim, under_way.started_at)
        self._endings.fail(execution, under_way.claim, error, charge=max(under_way.weights_charge, 1))

    def _fail_drawing(self, execution: Execution, error: Exception) -> None:
        error = of_a_batch(error, len(self._drawing))
        for request_id, under_way in list(self._drawing.items()):
            del self._drawing[request_id]
            self._reports.end(request_id)
            self._fail(execution, under_way, error)
        self._engine.drop_samples()
