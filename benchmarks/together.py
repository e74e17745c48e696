"""What comes together shares its cost: submissions a transaction, waiting clients a query.

The submitter, the futures, the journal and the broker are the API's own; only HTTP is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from measures import percentile, rounded
from scale_world import HEADS_OFFERED, SimulatedEngine, SimulatedMesh, Size, fill, mesh_name, submission
from twinkle.core.clock import SystemClock
from twinkle.core.errors import UserError
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, OperationKind, Submission
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import COMPLETIONS, ChannelListener, CompletionPublisher
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.server.futures import Futures
from twinkle.server.submit import Submitter
from twinkle.server.threads import Threads
from twinkle.storage.blobs import FolderStore
from twinkle.storage.database import Database
from twinkle.storage.journal.journal import Journal, OwnedStatus
from twinkle.storage.journal.turns import Head
from twinkle.tasks.app import make_app
from twinkle.tasks.nudge import Nudger

SUBMITTERS = (1, 16, 64)
OPEN_FUTURES = (10, 100, 1000)
COMMIT_SIZES = (1, 32)
_IDLE_S = 3.0
_NEVER_S = 3600.0
_WAIT_S = 60.0
_SUBSCRIBED_WITHIN_S = 0.5
_ROWS = 1000
_STEP_S = 0.002
_KIND = OperationKind.FORWARD_BACKWARD


class CountingJournal(Journal):
    """A journal that counts what it is asked."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, SystemClock())
        self.num_appends = 0
        self.num_status_queries = 0
        self.num_statuses = 0

    def append(self, submissions: Sequence[Submission]) -> list[Accepted | UserError]:
        """One more transaction."""
        self.num_appends += 1
        return super().append(submissions)

    def statuses(self, request_ids: Sequence[str]) -> dict[str, OwnedStatus]:
        """One more query."""
        self.num_status_queries += 1
        self.num_statuses += len(request_ids)
        return super().statuses(request_ids)


# -- group commit -----------------------------------------------------------------------------------------------------


def group_commits(url: str, redis_url: str, folder: Path, *, short: bool) -> list[dict[str, object]]:
    """Operations a transaction and the time to acceptance, under so many submitters that wait for each answer.

    Against the same submitters where every submission has a transaction of its own, on the same thread; in turns.
    """
    size = Size(rows=_ROWS, adapters=max(SUBMITTERS), meshes=1)
    database = Database(url)
    fill(database, size)
    next_seq = [size.num_rows_of(number) for number in range(size.adapters)]
    each, rounds = (10, 2) if short else (50, 5)
    cells = []
    for num_submitters in SUBMITTERS:
        seen: dict[bool, list[_Arrivals]] = {True: [], False: []}
        for _ in range(rounds):
            for is_grouped in (True, False):
                numbers = range(num_submitters)
                arrivals = _Arrivals(is_grouped=is_grouped, each=each * max(SUBMITTERS) // (4 * num_submitters))
                asyncio.run(arrivals.run(CountingJournal(database), redis_url, folder, size, next_seq, numbers))
                seen[is_grouped].append(arrivals)
        grouped, single = (_arrivals_summary(seen[is_grouped]) for is_grouped in (True, False))
        cells.append({"submitters": num_submitters, "grouped": grouped, "single": single})
    database.close()
    return cells


@dataclass(kw_only=True)
class _Arrivals:
    """Submitters at work, each with an adapter of its own."""

    is_grouped: bool
    each: int
    latencies_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_transactions: int = 0

    async def run(
        self,
        journal: CountingJournal,
        redis_url: str,
        folder: Path,
        size: Size,
        next_seq: list[int],
        numbers: range,
    ) -> None:
        settings = Settings.model_validate({"redis_url": redis_url})
        nudger, threads = Nudger(make_app(settings), redis_url), Threads("blobs", 1)
        submitter = Submitter(
            journal,
            FolderStore(folder / "objects"),
            nudger,
            Futures(journal),
            blob_threads=threads,
            inline_bytes=settings.inline_payload_bytes,
            max_pending=settings.max_pending_submissions,
            timeout_s=settings.submit_timeout_s,
            clock=SystemClock(),
        )
        nudger.start()
        submitter.start()

        async def submit_in_turn(number: int) -> None:
            for _ in range(self.each):
                new = submission(size, number, next_seq[number], _KIND)
                next_seq[number] += 1
                started = time.perf_counter()
                if self.is_grouped:
                    await submitter.submit(new)
                else:
                    await submitter.write(partial(_append_alone, journal, new))
                self.latencies_s.append(time.perf_counter() - started)

        started, cpu_started = time.perf_counter(), time.process_time()
        await asyncio.gather(*(submit_in_turn(number) for number in numbers))
        self.wall_s, self.cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        self.num_transactions = journal.num_appends
        await submitter.stop()
        await asyncio.to_thread(nudger.stop)
        await asyncio.to_thread(threads.stop)


def _append_alone(journal: Journal, new: Submission) -> Accepted:
    (answer,) = journal.append([new])
    if isinstance(answer, UserError):
        raise answer
    return answer


def _arrivals_summary(rounds: Sequence[_Arrivals]) -> dict[str, float]:
    latencies_s = [latency for one in rounds for latency in one.latencies_s]
    return {
        "operations": len(latencies_s),
        "ops_per_transaction": rounded(len(latencies_s) / sum(one.num_transactions for one in rounds)),
        "p50_ms": rounded(1000 * percentile(latencies_s, 50)),
        "p95_ms": rounded(1000 * percentile(latencies_s, 95)),
        "ops_per_s": rounded(len(latencies_s) / sum(one.wall_s for one in rounds)),
        "cpu_ms_per_op": rounded(1000 * sum(one.cpu_s for one in rounds) / len(latencies_s)),
    }


# -- wake-ups ---------------------------------------------------------------------------------------------------------


def wake_ups(url: str, redis_url: str, *, short: bool) -> list[dict[str, object]]:
    """Queries for each completion while so many clients wait, and queries a second while nothing ends."""
    largest = OPEN_FUTURES[1 if short else 2]
    size = Size(rows=largest, adapters=largest, meshes=1)
    database = Database(url)
    fill(database, size)
    mesh = SimulatedMesh(database, mesh_name(0), SimulatedEngine())
    next_seq = [size.num_rows_of(number) for number in range(largest)]
    cells = []
    for num_open in OPEN_FUTURES:
        if num_open > largest:
            continue
        for commit_size in COMMIT_SIZES:
            new = [submission(size, number, next_seq[number], _KIND) for number in range(num_open)]
            next_seq[:num_open] = [seq + 1 for seq in next_seq[:num_open]]
            cell = _Waits(database, mesh, new, commit_size=commit_size)
            cells.append(asyncio.run(cell.run(redis_url, idle_s=1.5 if short else _IDLE_S)))
    database.close()
    return cells


class _Waits:
    """So many held polls, and a worker that ends what they wait for, some at a commit."""

    def __init__(
        self, database: Database, mesh: SimulatedMesh, submissions: list[Submission], *, commit_size: int
    ) -> None:
        self._journal = CountingJournal(database)
        self._mesh = mesh
        self._submissions = submissions
        self._tenant_of = {request_id_of(new.lane, new.seq): new.tenant for new in submissions}
        self._commit_size = commit_size

    async def run(self, redis_url: str, *, idle_s: float) -> dict[str, object]:
        """Accept, wait idly for a while, then end everything; what the journal was asked."""
        self._journal.append(self._submissions)
        idle_queries_per_s = await self._idle(idle_s)
        futures = Futures(self._journal, sweep_s=_NEVER_S)
        ended_at: dict[str, float] = {}
        latencies_s: list[float] = []

        async def wait(awaited: str, tenant: str) -> None:
            status = await futures.wait(awaited, tenant, _WAIT_S)
            if not status.status.state.is_final:
                raise RuntimeError(f"nobody told that {awaited} has ended")
            latencies_s.append(time.perf_counter() - ended_at[awaited])

        futures.start()
        listener = ChannelListener(redis_url, COMPLETIONS, futures.notify)
        listener.start()
        try:
            await asyncio.sleep(_SUBSCRIBED_WITHIN_S)
            async with asyncio.TaskGroup() as waiting:
                for awaited, tenant in self._tenant_of.items():
                    waiting.create_task(wait(awaited, tenant))
                await asyncio.sleep(_SUBSCRIBED_WITHIN_S)
                queries_before, statuses_before = self._journal.num_status_queries, self._journal.num_statuses
                await asyncio.to_thread(self._complete, CompletionPublisher(redis_url), ended_at)
            queries = self._journal.num_status_queries - queries_before
            statuses = self._journal.num_statuses - statuses_before
        finally:
            await asyncio.to_thread(listener.stop)
            await futures.stop()
        return {
            "open_futures": len(self._submissions),
            "commit_size": self._commit_size,
            "queries_per_completion": rounded(queries / len(latencies_s)),
            "statuses_per_completion": rounded(statuses / len(latencies_s)),
            "wake_p50_ms": rounded(1000 * percentile(latencies_s, 50)),
            "wake_p95_ms": rounded(1000 * percentile(latencies_s, 95)),
            "idle_queries_per_s": rounded(idle_queries_per_s),
        }

    async def _idle(self, idle_s: float) -> float:
        """Queries a second of the sweep alone, after the first look of each waiter."""
        futures = Futures(self._journal)
        futures.start()
        waiting = [
            asyncio.create_task(futures.wait(awaited, tenant, _WAIT_S)) for awaited, tenant in self._tenant_of.items()
        ]
        await asyncio.sleep(_SUBSCRIBED_WITHIN_S)
        before, started = self._journal.num_status_queries, time.perf_counter()
        await asyncio.sleep(idle_s)
        queries, elapsed_s = self._journal.num_status_queries - before, time.perf_counter() - started
        futures.release()
        await asyncio.gather(*waiting)
        await futures.stop()
        return queries / elapsed_s

    def _complete(self, publisher: CompletionPublisher, ended_at: dict[str, float]) -> None:
        """End everything, so many at a commit, with a pause as long as a small step."""
        while claims := self._journal.claim(self._mesh.lease, with_virtual_time(self._choose), HEADS_OFFERED):
            outcomes = SimulatedEngine(step_s=_STEP_S).run(claims)
            assert outcomes is not None, "this engine never dies"
            self._journal.commit(self._mesh.lease, outcomes)
            done = [outcome.request_id for outcome in outcomes]
            ended_at.update(dict.fromkeys(done, time.perf_counter()))
            publisher.publish(done)

    def _choose(self, heads: list[Head]) -> list[Head]:
        return heads[: self._commit_size]
