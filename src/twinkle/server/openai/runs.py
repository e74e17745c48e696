"""A training run in the place of a model: the newest of its checkpoints."""

from __future__ import annotations

from functools import partial

from fastapi import Request

from twinkle.server.openai.drawing import newest_checkpoint
from twinkle.server.openai.ordering import number_of, session_of_request
from twinkle.server.receiving.request_metadata import idempotency_key
from twinkle.server.state import Server, ServerState
from twinkle.wire.paths import is_model_id


async def path_of_run(server: ServerState, tenant: str, run: str, *, session_id: str, repeated_seq: int | None) -> str:
    """The path of its newest checkpoint, or of the one that was the newest when a repeated request was first asked.

    Raises:
        NotFound: As :func:`newest_checkpoint` does.
    """
    if repeated_seq is not None:
        sessions = server.artifacts.sampling_sessions
        before = await server.common.sql.run(
            partial(sessions.run_sampled_before, session_id, run=run, seq=repeated_seq)
        )
        if before is not None:
            return before
    return (await newest_checkpoint(server.common, server.artifacts, tenant, run)).path


async def definite_model(server: Server, request: Request, tenant: str, name: str) -> str:
    """A model's name as a request has it, with the checkpoint that is meant in the place of a training run."""
    if not is_model_id(name):
        return name
    key = idempotency_key(request, "Idempotency-Key")
    session = await session_of_request(server, request, tenant)
    repeated_seq = number_of(key, "0") if key else None
    return await path_of_run(server, tenant, name, session_id=session.id, repeated_seq=repeated_seq)
