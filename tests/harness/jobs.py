"""Jobs run in process, against a served app's database and worker, without Celery: a plan is tried in a second."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, TypeVar

from twinkle.client.facade import LoopThread
from twinkle.core.clock import Clock, SystemClock
from twinkle.core.ids import new_id
from twinkle.core.job import Job, JobFailed, JobKind, JsonObject, NewJob
from twinkle.core.settings import Settings
from twinkle.jobs.door import Door
from twinkle.jobs.files import JobFiles
from twinkle.jobs.plans import PLANS, PlanClasses
from twinkle.jobs.runner import JobRunner
from twinkle.jobs.tools import Tools
from twinkle.storage.stores import Stores
from twinkle.workers.jobs.host import running_host

T = TypeVar("T")


class MemoryFiles:
    """Our own twin of a tenant's files: a dictionary."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.parts: dict[tuple[str, str], bytes] = {}

    async def lines(self, file_id: str, *, start: int = 0) -> AsyncIterator[bytes]:
        for line in (await self.read(file_id)).splitlines()[start:]:
            yield line

    async def read(self, file_id: str) -> bytes:
        if file_id not in self.contents:
            raise JobFailed("not_found", f"no file {file_id!r}")
        return self.contents[file_id]

    async def write(self, name: str, content: bytes, *, purpose: str) -> str:
        file_id = f"file-{purpose}-{name}"
        self.contents[file_id] = content
        return file_id

    async def write_part(self, name: str, part: str, content: bytes) -> None:
        assert self.parts.setdefault((name, part), content) == content
        await asyncio.sleep(0)

    async def join(self, name: str, parts: Sequence[str], *, purpose: str, keep_s: float | None = None) -> str:
        return await self.write(name, b"".join(self.parts[name, part] for part in parts), purpose=purpose)


class NoTools:
    """Plans that need nothing of the training library."""


class JobRig:
    """A runner on an event loop of its own, and short words for what tests do with jobs."""

    def __init__(self, stores: Stores, thread: LoopThread, runner: JobRunner) -> None:
        self.stores = stores
        self.runner = runner
        self._thread = thread

    def new(self, tenant: str, kind: JobKind, spec: JsonObject, **more: Any) -> NewJob:
        """A job as a route would make it of a request."""
        digest = sha256(repr((kind, spec)).encode()).hexdigest()
        return NewJob(id=new_id(), tenant=tenant, kind=kind, spec=spec, digest=digest, **more)

    def submit(self, tenant: str, kind: JobKind, spec: JsonObject, **more: Any) -> Job:
        """Take a job on."""
        return self.stores.jobs.create(self.new(tenant, kind, spec, **more))

    def run(self, job_id: str) -> Job | None:
        """Run one attempt, to its end or its pause."""
        return self._thread.run(self.runner.run(job_id))

    def start(self, job_id: str) -> threading.Thread:
        """Run one attempt in the background."""
        thread = threading.Thread(target=self.run, args=(job_id,), daemon=True)
        thread.start()
        return thread

    def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop on which jobs run."""
        return self._thread.run(call)

    def stop(self) -> None:
        """Give all jobs back, as at SIGTERM."""
        self._thread.run(self.runner.stop())

    def do(self, tenant: str, kind: JobKind, spec: JsonObject, **more: Any) -> Job:
        """Take a job on and run it; how it stands then."""
        job = self.submit(tenant, kind, spec, **more)
        self.run(job.id)
        return self.stores.jobs.find(job.id, tenant)


@contextmanager
def job_rig(
    settings: Settings,
    *,
    plans: PlanClasses = PLANS,
    open_files: Callable[[Job, Door], JobFiles] | None = None,
    tools: Tools | None = None,
    clock: Clock | None = None,
    lease_s: float | None = None,
) -> Iterator[JobRig]:
    """A runner against the database, broker and object store of these settings (``api.settings``)."""
    clock = clock or SystemClock()
    if lease_s is not None:
        settings = settings.model_copy(update={"job_lease_s": lease_s})
    stores = Stores.at(settings.resolved_database_url, clock, limits=settings.tenant_limits)
    thread = LoopThread("jobs")
    files = MemoryFiles()
    host = running_host(
        settings,
        stores,
        clock=clock,
        plans=plans,
        open_files=open_files or (lambda job, door: files),
        tools=tools or NoTools(),
        pause_s=lambda num_failures: 0.0,
    )
    runner = thread.run(host.__aenter__())
    try:
        yield JobRig(stores, thread, runner)
    finally:
        thread.run(host.__aexit__(None, None, None))
        thread.stop()
        stores.close()
