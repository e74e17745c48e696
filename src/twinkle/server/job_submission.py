"""The one way by which jobs are taken on, whatever dialect asked for them: made of a request, admitted, written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import httpx

from twinkle.core.addresses import Network, judge_host, parse_networks
from twinkle.core.errors import InvalidInput
from twinkle.core.ids import new_id
from twinkle.core.job import DEFAULT_NICE, Dependency, Job, JobKind, NewJob
from twinkle.server.access.sealing import Sealer
from twinkle.server.state import ServerState
from twinkle.wire.bodies.jobs import AfterJob, JobRequest
from twinkle.wire.bodies.jobs_specs import parse_spec
from twinkle.wire.job_groups import expanded

MAX_JOBS_A_REQUEST = 2000
"""Members of sweeps and jobs of flows included: they are written in one transaction."""

REQUEST_PREFIX = "request:"
"""Of a client id that no client has chosen: of requests that came with an idempotency key and without an id."""


async def submit_jobs(server: ServerState, tenant: str, news: Sequence[NewJob]) -> list[Job]:
    """Take jobs on, all of them or none; those that were submitted before come back as they stand.

    Raises:
        Conflict: A client's id was used for another job.
        InvalidInput: A webhook would go to where only the service can reach.
        NotFound: A job to wait for does not exist, or is another tenant's.
        InvalidInput: A sweep or a flow is wrong somewhere within, or there are too many jobs in the request.
        LimitReached: The tenant would have more jobs than it may have.
    """
    networks = parse_networks(server.common.settings.webhook_networks)
    for new in news:
        _judge_hook(new, networks)
    groups = await server.common.object_io.run(_expanded, news)
    jobs = await server.common.sql.run(server.jobs.store.create_groups, groups)
    server.jobs.bell.ring()
    return jobs


def _expanded(news: Sequence[NewJob]) -> list[list[NewJob]]:
    """Each job with all that it is made of."""
    groups: list[list[NewJob]] = []
    num_jobs = 0
    for new in news:
        groups.append(expanded(new))
        num_jobs += len(groups[-1])
        if num_jobs > MAX_JOBS_A_REQUEST:
            raise InvalidInput(
                "jobs", f"are more than {MAX_JOBS_A_REQUEST} with all members; send them in several requests"
            )
    return groups


def new_job(
    tenant: str,
    request: JobRequest,
    *,
    idempotency_key: str | None,
    ids: Mapping[str, str],
    sealer: Sealer,
    within: str = "",
) -> NewJob:
    """A job of a request whose spec is read, and kept with everything that it left to the defaults.

    Args:
        tenant: Whose.
        request: What was asked for.
        idempotency_key: The request's own, where the client has chosen no id.
        ids: Jobs by their clients' ids, as :func:`ids_of` gives them.
        sealer: Keeps what in the spec is secret.
        within: Where in the request it stands.

    Raises:
        InvalidInput: Its kind or something in its spec is wrong.
    """
    values = {**request.spec, **({"dry_run": True} if request.dry_run else {})}
    spec = parse_spec(request.kind, values, within=within)
    client_id = request.client_id or (idempotency_key and f"{REQUEST_PREFIX}{idempotency_key}")
    stored = sealer.sealed(spec.model_dump(mode="json", exclude_none=True), tenant)
    return NewJob(
        id=ids.get(client_id or "") or f"job-{new_id()}",
        tenant=tenant,
        kind=JobKind(request.kind),
        spec=stored,
        digest=_digest(request, stored),
        client_id=client_id,
        name=request.name,
        after=tuple(_dependency(one, ids) for one in request.after),
        nice=DEFAULT_NICE if request.priority is None else -request.priority,
        max_attempts=request.max_attempts,
        notify_url=request.notify_url,
        metadata=request.metadata,
        seed=_seed_of(stored),
    )


async def ids_of(server: ServerState, tenant: str, requests: Sequence[JobRequest]) -> dict[str, str]:
    """The ids of jobs by what their clients call them: those that are there, and new ones for those of the request."""
    own = [request.client_id for request in requests if request.client_id is not None]
    named = {*own, *(one.job for request in requests for one in request.after)}
    known = await server.common.sql.run(server.jobs.store.ids_of, tenant, sorted(named)) if named else {}
    return {client_id: f"job-{new_id()}" for client_id in own} | known


def _judge_hook(new: NewJob, networks: Sequence[Network]) -> None:
    """Names are looked up each time they are called; here only what is written as an address can be refused."""
    if new.notify_url is None:
        return
    try:
        url = httpx.URL(new.notify_url)
    except httpx.InvalidURL as error:
        raise InvalidInput("notify_url", f"is no URL: {error}") from error
    if not url.host or url.userinfo:
        raise InvalidInput("notify_url", "must name a host, and no user or password")
    judge_host(url.host, networks, field="notify_url")


def _seed_of(spec: Mapping[str, object]) -> int | None:
    """What its random numbers follow from, for a kind whose owner may choose that."""
    seed = spec.get("seed")
    return seed if isinstance(seed, int) else None


def _dependency(one: AfterJob, ids: Mapping[str, str]) -> Dependency:
    return Dependency(job=ids.get(one.job, one.job), condition=one.condition)


def _digest(request: JobRequest, spec: Mapping[str, object]) -> str:
    """Fingerprints what was understood: everything but the name under which it is sent."""
    values = {**request.model_dump(mode="json", exclude={"client_id", "spec"}), "spec": spec}
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
