"""The sampling half of a mesh worker: slices of continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import Claim
from twinkle.scheduler.charges import charge_of_tokens
from twinkle.storage.blobs import BlobStore
from twinkle.storage.payloads import read_payload
from twinkle.workers.endings import Endings, Execution, refuse_rejected
from twinkle.workers.engine import Engine, SampleOutput, State
from twinkle.workers.requests import read_sample
from twinkle.workers.sampler_weights import SamplerWeights
from twinkle.workers.token_reports import TokenReports

_SLICE_S = 0.1


@dataclass(frozen=True)
class _UnderWay:
    """A sample the engine has taken in."""

    claim: Claim
    started_at: float
    num_prompt_tokens: int


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
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._blobs = blobs
        self._clock = clock
        self._slots = slots
        self._endings = endings
        self._reports = reports
        self._cache_groups = cache_groups
        self._under_way: dict[str, _UnderWay] = {}

    @property
    def room(self) -> int:
        """How many more sequences may be drawn at once."""
        return max(self._slots - sum(one.claim.num_sequences for one in self._under_way.values()), 0)

    @property
    def under_way(self) -> list[str]:
        """The futures it works on."""
        return list(self._under_way)

    @property
    def is_idle(self) -> bool:
        """Whether no sample is under way."""
        return not self._under_way

    @property
    def max_suspicions(self) -> int:
        """How suspect the most suspect of the samples under way is."""
        return max((one.claim.suspicions for one in self._under_way.values()), default=0)

    def admit(self, claims: list[Claim], execution: Execution) -> None:
        """Start samples; those whose request cannot be served end at once."""
        for claim in claims:
            try:
                refuse_rejected(claim)
                request = read_sample(read_payload(self._blobs, claim.payload))
                self._engine.add_sample(
                    claim.request_id,
                    self._weights.of(claim.lane),
                    request,
                    cache_group=self._cache_groups.of(claim.tenant),
                )
            except Exception as error:  # noqa: BLE001 - the border: whatever it is, it is this operation's
                self._endings.fail(execution, claim, error)
                continue
            num_prompt_tokens = len(request.prompt_tokens())
            self._under_way[claim.request_id] = _UnderWay(claim, self._clock.now(), num_prompt_tokens)
            if request.listener is not None:
                self._reports.begin(claim.request_id, request.listener, num_samples=request.num_samples)

    def run_slice(self, execution: Execution) -> None:
        """Advance everything under way until something ends or the slice is over."""
        ends_at = self._clock.now() + _SLICE_S
        while self._under_way and not execution.outcomes and self._clock.now() < ends_at:
            try:
                outputs = self._engine.step_samples()
            except Exception as error:  # noqa: BLE001 - the border: the device failed, so every sample under way did
                self._fail_all(execution, error)
                return
            for output in outputs:
                self._finish(execution, output)
            self._reports.report()

    def tend(self) -> None:
        """Let go of weights that nobody can sample from any more. Called between batches."""
        self._weights.tend()

    def drop(self, request_ids: list[str]) -> list[Claim]:
        """Stop some samples for ever; the claims of those that were under way."""
        dropped = []
        for request_id in request_ids:
            under_way = self._under_way.pop(request_id, None)
            if under_way is not None:
                self._engine.drop_sample(request_id)
                self._reports.end(request_id)
                dropped.append(under_way.claim)
        return dropped

    def abandon(self) -> list[str]:
        """Stop everything under way; the futures that go back to the journal."""
        request_ids = list(self._under_way)
        self._engine.drop_samples()
        self._reports.end_all()
        self._under_way.clear()
        return request_ids

    def _finish(self, execution: Execution, output: SampleOutput) -> None:
        under_way = self._under_way.pop(output.request_id)
        self._reports.end(output.request_id)
        if output.result is None:
            error = output.error or RuntimeError("the engine ended a sample with neither result nor error")
            self._endings.fail(execution, under_way.claim, error)
            return
        elapsed_s = self._clock.now() - under_way.started_at
        try:
            self._endings.succeed(
                execution,
                under_way.claim,
                output.result,
                device_s=elapsed_s,
                num_tokens=output.num_tokens,
                charge=charge_of_tokens(under_way.num_prompt_tokens + output.num_tokens),
            )
        except StorageUnavailable as error:
            self._endings.fail(execution, under_way.claim, error)

    def _fail_all(self, execution: Execution, error: Exception) -> None:
        for under_way in self._under_way.values():
            self._endings.fail(execution, under_way.claim, error)
        self.abandon()
