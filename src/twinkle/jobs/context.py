"""What a plan is given: its job, its spec, where it stands, and the ways to do something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from twinkle.core.clock import Clock
from twinkle.core.job import (
    EventKind,
    Job,
    JobCancelled,
    JobEvent,
    JobPaused,
    JobRests,
    JobSignals,
    JsonObject,
    seed_of_text,
)
from twinkle.jobs.door import Door
from twinkle.jobs.files import JobFiles
from twinkle.jobs.tools import Tools

SpecT = TypeVar("SpecT", bound=BaseModel)
OtherT = TypeVar("OtherT", bound=BaseModel)


class Recorder(Protocol):
    """Writes down how far a job is, under the lease of whoever runs it."""

    async def record(
        self,
        *,
        phase: str | None = None,
        progress: JsonObject | None = None,
        saved: JsonObject | None = None,
        events: Sequence[JobEvent] = (),
    ) -> JobSignals:
        """One fenced transaction; what the job's owner wants.

        Raises:
            JobLost: Another runner holds the job, or it has ended.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ContextParts:
    """The ways of one job to do something."""

    door: Door
    files: JobFiles
    tools: Tools
    recorder: Recorder
    clock: Clock


class JobContext(Generic[SpecT]):
    """One attempt at one job, as its plan sees it."""

    def __init__(self, job: Job, spec: SpecT, saved: JsonObject, parts: ContextParts) -> None:
        self.job = job
        self.spec = spec
        self.saved = saved
        """Where the plan stands, as it was last saved; empty at first."""
        self._parts = parts
        self.door = parts.door
        self.files = parts.files
        self.tools = parts.tools
        self._recorder = parts.recorder
        self._clock = parts.clock
        self._progress = dict(job.progress)
        self._was_told = False

    def for_spec(self, spec: OtherT) -> JobContext[OtherT]:
        """The same with another spec, for a plan that goes on as one of another kind; what was saved goes along."""
        other = JobContext(self.job, spec, self.saved, self._parts)
        other._progress, other._was_told = self._progress, self._was_told
        return other

    def seed_of(self, *parts: object) -> int:
        """A seed of 31 bits that follows from the job's own and from what it is for, such as ``("epoch", 2)``."""
        return seed_of_text(":".join(str(part) for part in (self.job.seed, *parts)))

    def now(self) -> float:
        """The time, for what people read. Nothing that is computed may follow from it."""
        return self._clock.now()

    @property
    def has_expired(self) -> bool:
        """Whether the time it was given is over: the plan ends with what there is."""
        return self.job.expires_at is not None and self.job.expires_at <= self._clock.now()

    async def save(
        self,
        saved: JsonObject | None = None,
        *,
        phase: str | None = None,
        done: float | None = None,
        total: float | None = None,
        unit: str | None = None,
        events: Sequence[JobEvent] = (),
        **progress: Any,
    ) -> None:
        """A safe point: what is saved here is what another runner goes on from.

        Args:
            saved: The plan's own small cursor; by default it stays as it was.
            phase: A word for what it does now.
            done: How much of ``total`` is done; it never falls.
            total: How much there is to do.
            unit: Of what, in the plural.
            events: What happened.
            progress: What else people want to see of it, numbers or short texts.

        Raises:
            JobPaused: Its owner wants a pause. Raised once, after everything was written.
            JobCancelled: Its owner cancelled it. Raised once, so that what the plan does then can be saved too.
            JobLost: Another runner holds the job, and nothing was written.
        """
        named = {"done": done, "total": total, "unit": unit, **progress}
        self._progress |= {name: value for name, value in named.items() if value is not None}
        if saved is not None:
            self.saved = saved
        signals = await self._recorder.record(phase=phase, progress=self._progress, saved=saved, events=events)
        if self._was_told:
            return
        self._was_told = signals.cancel or signals.pause
        if signals.cancel:
            raise JobCancelled(f"job {self.job.id} was cancelled")
        if signals.pause:
            raise JobPaused(f"job {self.job.id} was paused")

    async def event(self, kind: EventKind, message: str, **data: Any) -> None:
        """Tell the job's owner something. It is no safe point; raises ``JobLost`` as :meth:`save` does."""
        await self._recorder.record(events=[JobEvent(kind=kind, message=message, data=data)])

    def rest(self, seconds: float) -> JobRests:
        """What to raise, after a save, when there is nothing to do for a while: the job leaves its runner's place."""
        return JobRests(seconds)
