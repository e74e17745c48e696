"""A mesh worker, put together of its parts: here it is said which part needs which others."""

from __future__ import annotations

from concurrent.futures import Executor as Threads
from dataclasses import dataclass
from functools import cached_property
from typing import Generic

from twinkle.core.clock import Clock
from twinkle.core.lease import ProcessIdentity
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.scheduler.fairness import PassRate
from twinkle.scheduler.fusion import alone_from
from twinkle.scheduler.retention import Pace, Retention
from twinkle.scheduler.token_stream import TokenPublisher
from twinkle.storage.blobs import BlobStore
from twinkle.storage.disks import Disks
from twinkle.storage.journal.journal import Journal
from twinkle.storage.stores import Stores
from twinkle.workers.adapters.adapter_memory import AdapterMemory
from twinkle.workers.adapters.artifacts import Artifacts
from twinkle.workers.adapters.departures import Absences, Departures
from twinkle.workers.adapters.replay import Replay
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.adapters.snapshots import Snapshots
from twinkle.workers.beginnings import Beginnings
from twinkle.workers.clerk import Beside, Clerk
from twinkle.workers.endings import Endings
from twinkle.workers.engine import Engine, State
from twinkle.workers.execute import Executor
from twinkle.workers.lease_keeper import LeaseKeeper
from twinkle.workers.lookahead import Lookahead
from twinkle.workers.recording import Recorder
from twinkle.workers.report import OperationReporter
from twinkle.workers.requests import LossGraphs, Requests
from twinkle.workers.run import MeshWorker
from twinkle.workers.sampling.rounds import SampleRounds
from twinkle.workers.sampling.sampling import CacheGroups, SampleDesk
from twinkle.workers.sampling.token_reports import TokenReports
from twinkle.workers.sampling.weights import SamplerWeights
from twinkle.workers.scripts.calls import Calls
from twinkle.workers.singles import Singles
from twinkle.workers.steps import Transfers

_PASS_TOKENS_CLAIMED = 16_384


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a worker is told of its mesh, and how much it may take and keep. Sizes in bytes, times in seconds."""

    mesh: str
    lease_s: float
    session_timeout_s: float
    max_attempts: int
    max_adapters: int
    """In one pass, as ``max_tokens``; up to ``min_tokens`` a pass is filled whosever turn it is."""
    max_tokens: int
    min_tokens: int
    max_resident: int
    """Adapters on the device; beside them ``parked_bytes`` of others in host memory."""
    parked_bytes: int
    max_weights: int
    """Copies to sample from."""
    max_ephemeral: int
    pin_after_s: float
    sample_slots: int
    sampling_weight: float
    """How much of the device sampling has for what training has, while both have something to do."""
    inline_bytes: int
    transfer_bytes: int
    pace: Pace
    retention: Retention

    @classmethod
    def of(cls, settings: Settings) -> WorkerOptions:
        """What the settings say."""
        return cls(
            mesh=settings.mesh,
            lease_s=settings.lease_s,
            session_timeout_s=settings.session_timeout_s,
            max_attempts=settings.max_attempts,
            max_adapters=settings.max_adapters_per_step,
            max_tokens=_PASS_TOKENS_CLAIMED,
            min_tokens=settings.min_tokens_per_step,
            max_resident=settings.max_resident_adapters,
            parked_bytes=settings.parked_adapter_bytes,
            max_weights=settings.max_resident_adapters,
            max_ephemeral=settings.max_ephemeral_weights,
            # Until then the run keeps what it takes anyway, or somebody may only have forgotten them.
            pin_after_s=max(settings.retention_s, settings.ephemeral_idle_s),
            sample_slots=settings.sample_slots,
            sampling_weight=settings.sampling_weight,
            inline_bytes=settings.inline_payload_bytes,
            transfer_bytes=settings.transfer_bytes,
            pace=Pace(
                every_ops=settings.snapshot_every_ops,
                every_bytes=settings.snapshot_every_bytes,
                every_s=settings.snapshot_every_s,
            ),
            retention=Retention(
                keep_s=settings.retention_s,
                every_ops=settings.keep_snapshot_every_ops,
                max_snapshots=settings.max_snapshots,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a worker finds where it is: where things are stored, whom it tells, and what runs its transfers."""

    stores: Stores
    journal: Journal
    blobs: BlobStore
    disks: Disks
    clock: Clock
    identity: ProcessIdentity
    capabilities: MeshCapabilities
    publisher: CompletionPublisher
    token_publisher: TokenPublisher
    reporter: OperationReporter
    cache_groups: CacheGroups
    threads: Threads
    clerk: Beside
    """For what is written to the journal beside the device."""
    teller: Threads
    """One thread, for what is told of it."""


class WorkerParts(Generic[State]):
    """The parts of one worker. Each is made when it is first asked for, after those that it needs."""

    def __init__(self, engine: Engine[State], around: Surroundings, options: WorkerOptions) -> None:
        self._engine = engine
        self._around = around
        self._options = options
        self._rate = PassRate()
        self._memory = AdapterMemory(around.capabilities, around.stores.adapters)

    @cached_property
    def worker(self) -> MeshWorker[State]:
        """What does the work."""
        return MeshWorker(
            journal=self._around.journal,
            keeper=self.keeper,
            executor=self._executor,
            residents=self.residents,
            absences=self._absences,
            departures=self._departures,
            samples=self.samples,
            sampler_weights=self.sampler_weights,
            clerk=self._clerk,
            lookahead=Lookahead(
                journal=self._around.journal,
                clerk=self._clerk,
                requests=self._requests,
                max_adapters=self._options.max_adapters,
                max_tokens=self._options.max_tokens,
                min_tokens=self._options.min_tokens,
                suspect_from=alone_from(self._options.max_attempts),
            ),
            sampling=SampleRounds(
                journal=self._around.journal,
                clerk=self._clerk,
                samples=self.samples,
                endings=self._endings,
                recorder=self._recorder,
                reporter=self._around.reporter,
                clock=self._around.clock,
                disks=self._around.disks,
                suspect_from=alone_from(self._options.max_attempts),
                weight=self._options.sampling_weight,
            ),
            endings=self._endings,
            recorder=self._recorder,
            reporter=self._around.reporter,
            clock=self._around.clock,
            transfers=self.transfers,
            disks=self._around.disks,
            max_adapters=self._options.max_adapters,
            max_tokens=self._options.max_tokens,
            min_tokens=self._options.min_tokens,
            max_attempts=self._options.max_attempts,
        )

    @cached_property
    def keeper(self) -> LeaseKeeper:
        """Holds the mesh."""
        return LeaseKeeper(
            meshes=self._around.stores.meshes,
            mesh=self._options.mesh,
            identity=self._around.identity,
            capabilities=self._around.capabilities,
            lease_s=self._options.lease_s,
        )

    @cached_property
    def transfers(self) -> Transfers:
        """Reads and writes of the object store."""
        return Transfers(self._around.threads, max_bytes=self._options.transfer_bytes)

    @cached_property
    def snapshots(self) -> Snapshots:
        """Recovery points."""
        return Snapshots(
            store=self._around.stores.snapshots,
            blobs=self._around.blobs,
            clock=self._around.clock,
            pace=self._options.pace,
            retention=self._options.retention,
            transfers=self.transfers,
        )

    @cached_property
    def replay(self) -> Replay[State]:
        """Past states."""
        return Replay(
            engine=self._engine,
            journal=self._around.journal,
            adapters=self._around.stores.adapters,
            snapshots=self._around.stores.snapshots,
            blobs=self._around.blobs,
            requests=self._requests,
            transfers=self.transfers,
        )

    @cached_property
    def residents(self) -> Residents[State]:
        """Present ones."""
        return Residents(
            engine=self._engine,
            replay=self.replay,
            snapshots=self.snapshots,
            adapters=self._around.stores.adapters,
            clock=self._around.clock,
            limit=self._options.max_resident,
            memory=self._memory,
            parked_bytes=self._options.parked_bytes,
            note_memory=self.keeper.note_memory,
        )

    @cached_property
    def sampler_weights(self) -> SamplerWeights[State]:
        """Copies to sample from."""
        return SamplerWeights(
            engine=self._engine,
            artifacts=self._artifacts,
            stores=self._around.stores,
            residents=self.residents,
            clock=self._around.clock,
            limit=self._options.max_weights,
            memory=self._memory,
            mesh=self._options.mesh,
            pin_after_s=self._options.pin_after_s,
            rate=self._rate,
        )

    @cached_property
    def samples(self) -> SampleDesk[State]:
        """Samples under way."""
        return SampleDesk(
            engine=self._engine,
            weights=self.sampler_weights,
            blobs=self._around.blobs,
            clock=self._around.clock,
            slots=self._options.sample_slots,
            endings=self._endings,
            reports=TokenReports(engine=self._engine, publisher=self._around.token_publisher, clock=self._around.clock),
            cache_groups=self._around.cache_groups,
            transfers=self.transfers,
        )

    @cached_property
    def _executor(self) -> Executor[State]:
        return Executor(
            engine=self._engine,
            residents=self.residents,
            blobs=self._around.blobs,
            clock=self._around.clock,
            endings=self._endings,
            requests=self._requests,
            singles=self._singles,
            rate=self._rate,
            transfers=self.transfers,
            cache_groups=self._around.cache_groups,
            max_adapters=self._options.max_adapters,
            max_tokens=self._options.max_tokens,
        )

    @cached_property
    def _requests(self) -> Requests:
        return Requests(
            blobs=self._around.blobs,
            transfers=self.transfers,
            loss_graphs=LossGraphs(self._around.journal),
            pictures=self._engine.capabilities.pictures,
        )

    @cached_property
    def _clerk(self) -> Clerk:
        return Clerk(self._around.clerk, self.transfers.changed)

    @cached_property
    def _singles(self) -> Singles[State]:
        return Singles(
            engine=self._engine,
            residents=self.residents,
            artifacts=self._artifacts,
            stores=self._around.stores,
            clock=self._around.clock,
            replay=self.replay,
            sampler_weights=self.sampler_weights,
            beginnings=self._beginnings,
            calls=Calls(
                engine=self._engine,
                residents=self.residents,
                artifacts=self._artifacts,
                adapters=self._around.stores.adapters,
                beginnings=self._beginnings,
            ),
            max_ephemeral=self._options.max_ephemeral,
        )

    @cached_property
    def _beginnings(self) -> Beginnings[State]:
        return Beginnings(
            engine=self._engine, residents=self.residents, snapshots=self.snapshots, transfers=self.transfers
        )

    @cached_property
    def _artifacts(self) -> Artifacts[State]:
        return Artifacts(
            engine=self._engine,
            stores=self._around.stores,
            blobs=self._around.blobs,
            clock=self._around.clock,
            transfers=self.transfers,
        )

    @cached_property
    def _recorder(self) -> Recorder[State]:
        return Recorder(
            journal=self._around.journal,
            keeper=self.keeper,
            residents=self.residents,
            endings=self._endings,
            publisher=self._around.publisher,
            reporter=self._around.reporter,
            clock=self._around.clock,
            teller=self._around.teller,
        )

    @cached_property
    def _endings(self) -> Endings:
        return Endings(
            blobs=self._around.blobs,
            clock=self._around.clock,
            transfers=self.transfers,
            inline_bytes=self._options.inline_bytes,
            max_attempts=self._options.max_attempts,
        )

    @cached_property
    def _departures(self) -> Departures[State]:
        return Departures(
            mesh=self._options.mesh,
            moves=self._around.stores.moves,
            residents=self.residents,
            clock=self._around.clock,
        )

    @cached_property
    def _absences(self) -> Absences[State]:
        return Absences(
            mesh=self._options.mesh,
            adapters=self._around.stores.adapters,
            residents=self.residents,
            clock=self._around.clock,
            silent_s=self._options.session_timeout_s,
        )
