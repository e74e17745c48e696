"""A real mesh worker on an engine that computes nothing, with places where a test can make things break."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from harness.clock import HandClock
from harness.journal import MESH, identity
from twinkle.core.errors import InvalidInput, StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim, Outcome
from twinkle.scheduler.retention import Pace, Retention
from twinkle.scheduler.token_stream import TokenPiece
from twinkle.storage.blobs import BlobStore
from twinkle.storage.database import Database
from twinkle.storage.disks import Disks
from twinkle.storage.journal.executing import Committed
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.records import Records
from twinkle.storage.journal.turns import Choose, Followed
from twinkle.storage.stores import Stores
from twinkle.workers.assembly import Surroundings, WorkerOptions, WorkerParts
from twinkle.workers.engine import Engine
from twinkle.workers.engines.null_engine import NullEngine, NullState
from twinkle.workers.sampling.sampling import CacheGroups

CLAIM_S = 0.01
"""How much time a claim takes on the clock moved by hand, so that a budget is a number of batches."""


KEEP_NOTHING = Retention(keep_s=0.0, every_ops=1, max_snapshots=2)
"""The newest snapshot only, and payloads after it."""


class Killed(BaseException):
    """The process is gone: nothing of ours catches this."""


class BreakableJournal(Journal):
    """A journal that does something once, before or after the next commit or claim."""

    def __init__(self, database: Database, clock: HandClock) -> None:
        super().__init__(database, clock)
        self._hand_clock = clock
        self.before_commit: Callable[[], None] | None = None
        self.after_commit: Callable[[], None] | None = None
        self.after_claim: Callable[[], None] | None = None
        self.before_give_back: Callable[[], None] | None = None

    def claim(
        self,
        lease: Lease,
        choose: Choose,
        limit: int,
        *,
        held: Collection[str] = (),
        followed: Collection[Followed] = (),
    ) -> list[Claim]:
        claims = super().claim(lease, choose, limit, held=held, followed=followed)
        if claims or not held:
            self._hand_clock.move(CLAIM_S)
        if claims:
            self._once("after_claim")
        return claims

    def commit(
        self, lease: Lease, outcomes: Sequence[Outcome], records: Mapping[str, Records] = MappingProxyType({})
    ) -> Committed:
        self._once("before_commit")
        committed = super().commit(lease, outcomes, records)
        self._once("after_commit")
        return committed

    def give_back(
        self,
        lease: Lease,
        request_ids: Sequence[str],
        *,
        delay_s: float = 0.0,
        is_blameless: bool = False,
        is_suspect: bool = False,
        is_unbegun: bool = False,
        reason: str | None = None,
    ) -> None:
        if request_ids:
            self._once("before_give_back")
        super().give_back(
            lease,
            request_ids,
            delay_s=delay_s,
            is_blameless=is_blameless,
            is_suspect=is_suspect,
            is_unbegun=is_unbegun,
            reason=reason,
        )

    def _once(self, name: str) -> None:
        hook: Callable[[], None] | None = getattr(self, name)
        if hook is not None:
            setattr(self, name, None)
            hook()


class BreakableBlobs:
    """An object store that refuses the next so many writes, or reads, below a folder."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._refused: dict[tuple[str, str], int] = {}

    def refuse(self, verb: str, folder: str, times: int) -> None:
        self._refused[verb, folder] = times

    def heal(self) -> None:
        self._refused.clear()

    def put(self, key: str, data: bytes) -> None:
        self._perhaps_refuse("put", key)
        self._store.put(key, data)

    def get(self, key: str) -> bytes:
        self._perhaps_refuse("get", key)
        return self._store.get(key)

    def size_bytes(self, key: str) -> int:
        return self._store.size_bytes(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._store.get_range(key, start, length)

    def presigned_url(self, key: str, lifetime_s: float) -> str | None:
        return self._store.presigned_url(key, lifetime_s)

    def delete(self, key: str) -> None:
        self._perhaps_refuse("delete", key)
        self._store.delete(key)

    def _perhaps_refuse(self, verb: str, key: str) -> None:
        where = (verb, key.partition("/")[0])
        if self._refused.get(where, 0) > 0:
            self._refused[where] -= 1
            raise StorageUnavailable(f"the object store would not {verb} {key}")


class RecordingPublisher:
    """Remembers what was said to be done."""

    def __init__(self) -> None:
        self.published: list[str] = []

    def publish(self, request_ids: Sequence[str]) -> None:
        self.published += request_ids


class RecordingTokenPublisher:
    """Remembers what listeners were told."""

    def __init__(self) -> None:
        self.offered: list[tuple[str, TokenPiece]] = []

    def offer(self, listener_id: str, piece: TokenPiece) -> None:
        self.offered.append((listener_id, piece))


class RecordingReporter:
    """Remembers what the worker showed of its operations."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def started(self, claims: Iterable[Claim]) -> None:
        self.events += [("started", claim.request_id) for claim in claims]

    def ended(self, outcomes: Iterable[Outcome], started_at: float) -> None:
        self.events += [("failed" if outcome.failure else "done", outcome.request_id) for outcome in outcomes]

    def retried(self, claim: Claim, reason: str) -> None:
        self.events.append(("retried", claim.request_id))

    def close(self) -> None:
        self.events.append(("closed", ""))


class AtOnce(Executor):
    """Runs what it is given before it says so."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        future: Future[object] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as a real one does
            future.set_exception(error)
        return future


class BrokenEngine(NullEngine):
    """An engine whose next calls fail as a test says."""

    def __init__(self) -> None:
        super().__init__(base_model="base", max_rank=8)
        self.pass_errors: list[Exception] = []
        self.step_errors: list[Exception] = []
        self.sample_errors: list[BaseException] = []
        self.batch_sizes: list[int] = []
        self.refuse_samples = False
        self.sampled_from: dict[str, NullState | None] = {}

    def run_passes(self, passes):  # type: ignore[no-untyped-def]
        self.batch_sizes.append(len(passes))
        answers = super().run_passes(passes)
        if self.pass_errors:
            raise self.pass_errors.pop()
        return answers

    def optim_step(self, state, params):  # type: ignore[no-untyped-def]
        metrics = super().optim_step(state, params)
        if self.step_errors:
            raise self.step_errors.pop()
        return metrics

    def add_sample(self, request_id, state, request, **how):  # type: ignore[no-untyped-def]
        if self.refuse_samples:
            raise InvalidInput("prompt", "is not what this engine takes")
        self.sampled_from[request_id] = state
        super().add_sample(request_id, state, request, **how)

    def step_samples(self):  # type: ignore[no-untyped-def]
        if self.sample_errors:
            raise self.sample_errors.pop()
        return super().step_samples()


_OPTIONS = WorkerOptions(
    mesh=MESH,
    lease_s=15.0,
    session_timeout_s=1e9,
    max_attempts=3,
    max_adapters=4,
    max_tokens=1000,
    min_tokens=0,
    max_resident=8,
    parked_bytes=0,
    max_weights=2,
    max_ephemeral=3,
    pin_after_s=1e9,
    sample_slots=4,
    sampling_weight=1.0,
    inline_bytes=1 << 16,
    transfer_bytes=1 << 30,
    pace=Pace(every_ops=5, every_bytes=1 << 40, every_s=1e9),
    retention=KEEP_NOTHING,
)


class WorkerRig:
    """One worker process, or what stands for one: dropped without a word when it is to have been killed.

    It is the product's own, in small: ``options`` are those of ``WorkerOptions`` that are to be otherwise.
    """

    def __init__(
        self,
        name: str,
        *,
        stores: Stores,
        blobs: BlobStore,
        clock: HandClock,
        snapshot_every_ops: int = _OPTIONS.pace.every_ops,
        snapshot_every_bytes: int = _OPTIONS.pace.every_bytes,
        threads: Executor | None = None,
        clerk: Executor | None = None,
        engine: Engine[Any] | None = None,
        cache_groups: CacheGroups | None = None,
        disks: Disks | None = None,
        **options: Any,
    ) -> None:
        self.engine: Any = BrokenEngine() if engine is None else engine
        self.journal = BreakableJournal(stores.database, clock)
        self.publisher = RecordingPublisher()
        self.token_publisher = RecordingTokenPublisher()
        self.reporter = RecordingReporter()
        self.clock = clock
        around = Surroundings(
            stores=stores,
            journal=self.journal,
            blobs=blobs,
            disks=disks or Disks([], clock, low_bytes=0, critical_bytes=0),
            clock=clock,
            identity=identity(name),
            capabilities=self.engine.capabilities,
            publisher=self.publisher,  # type: ignore[arg-type]
            token_publisher=self.token_publisher,  # type: ignore[arg-type]
            reporter=self.reporter,  # type: ignore[arg-type]
            cache_groups=cache_groups or CacheGroups({}, str),
            threads=AtOnce() if threads is None else threads,
            clerk=AtOnce() if clerk is None else clerk,
            teller=AtOnce(),
        )
        pace = replace(_OPTIONS.pace, every_ops=snapshot_every_ops, every_bytes=snapshot_every_bytes)
        parts = WorkerParts[NullState](self.engine, around, replace(_OPTIONS, pace=pace, **options))
        self.worker = parts.worker
        self.keeper = parts.keeper
        self.transfers = parts.transfers
        self.snapshots = parts.snapshots
        self.replay = parts.replay
        self.residents = parts.residents
        self.sampler_weights = parts.sampler_weights
        self.samples = parts.samples

    def drain(self, batches: int | None = None) -> None:
        """Work as a nudged worker does, on so many batches at most; the lease is taken if it is free."""
        if self.keeper.current() is not None or self.keeper.try_acquire() is not None:
            self.worker.drain(budget_s=1e9 if batches is None else batches * CLAIM_S)

    def state_before(self, adapter: str, seq: int) -> NullState:
        """The adapter as it is in memory, or as it is made anew, with the operations below ``seq`` applied."""
        state, _ = self.transfers.at_once(self.residents.state_after(adapter, seq - 1, is_last=True))
        return state

    def settle(self) -> None:
        """Wait until every snapshot that was handed over is written."""
        self.transfers.at_once(self.snapshots.all_settled())

    def save_all(self) -> None:
        """Snapshot every adapter, as a worker does that ends."""
        self.transfers.at_once(self.residents.save_all())

    def bury(self) -> None:
        """Let go of the threads of a worker that is to have died; whatever it had queued to write is written."""
        self.transfers.close()


MakeWorker = Callable[..., WorkerRig]


@contextmanager
def workers_in_turn(stores: Stores, blobs: BlobStore, clock: HandClock, **defaults: Any) -> Iterator[MakeWorker]:
    """Workers one after the other on one journal; each takes the mesh, whoever had it."""
    workers: list[WorkerRig] = []

    def make(**options: Any) -> WorkerRig:
        clock.move(1000)
        name = f"worker{len(workers)}"
        worker = WorkerRig(name, stores=stores, blobs=blobs, clock=clock, **(defaults | options))
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.bury()
