"""A job as it goes: a bar on a terminal, a line now and then elsewhere, documents for machines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from twinkle.cli.console import say
from twinkle.cli.exit_codes import EXIT_JOB_CANCELLED, EXIT_JOB_FAILED
from twinkle.cli.table import plain_console
from twinkle.client import Job
from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.bodies.jobs import JobEventInfo, JobStanding

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 1.0
_MAX_EXIT_CODE = 255
_SHOWN_BY_PROGRESS = "metrics"


class _View(Protocol):
    """Where a job is shown."""

    poll_s: float

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, event: JobEventInfo) -> None: ...

    def standing(self, job: JobStanding) -> None: ...

    def end(self, job: JobStanding) -> None: ...


@dataclass(frozen=True)
class Follower:
    """Shows a job until it has ended."""

    job: Job
    as_json: bool = False
    after: int = 0

    def run(self) -> JobStanding:
        """The job when it has ended. Blocks; Ctrl-C raises ``KeyboardInterrupt`` and does nothing to the job."""
        after = self.after
        with self._view() as view:
            while True:
                news = self.job.news(after=after, wait_s=view.poll_s)
                for event in news.events:
                    after = event.number
                    view.event(event)
                view.standing(news.job)
                if news.job.is_final and not news.events:
                    break
        view.end(news.job)
        return news.job

    def _view(self) -> _View:
        if self.as_json:
            return _Documents()
        return _Bar() if plain_console().is_terminal else Lines()


class _Documents:
    """One JSON document a line."""

    poll_s = 20.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def event(self, event: JobEventInfo) -> None:
        say(json_line("event", event))

    def standing(self, job: JobStanding) -> None:
        return

    def end(self, job: JobStanding) -> None:
        say(json_line("job", job))


class Lines:
    """What happens, and how far it is every ten seconds at most."""

    poll_s = _LINE_EVERY_S

    def __init__(self, tell: Callable[[str], None] = say, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._told_at = clock()
        self._told = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def event(self, event: JobEventInfo) -> None:
        """Tell it, unless it is only a number of many."""
        if event.kind != _SHOWN_BY_PROGRESS:
            self._tell(event_line(event))

    def standing(self, job: JobStanding) -> None:
        """Tell how far it is, if the last time is long ago and it is further now."""
        words = progress_words(job)
        if words and words != self._told and self._clock() - self._told_at >= _LINE_EVERY_S:
            self._tell(words)
            self._told, self._told_at = words, self._clock()

    def end(self, job: JobStanding) -> None:
        """Tell what came of it."""
        self._tell(ending_words(job))


class _Bar:
    """A bar that stays at the bottom; what happens is written above it."""

    poll_s = _BAR_EVERY_S

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            TimeElapsedColumn(),
            console=plain_console(),
            transient=True,
        )
        self._task = self._progress.add_task("queued", total=None, words="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def event(self, event: JobEventInfo) -> None:
        if event.kind != _SHOWN_BY_PROGRESS:
            self._progress.console.print(event_line(event))

    def standing(self, job: JobStanding) -> None:
        self._progress.update(
            self._task,
            description=job.phase or job.state,
            completed=_number(job.progress.get("done")) or 0,
            total=_number(job.progress.get("total")),
            words=progress_words(job),
        )

    def end(self, job: JobStanding) -> None:
        say(ending_words(job))


def json_line(kind: str, body: ResponseBody) -> str:
    """A body as a document of one line that says what it is."""
    return json.dumps({"type": kind, **body.model_dump(mode="json")})


def event_line(event: JobEventInfo) -> str:
    """An event as people read it."""
    at = time.strftime("%H:%M:%S", time.localtime(event.time))
    return f"{at} {event.kind}: {event.message}{_facts(event)}"


def progress_words(job: JobStanding, *, now: float | None = None) -> str:
    """How far a job is: steps, loss, speed, what is left, and the time in line apart from that on the device."""
    progress = job.progress
    done, total = _number(progress.get("done")), _number(progress.get("total"))
    words = []
    if done is not None:
        of = f"/{total:g} ({done / total:.0%})" if total else ""
        words.append(f"{progress.get('unit', 'step')} {done:g}{of}")
    for name, form in (("loss", "loss {:.4g}"), ("eval_loss", "eval {:.4g}"), ("tokens_per_s", "{:,.0f} tokens/s")):
        value = _number(progress.get(name))
        if value is not None:
            words.append(form.format(value))
    left_s = _left_s(job, done, total, time.time() if now is None else now)
    words += [] if left_s is None else [f"{duration(left_s)} left"]
    for name, what in (("queue_s", "in line"), ("compute_s", "computing")):
        value = _number(progress.get(name))
        if value is not None:
            words.append(f"{duration(value)} {what}")
    return ", ".join(words)


def ending_words(job: JobStanding) -> str:
    """What came of a job."""
    took = f" after {duration(job.finished_at - job.created_at)}" if job.finished_at is not None else ""
    if job.failure is not None:
        field = f" ({job.failure.field})" if job.failure.field else ""
        return f"{job.id} {job.state}{took}: {job.failure.message}{field}"
    facts = "".join(f"\n  {name}: {_plain(value)}" for name, value in (job.result or {}).items())
    return f"{job.id} {job.state}{took}{facts}"


def exit_code_of(job: JobStanding) -> int:
    """The exit code of a command that waited for a job: the script's own, where the job was one."""
    details = job.failure.details if job.failure is not None else {}
    own = (job.result or {}).get("exit_code", details.get("exit_code"))
    if isinstance(own, int) and 0 <= own <= _MAX_EXIT_CODE:
        return own
    return {"succeeded": 0, "cancelled": EXIT_JOB_CANCELLED}.get(job.state, EXIT_JOB_FAILED)


def duration(seconds: float) -> str:
    """A time as people read it: 12 s, 3:04, 2:03:04."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _left_s(job: JobStanding, done: float | None, total: float | None, now: float) -> float | None:
    """What is left: the plan's own word, else as long for each of the rest as for each so far."""
    told = _number(job.progress.get("eta_s"))
    if told is not None or job.is_final:
        return told
    if not done or not total or job.started_at is None:
        return None
    return (now - job.started_at) / done * (total - done)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _facts(event: JobEventInfo) -> str:
    if event.kind in ("status", "message"):
        return ""
    return "".join(f" {name}={_plain(value)}" for name, value in event.data.items())


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)
