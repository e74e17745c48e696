"""A client's presence: a session that is opened with the first thing that needs one, and kept alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from twinkle.client.bodies import to_json
from twinkle.client.connection import Connection
from twinkle.client.errors import Expired
from twinkle.client.transport import TINKER_PREFIX, Request
from twinkle.wire.bodies.session import (
    CreateSessionRequest,
    CreateSessionResponse,
    FinishReason,
    FinishSessionRequest,
    SessionHeartbeatRequest,
)

_HEARTBEAT_S = 10.0

_log = logging.getLogger(__name__)


class Session:
    """One session with the numbers that are given out in it. Lives on the connection's loop."""

    def __init__(self, connection: Connection, *, tags: Sequence[str], key: str | None) -> None:
        """Open nothing yet; the same ``key`` gets the same session, whichever process brings it."""
        self._connection = connection
        self._key = key
        self._tags = list(tags)
        self._opening = asyncio.Lock()
        self._id: str | None = None
        self._num_runs = 0
        self._num_samplers = 0

    async def id(self) -> str:
        """The session's id; opens it when this is the first time."""
        async with self._opening:
            if self._id is None:
                body = CreateSessionRequest(tags=self._tags, sdk_version="twinkle.client")
                answer = await self._connection.ask(
                    f"{TINKER_PREFIX}/create_session", CreateSessionResponse, body, key=self._key
                )
                self._id = answer.session_id
                self._connection.spawn(self._keep_alive(self._id))
        return self._id

    def next_run(self) -> int:
        """A number no other run of this session has."""
        self._num_runs += 1
        return self._num_runs - 1

    def next_sampler(self) -> int:
        """A number no other sampler of this session has."""
        self._num_samplers += 1
        return self._num_samplers - 1

    async def finish(self) -> None:
        """Say goodbye, if it was ever opened. What was accepted goes on."""
        if self._id is None:
            return
        body = FinishSessionRequest(reason=FinishReason(type="success"))
        await self._connection.transport.send(
            Request(path=f"{TINKER_PREFIX}/sessions/{self._id}/finish", content=to_json(body))
        )

    async def _keep_alive(self, session_id: str) -> None:
        request = Request(
            path=f"{TINKER_PREFIX}/session_heartbeat", content=to_json(SessionHeartbeatRequest(session_id=session_id))
        )
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            try:
                await self._connection.transport.send(request)
            except Expired:
                return
            except Exception as error:  # noqa: BLE001 - the border: without heartbeats the session would end
                _log.warning("heartbeat of session %s failed: %s; it is tried again", session_id, error)
