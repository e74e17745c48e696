"""What every route may use: made once when the app starts, given to routes as a dependency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, FastAPI, Request

from twinkle.core.clock import Clock
from twinkle.core.settings import Settings
from twinkle.server.auth import Keys
from twinkle.server.body import Bodies
from twinkle.server.futures import Futures
from twinkle.server.lane_polls import LanePolls
from twinkle.server.links import DownloadLinks
from twinkle.server.mesh_board import MeshBoard
from twinkle.server.model_texts import Texts
from twinkle.server.queue_board import QueueBoard
from twinkle.server.quota import Quotas
from twinkle.server.submit import Submitter
from twinkle.server.threads import Threads
from twinkle.server.token_feeds import TokenFeeds
from twinkle.server.tokens import Tokens
from twinkle.storage.adapters.snapshots import SnapshotStore
from twinkle.storage.blobs import BlobStore
from twinkle.storage.checkpoints.access_tokens import AccessTokens
from twinkle.storage.checkpoints.catalog import Catalog
from twinkle.storage.checkpoints.copies import Copies
from twinkle.storage.journal.branches import Branches
from twinkle.storage.journal.custom_losses import CustomLosses
from twinkle.storage.journal.progress import Progress
from twinkle.storage.journal.queues import Queues
from twinkle.storage.journal.samples import SampleJournal
from twinkle.storage.journal.timeline import Timeline
from twinkle.storage.tenants.audit import Audit
from twinkle.storage.tenants.directory import Directory, ValidKey
from twinkle.storage.tenants.session_search import SessionSearch
from twinkle.storage.tenants.usage import Usage


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The API's parts. What blocks is called through ``sql`` (databases) or ``object_io`` (blobs)."""

    settings: Settings
    clock: Clock
    directory: Directory
    catalog: Catalog
    blobs: BlobStore
    sql: Threads
    object_io: Threads
    keys: Keys
    tokens: Tokens
    bodies: Bodies
    meshes: MeshBoard
    submitter: Submitter
    futures: Futures
    quotas: Quotas
    queues: Queues
    queue_board: QueueBoard
    copies: Copies
    access_tokens: AccessTokens
    branches: Branches
    snapshots: SnapshotStore
    progress: Progress
    usage: Usage
    audit: Audit
    session_search: SessionSearch
    sample_journal: SampleJournal
    custom_losses: CustomLosses
    lane_polls: LanePolls
    links: DownloadLinks
    texts: Texts
    token_feeds: TokenFeeds
    timeline: Timeline
    trace_threads: Threads


def state_of(app: FastAPI) -> ServerState:
    """The state of an app that has started."""
    return cast(ServerState, app.state.server)


async def _server(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


async def _key(request: Request) -> ValidKey:
    server = cast(ServerState, request.app.state.server)
    return await server.keys.key_of(request.headers.get("x-api-key"))


async def _tenant(request: Request) -> str:
    return (await _key(request)).tenant


Server = Annotated[ServerState, Depends(_server)]
Key = Annotated[ValidKey, Depends(_key)]
"""The key that came with the request, itself or as a token; 401 without one."""
Tenant = Annotated[str, Depends(_tenant)]
"""The id of the tenant whose key that is."""
