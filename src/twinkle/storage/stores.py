"""All that is kept in one database, by what it is about."""

from __future__ import annotations

from twinkle.core.clock import Clock
from twinkle.core.limits import NO_LIMITS, TenantLimits
from twinkle.storage.adapters.adapters import Adapters
from twinkle.storage.adapters.named import NamedAdapters
from twinkle.storage.adapters.snapshots import SnapshotStore
from twinkle.storage.checkpoints.access_tokens import AccessTokens
from twinkle.storage.checkpoints.brought import BroughtCheckpoints
from twinkle.storage.checkpoints.checkpoints import Checkpoints
from twinkle.storage.checkpoints.pushes import Pushes
from twinkle.storage.database import Database
from twinkle.storage.files.files import Files
from twinkle.storage.files.growing import GrowingFiles
from twinkle.storage.files.prepared import PreparedRows
from twinkle.storage.files.uploads import Uploads
from twinkle.storage.jobs.hooks import JobHooks
from twinkle.storage.jobs.jobs import Jobs
from twinkle.storage.jobs.keeping import JobKeeping
from twinkle.storage.jobs.running import RunningJobs
from twinkle.storage.jobs.standing import JobOutlooks
from twinkle.storage.jobs.waiting import WaitingJobs
from twinkle.storage.journal.branches import Branches
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.meshes import Meshes
from twinkle.storage.journal.moves import Moves
from twinkle.storage.journal.operations import Operations
from twinkle.storage.journal.queues import Queues
from twinkle.storage.journal.speeds import Speeds
from twinkle.storage.journal.timeline import Timeline
from twinkle.storage.processors.processors import Processors
from twinkle.storage.sampling.sampling_sessions import SamplingSessions
from twinkle.storage.sampling.templates import SamplerTemplates
from twinkle.storage.tenants.accounting import Accounting
from twinkle.storage.tenants.audit import Audit
from twinkle.storage.tenants.deployment import Deployment
from twinkle.storage.tenants.holdings import Holdings
from twinkle.storage.tenants.keyring import Keyring
from twinkle.storage.tenants.sessions import Sessions
from twinkle.storage.tenants.tenants import Tenants
from twinkle.storage.upkeep.forgetting import Forgetting
from twinkle.storage.upkeep.gone_lanes import GoneLanes
from twinkle.storage.upkeep.kept_payloads import KeptPayloads
from twinkle.storage.upkeep.upkeep import Upkeep
from twinkle.storage.upkeep.waste import Waste


class Stores:
    """One database's stores. Each has no state but its connections, so whoever needs one alone is handed that one.

    - ``journal`` accepts operations, hands them out and records what came of them; ``branches`` are the forks and
      rewinds in it; ``queues``, ``operations`` and ``timeline`` look at what waits and at what was; ``meshes`` are
      their leases, ``moves`` what is on its way between them, ``speeds`` what they took lately.
    - ``adapters`` are the training runs, ``named_adapters`` what clients call some of them, ``snapshots``
      their recovery points.
    - ``checkpoints`` are what tenants keep, ``brought`` those of them that came from folders; ``access_tokens`` open
      them to others, ``pushes`` say which leave by themselves, and ``sampling_sessions`` sample from them, from base
      models or from weights without a name.
    - ``tenants`` have keys and limits, the ``keyring`` is all keys by their ids, ``sessions`` are clients' presence,
      ``deployment`` is what the processes have in common,
      ``accounting`` knows what tenants used, ``audit`` who did what, and ``holdings`` how much they have.
    - ``jobs`` are what the service does by itself for tenants, ``running_jobs`` who runs them, ``waiting_jobs`` which
      of them are to be run next, and ``job_keeping`` ends what was kept of them.
    - ``files`` are what tenants have uploaded and their jobs have written, ``uploads`` what is on its way,
      ``growing_files`` what jobs are at, and ``prepared_rows`` what was made of files to train on.
    - ``processors`` are the data sets and loaders that clients have here.
    - ``upkeep`` ends what has waited or lain too long, ``waste`` is what nothing in the object store is kept for, and
      ``forgetting`` takes the rows of what ended long ago, ``gone_lanes`` those of whole runs and sampling sessions.
    """

    def __init__(self, database: Database, clock: Clock, *, limits: TenantLimits = NO_LIMITS) -> None:
        """Open nothing: the database connects when it is first asked.

        Args:
            database: Where all of them are.
            clock: What time it is.
            limits: Those of tenants that have none of their own.
        """
        self.database = database
        self.journal = Journal(database, clock, limits=limits)
        self.branches = Branches(database, self.journal, clock)
        self.queues = Queues(database, clock)
        self.operations = Operations(database, clock)
        self.timeline = Timeline(database)
        self.meshes = Meshes(database, clock)
        self.moves = Moves(database, clock)
        self.speeds = Speeds(database)
        self.adapters = Adapters(database, clock)
        self.named_adapters = NamedAdapters(database, clock)
        self.snapshots = SnapshotStore(database, clock)
        self.checkpoints = Checkpoints(database, clock)
        self.brought = BroughtCheckpoints(database, self.checkpoints, clock)
        self.access_tokens = AccessTokens(database, clock)
        self.pushes = Pushes(database, clock)
        self.sampler_templates = SamplerTemplates(database)
        self.sampling_sessions = SamplingSessions(database, clock)
        self.tenants = Tenants(database, clock, limits=limits)
        self.keyring = Keyring(database, clock)
        self.sessions = Sessions(database, clock)
        self.accounting = Accounting(database, clock)
        self.audit = Audit(database, clock)
        self.deployment = Deployment(database, clock)
        self.holdings = Holdings(database, clock)
        self.jobs = Jobs(database, clock, limits=limits)
        self.running_jobs = RunningJobs(database, clock)
        self.waiting_jobs = WaitingJobs(database, clock, limits=limits)
        self.job_outlooks = JobOutlooks(database, clock, limits=limits)
        self.job_hooks = JobHooks(database, clock)
        self.files = Files(database, clock)
        self.uploads = Uploads(database, clock)
        self.growing_files = GrowingFiles(database, clock)
        self.prepared_rows = PreparedRows(database, clock)
        self.job_keeping = JobKeeping(database, clock)
        self.processors = Processors(database, clock)
        self.upkeep = Upkeep(database, clock)
        self.kept_payloads = KeptPayloads(database)
        self.waste = Waste(database, clock)
        self.forgetting = Forgetting(database, clock)
        self.gone_lanes = GoneLanes(database, clock)

    @classmethod
    def at(cls, url: str, clock: Clock, *, limits: TenantLimits = NO_LIMITS) -> Stores:
        """The stores of the database at a URL, whose schema is current."""
        return cls(Database(url), clock, limits=limits)

    def close(self) -> None:
        """Give the connection of this thread back."""
        self.database.close()
