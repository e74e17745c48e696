"""The API in process, as one job calls it: its session, its adapters, its samplers, and any other route.

Everything that goes through here is numbered by the plan, so whoever runs the plan again sends the same and is answered
with what came of it the first time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import structlog
from pydantic import SecretStr

from twinkle.client.backoff import RetryPolicy
from twinkle.client.bodies import make_body
from twinkle.client.connection import Connection
from twinkle.client.endpoint import Endpoint
from twinkle.client.errors import TwinkleError
from twinkle.client.transport import TINKER_PREFIX
from twinkle.core.job import Job
from twinkle.jobs.run import JobRun, JobSampler, submit
from twinkle.wire.bodies.sampling import CreateSamplingSessionRequest, CreateSamplingSessionResponse
from twinkle.wire.bodies.session import (
    CreateSessionRequest,
    CreateSessionResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
)
from twinkle.wire.bodies.training import CreateModelRequest, LoadWeightsRequest, LoraConfig

_URL = "http://in-process"
_PATIENCE_S = 600.0
"""How long a request is sent again while the journal or the broker is away; then the attempt has failed."""
_TIMEOUT_S = 120.0

_log = structlog.get_logger()


class Door:
    """One job's way into the API. Lives on one event loop, for one attempt."""

    def __init__(self, job: Job, carrier: httpx.AsyncBaseTransport, *, heartbeat_s: float) -> None:
        """Open nothing yet.

        Args:
            job: On whose behalf everything is asked.
            carrier: Takes requests into the API as this job; nobody else's requests come that way.
            heartbeat_s: How often the session says that it is alive, while the attempt lasts.
        """
        self.job = job
        endpoint = Endpoint(_URL, SecretStr(""))
        self._connection = Connection(endpoint, RetryPolicy(give_up_after_s=_PATIENCE_S), carrier=carrier)
        self._http = httpx.AsyncClient(base_url=_URL, transport=carrier, timeout=_TIMEOUT_S)
        self._heartbeat_s = heartbeat_s
        self._session_id: str | None = None
        self._opening = asyncio.Lock()

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Any route's answer, whatever its status. It is asked once: a plan that repeats it gives it a key or a number.

        Args:
            method: Such as ``POST``.
            path: From the root, such as ``/v1/chat/completions``.
            json: A body to be sent as JSON.
            content: A body as it is.
            headers: More headers.
        """
        return await self._http.request(method, path, json=json, content=content, headers=headers)

    async def session(self) -> str:
        """The job's one session, the same in every attempt; kept alive from the first call on."""
        async with self._opening:
            if self._session_id is None:
                body = make_body(
                    CreateSessionRequest,
                    tags=["job", self.job.kind.value],
                    user_metadata={"twinkle_priority": str(self.job.priority), "job": self.job.id},
                    display_name=self.job.name,
                    sdk_version="twinkle.jobs",
                )
                answer = await self._connection.ask(f"{TINKER_PREFIX}/create_session", CreateSessionResponse, body)
                self._session_id = answer.session_id
                self._connection.spawn(self._keep_alive(answer.session_id))
        return self._session_id

    async def create_adapter(
        self,
        index: int,
        *,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
        metadata: Mapping[str, str] | None = None,
    ) -> JobRun:
        """The job's adapter number ``index``, made the first time and found again later; its operations begin at 1."""
        body = make_body(
            CreateModelRequest,
            session_id=await self.session(),
            model_seq_id=index,
            base_model=base_model,
            lora_config=make_body(
                LoraConfig,
                rank=rank,
                seed=seed,
                train_attn=train_attn,
                train_mlp=train_mlp,
                train_unembed=train_unembed,
            ),
            user_metadata=None if metadata is None else dict(metadata),
        )
        begun = await submit(self._connection, "create_model", body)
        return JobRun(self._connection, await self.session(), index, begun)

    async def load_adapter(
        self, index: int, path: str, *, with_optimizer: bool = True, metadata: Mapping[str, str] | None = None
    ) -> JobRun:
        """The job's adapter number ``index``, beginning as a checkpoint; its operations begin at 1."""
        body = make_body(
            LoadWeightsRequest,
            path=path,
            optimizer=with_optimizer,
            session_id=await self.session(),
            model_seq_id=index,
            user_metadata=None if metadata is None else dict(metadata),
        )
        begun = await submit(self._connection, "load_weights", body)
        return JobRun(self._connection, await self.session(), index, begun)

    async def sampler(self, index: int, *, base_model: str | None = None, path: str | None = None) -> JobSampler:
        """The job's sampler number ``index``, on a base model or a checkpoint; the same in every attempt."""
        body = make_body(
            CreateSamplingSessionRequest,
            session_id=await self.session(),
            sampling_session_seq_id=index,
            base_model=base_model,
            model_path=path,
        )
        answer = await self._connection.ask(
            f"{TINKER_PREFIX}/create_sampling_session", CreateSamplingSessionResponse, body
        )
        return JobSampler(self._connection, answer.sampling_session_id)

    async def close(self) -> None:
        """Stop the heartbeats and disconnect; what was submitted goes on."""
        await self._connection.close()
        await self._http.aclose()

    async def _keep_alive(self, session_id: str) -> None:
        body = SessionHeartbeatRequest(session_id=session_id)
        while True:
            try:
                await self._connection.ask(f"{TINKER_PREFIX}/session_heartbeat", SessionHeartbeatResponse, body)
            except TwinkleError as error:
                _log.warning("job.heartbeat_failed", job=self.job.id, error=error.message, next="it is tried again")
            await asyncio.sleep(self._heartbeat_s)
