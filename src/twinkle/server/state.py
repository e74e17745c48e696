"""What the server holds, in five groups: made once when the app starts; a route takes those that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, FastAPI, Request

from twinkle.core.actor import act_as, job_actor, key_actor
from twinkle.core.clock import Clock
from twinkle.core.errors import Unauthenticated
from twinkle.core.scopes import ALL_SCOPES, Scope
from twinkle.core.settings import Settings
from twinkle.grading.rewards import RewardProcesses
from twinkle.server.access.acting import Acting, acting_in
from twinkle.server.access.any_key import refuse_strangers
from twinkle.server.access.auth import Keys, Tokens
from twinkle.server.access.links import DownloadLinks
from twinkle.server.access.scopes import READING, check_room, refuse_beyond_scopes, refuse_suspended
from twinkle.server.access.sealing import Sealer
from twinkle.server.access.signing import Cursors
from twinkle.server.admission.holding import HoldingLimits
from twinkle.server.admission.quota import Quotas
from twinkle.server.answering.held_results import HeldResults
from twinkle.server.answering.job_polls import JobPolls
from twinkle.server.answering.lane_polls import LanePolls
from twinkle.server.answering.token_feeds import TokenFeeds
from twinkle.server.boards import MeshBoard, QueueBoard
from twinkle.server.connections.free_memory import FreedMemory
from twinkle.server.fine_tuned import FineTunedModels
from twinkle.server.futures import Futures
from twinkle.server.model_texts import Texts
from twinkle.server.readiness import ObjectBoard
from twinkle.server.receiving.body import Bodies, charge_to
from twinkle.server.receiving.in_progress import RequestsInProgress
from twinkle.server.receiving.resends import Resends
from twinkle.server.submit import Submitter
from twinkle.server.threads import Listings, Threads
from twinkle.storage.adapters.adapters import Adapters
from twinkle.storage.adapters.named import NamedAdapters
from twinkle.storage.adapters.snapshots import SnapshotStore
from twinkle.storage.blobs import BlobStore
from twinkle.storage.checkpoints.access_tokens import AccessTokens
from twinkle.storage.checkpoints.brought import BroughtCheckpoints
from twinkle.storage.checkpoints.checkpoints import Checkpoints
from twinkle.storage.checkpoints.pushes import Pushes
from twinkle.storage.disks import Disks
from twinkle.storage.files.files import Files
from twinkle.storage.files.uploads import Uploads
from twinkle.storage.jobs.jobs import Jobs
from twinkle.storage.jobs.standing import JobOutlooks
from twinkle.storage.journal.branches import Branches
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.queues import Queues
from twinkle.storage.journal.timeline import Timeline
from twinkle.storage.opened_folders import OpenedFolders
from twinkle.storage.processors.processors import Processors
from twinkle.storage.sampling.sampling_sessions import SamplingSessions
from twinkle.storage.sampling.templates import SamplerTemplates
from twinkle.storage.tenants.accounting import Accounting
from twinkle.storage.tenants.audit import Audit
from twinkle.storage.tenants.sessions import Sessions
from twinkle.storage.tenants.tenants import Tenants, ValidKey
from twinkle.tasks.jobs import JobBell

_BEARER = "bearer "


@dataclass(frozen=True, kw_only=True)
class CommonParts:
    """What a route of any kind may use. What blocks is called through ``sql`` (databases) or ``object_io`` (blobs).

    What reads many rows of a database, or may, goes through ``listings``; ``texts`` is for what makes prompts of texts.
    """

    settings: Settings
    clock: Clock
    bodies: Bodies
    disks: Disks
    sql: Threads
    listings: Listings
    texts: Listings
    results: HeldResults
    in_progress: RequestsInProgress
    freed: FreedMemory
    object_io: Threads


@dataclass(frozen=True, kw_only=True)
class AccountParts:
    """Who the callers are: their keys, sessions and limits, what they did and what they used."""

    tenants: Tenants
    sessions: Sessions
    accounting: Accounting
    audit: Audit
    keys: Keys
    tokens: Tokens
    cursors: Cursors
    quotas: Quotas
    holdings: HoldingLimits
    resends: Resends


@dataclass(frozen=True, kw_only=True)
class QueueParts:
    """What is to be done, by which mesh, how far it is, and what came of it."""

    submitter: Submitter
    futures: Futures
    lane_polls: LanePolls
    token_feeds: TokenFeeds
    meshes: MeshBoard
    queues: Queues
    queue_board: QueueBoard
    journal: Journal
    branches: Branches
    snapshots: SnapshotStore
    timeline: Timeline
    trace_threads: Threads


@dataclass(frozen=True, kw_only=True)
class ArtifactParts:
    """What is kept: adapters, checkpoints and who may read them, tenants' files and data sets, models' tokenizers."""

    adapters: Adapters
    named_adapters: NamedAdapters
    checkpoints: Checkpoints
    brought: BroughtCheckpoints
    folders: OpenedFolders
    fine_tuned: FineTunedModels
    access_tokens: AccessTokens
    pushes: Pushes
    sampling_sessions: SamplingSessions
    sampler_templates: SamplerTemplates
    files: Files
    processors: Processors
    uploads: Uploads
    blobs: BlobStore
    object_board: ObjectBoard
    links: DownloadLinks
    texts: Texts


@dataclass(frozen=True, kw_only=True)
class JobParts:
    """What the service is to do by itself, who follows that, and the bell to ring when a job may have become ready.

    The ``sealer`` keeps the secrets of specs.
    """

    store: Jobs
    outlooks: JobOutlooks
    sealer: Sealer
    polls: JobPolls
    bell: JobBell
    hook_key_of: Callable[[str], bytes]
    """What the webhooks of a tenant are signed with."""
    rewards: RewardProcesses
    """What graders compute that are tried before a job is given to them."""


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """All five, for the few routes that need something of each."""

    common: CommonParts
    accounts: AccountParts
    queue: QueueParts
    artifacts: ArtifactParts
    jobs: JobParts


def state_of(app: FastAPI) -> ServerState:
    """The state of an app that has started."""
    server: ServerState = app.state.server
    return server


async def _server(request: Request) -> ServerState:
    return state_of(request.app)


async def _common(request: Request) -> CommonParts:
    return state_of(request.app).common


async def _accounts(request: Request) -> AccountParts:
    return state_of(request.app).accounts


async def _queue(request: Request) -> QueueParts:
    return state_of(request.app).queue


async def _artifacts(request: Request) -> ArtifactParts:
    return state_of(request.app).artifacts


async def _jobs(request: Request) -> JobParts:
    return state_of(request.app).jobs


async def _key(request: Request) -> ValidKey:
    if acting_in(request) is not None:
        raise Unauthenticated("a job has no key: it calls in process, and there is nothing to exchange or to revoke")
    return await _permitted(request, await _keys_for(request).key_of(request.headers.get("x-api-key")))


async def _permitted(request: Request, key: ValidKey) -> ValidKey:
    """The key, if it may be used for this request and its tenant may; a job that acts stops by itself."""
    # Not ``request.url``: making one costs as much as all the rest of this.
    method, path, server = request.method, request.scope["path"], state_of(request.app)
    act_as(key_actor(key.id))
    request.state.scopes = key.scopes
    refuse_beyond_scopes(key.scopes, method, path)
    server.common.in_progress.begin(request, key.tenant, key.id)
    quotas = server.accounts.quotas
    account = await quotas.account(key.tenant)
    if account.suspension is not None:
        refuse_suspended(account.suspension, method, path)
    check_room(server.common.disks, method, path)
    charge_to(quotas.bodies_under(account), request)
    return key


async def _tenant(request: Request) -> str:
    acting = acting_in(request)
    return (await _key(request)).tenant if acting is None else await _acted_for(request, acting)


async def _caller(request: Request) -> str:
    acting = acting_in(request)
    if acting is not None:
        return await _acted_for(request, acting)
    key = await _keys_for(request).key_of(_bearer(request) or request.headers.get("x-api-key"))
    return (await _permitted(request, key)).tenant


async def _acted_for(request: Request, acting: Acting) -> str:
    act_as(job_actor(acting.job))
    check_room(state_of(request.app).common.disks, request.method, request.scope["path"])
    # What only reads has no body, and need not wait for the account.
    if request.method not in READING:
        charge_to(await state_of(request.app).accounts.quotas.bodies_of(acting.tenant), request)
    return acting.tenant


def scopes_of(request: Request) -> frozenset[Scope]:
    """What the key of a request that was let in may be used for; a job that acts may all that its tenant may."""
    if acting_in(request) is not None:
        return ALL_SCOPES
    return cast(frozenset[Scope], request.state.scopes)


def _bearer(request: Request) -> str | None:
    """What came as a bearer token. Twinkle's own header goes first: proxies use the other one for themselves."""
    for header in ("twinkle-authorization", "authorization"):
        value = request.headers.get(header, "")
        if value.lower().startswith(_BEARER):
            return value[len(_BEARER) :].strip()
    return None


def _keys_for(request: Request) -> Keys:
    keys = state_of(request.app).accounts.keys
    if keys.takes_any:
        refuse_strangers(request)
    return keys


Common = Annotated[CommonParts, Depends(_common)]
Accounts = Annotated[AccountParts, Depends(_accounts)]
Queue = Annotated[QueueParts, Depends(_queue)]
Artifacts = Annotated[ArtifactParts, Depends(_artifacts)]
JobBook = Annotated[JobParts, Depends(_jobs)]
Server = Annotated[ServerState, Depends(_server)]
Key = Annotated[ValidKey, Depends(_key)]
"""The key that came with the request, itself or as a token; 401 without one."""
Tenant = Annotated[str, Depends(_tenant)]
"""The id of the tenant whose key that is."""
Caller = Annotated[str, Depends(_caller)]
"""The tenant whose key came as a bearer token, as OpenAI's and Twinkle's clients send it, or in X-API-Key; else 401."""
