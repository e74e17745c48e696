"""What a client must know to go on with a training run that another process began."""

from __future__ import annotations

from fastapi import APIRouter, Response

from twinkle.server.openapi import described
from twinkle.server.state import Artifacts, Common, Tenant
from twinkle.server.tinker.answers import answer
from twinkle.wire.bodies.native import RunResponse

router = APIRouter()


@router.get("/runs/{run_id}", openapi_extra=described(RunResponse, refusals=[404]))
async def show_run(run_id: str, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """A run, and the number of its next operation."""
    run = await common.sql.run(artifacts.catalog.adapter, run_id, tenant=tenant)
    return answer(
        RunResponse(
            run_id=run.id,
            session_id=run.session,
            base_model=run.config.base_model,
            rank=run.config.rank,
            next_seq=await common.sql.run(artifacts.catalog.next_seq, run.id),
        )
    )
