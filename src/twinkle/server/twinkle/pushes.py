"""Checkpoints that are pushed by themselves: wanted, listed and ended by their owner."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from twinkle.core.job import JobKind
from twinkle.core.model_names import HUB_SCHEMES
from twinkle.server.openapi import Access, described
from twinkle.server.state import Artifacts, Caller, Common, Server
from twinkle.server.tinker.answers import answer, moment
from twinkle.storage.checkpoints.pushes import Push, filled
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.jobs_specs import parse_spec
from twinkle.wire.bodies.twinkle_pushes import PushesResponse, PushInfo, PushRequest

_EXAMPLE = "tinker://run/weights/name"

router = APIRouter(prefix="/twinkle/pushes")


@router.post("", openapi_extra=described(PushInfo, body=PushRequest, refusals=[404], access=Access.TWINKLE))
async def want_push(request: Request, server: Server, tenant: Caller) -> Response:
    """Export every checkpoint that is saved from now on, by a job each; in the place of what was wanted before."""
    body = parse_body(PushRequest, await server.common.bodies.read(request))
    target = body.to if "://" in body.to else f"{HUB_SCHEMES[0]}{body.to}"
    values = {
        "checkpoint": _EXAMPLE,
        "forms": ["peft"],
        "to": filled(target, run="run", checkpoint="name"),
        "private": body.private,
        "hub_token": body.hub_token,
    }
    spec = parse_spec(JobKind.EXPORT.value, {name: value for name, value in values.items() if value is not None})
    stored = server.jobs.sealer.sealed(spec.model_dump(mode="json", exclude_none=True), tenant)
    push = await server.common.sql.run(server.artifacts.pushes.want, tenant, body.run_id, {**stored, "to": target})
    return answer(_describe(push))


@router.get("", openapi_extra=described(PushesResponse, access=Access.TWINKLE))
async def list_pushes(common: Common, artifacts: Artifacts, tenant: Caller) -> Response:
    """What the caller wants pushed, without the tokens."""
    pushes = await common.sql.run(artifacts.pushes.all, tenant)
    return answer(PushesResponse(pushes=[_describe(push) for push in pushes]))


@router.delete("/{push_id}", openapi_extra=described(PushInfo, refusals=[404], access=Access.TWINKLE))
async def end_push(push_id: str, common: Common, artifacts: Artifacts, tenant: Caller) -> Response:
    """Push no more by it; exports that were begun go on."""
    return answer(_describe(await common.sql.run(artifacts.pushes.end, push_id, tenant)))


def _describe(push: Push) -> PushInfo:
    return PushInfo(
        push_id=push.id,
        run_id=push.run,
        to=push.spec["to"],
        private=push.spec["private"],
        created_at=moment(push.created_at),
        last_job=push.last_job,
    )
