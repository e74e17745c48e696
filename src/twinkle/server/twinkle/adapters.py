"""The birth of an adapter of this dialect, and which one a call is about."""

from __future__ import annotations

from fastapi import Response

from twinkle.server.state import ServerState
from twinkle.server.tinker.answers import answer
from twinkle.wire.bodies.twinkle_calls import AdapterCreated


async def created_answer(server: ServerState, adapter: str) -> Response:
    """The answer to ``add_adapter_to_model`` once the worker has made the adapter."""
    name = await server.common.sql.run(server.artifacts.named_adapters.name_of, adapter)
    return answer(AdapterCreated(adapter_name=name or adapter, training_run_id=adapter))
