"""The client for event loops, and the one implementation: the blocking one is made of it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from twinkle.client.backoff import RetryPolicy
from twinkle.client.bodies import make_body
from twinkle.client.connection import Connection
from twinkle.client.endpoint import JOB_VARIABLE, find_endpoint
from twinkle.client.errors import TwinkleError
from twinkle.client.files import AsyncFiles
from twinkle.client.future import Future
from twinkle.client.jobs import AsyncJobs
from twinkle.client.run import Run
from twinkle.client.sampler import Sampler
from twinkle.client.session import Session
from twinkle.client.transport import NATIVE_PREFIX, TINKER_PREFIX
from twinkle.wire.bodies.access_tokens import (
    DEFAULT_TTL_S,
    AccessTokenInfo,
    AccessTokensResponse,
    CreateAccessTokenRequest,
    NewAccessToken,
)
from twinkle.wire.bodies.checkpoints import (
    CheckpointInfo,
    CheckpointsResponse,
    TrainingRun,
    TrainingRunsResponse,
)
from twinkle.wire.bodies.futures import FutureResponse
from twinkle.wire.bodies.native import RunResponse
from twinkle.wire.bodies.runs import BranchTicket, ForkRequest, HistoryResponse, RewindRequest
from twinkle.wire.bodies.sampling import CreateSamplingSessionRequest, CreateSamplingSessionResponse
from twinkle.wire.bodies.session import CapabilitiesResponse, SupportedModel
from twinkle.wire.bodies.training import CreateModelRequest, LoadWeightsRequest, LoraConfig
from twinkle.wire.paths import ModelId

_log = logging.getLogger(__name__)


def _key_of_job() -> str | None:
    """What the attempts at one job share, where this is one."""
    job = os.environ.get(JOB_VARIABLE)
    return f"job:{job}" if job else None


class AsyncClient:
    """A tenant's way to a Twinkle server, for use in one event loop. An asynchronous context manager."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        tags: Sequence[str] = (),
        session_key: str | None = None,
        give_up_after_s: float = 300.0,
    ) -> None:
        """Connect nothing yet.

        Args:
            base_url: The server; else ``TWINKLE_SERVER_URL``, else ``TINKER_BASE_URL``, else one on this machine.
            api_key: The tenant's key; else ``TWINKLE_SERVER_TOKEN``, else ``TINKER_API_KEY``.
            tags: Words under which the operator finds this client's session.
            session_key: Clients with the same one share a session, one after the other: their runs are the same, in the
                order of their making. By default a script that the service runs as a job has the job's.
            give_up_after_s: How long an operation is sent again while the server cannot take it.

        Raises:
            ConfigError: There is no key, or the URL is none.
            RuntimeError: No event loop runs here.
        """
        endpoint = find_endpoint(base_url, api_key)
        self._connection = Connection(endpoint, RetryPolicy(give_up_after_s=give_up_after_s))
        self._session = Session(self._connection, tags=tags, key=session_key or _key_of_job())
        self.jobs = AsyncJobs(self._connection)
        self.files = AsyncFiles(self._connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create_run(
        self,
        base_model: str,
        *,
        rank: int = 32,
        seed: int | None = None,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
        metadata: Mapping[str, str] | None = None,
    ) -> Run:
        """A new run on a base model; returns as soon as the server has accepted it.

        Args:
            rank: Of the LoRA. 0: all of the model's weights are trained, on a mesh that is given to such runs.

        Raises:
            InvalidInput: The base model or the rank is not offered, or no mesh is given to runs of whole models.
            TransientError: The server could not be asked for as long as was tried.
        """
        session_id = await self._session.id()
        lora = make_body(
            LoraConfig, rank=rank, seed=seed, train_attn=train_attn, train_mlp=train_mlp, train_unembed=train_unembed
        )
        number = self._session.next_run()
        body = make_body(
            CreateModelRequest,
            session_id=session_id,
            model_seq_id=number,
            base_model=base_model,
            lora_config=lora,
            user_metadata=None if metadata is None else dict(metadata),
        )
        ticket = await self._connection.ask(f"{TINKER_PREFIX}/create_model", FutureResponse, body)
        return await self._open(str(ModelId(session_id, number)), ticket.request_id)

    async def resume_run(
        self,
        path: str,
        *,
        with_optimizer: bool = True,
        metadata: Mapping[str, str] | None = None,
        access_token: str | None = None,
    ) -> Run:
        """A new run that begins as a checkpoint, with its optimizer state or with a fresh one.

        Somebody else's checkpoint takes a weights access token of its owner's, unless it is public.

        Raises:
            NotFound: There is no such checkpoint.
            InvalidInput: It has no optimizer state, or the path is none.
        """
        session_id = await self._session.id()
        number = self._session.next_run()
        body = make_body(
            LoadWeightsRequest,
            path=path,
            optimizer=with_optimizer,
            session_id=session_id,
            model_seq_id=number,
            user_metadata=None if metadata is None else dict(metadata),
            weights_access_token=access_token,
        )
        ticket = await self._connection.ask(f"{TINKER_PREFIX}/load_weights", FutureResponse, body)
        return await self._open(str(ModelId(session_id, number)), ticket.request_id)

    async def attach(self, run_id: str) -> Run:
        """A run that was made earlier, by this process or another one; it goes on after the last accepted operation.

        Raises:
            NotFound: There is no such run, or it is another tenant's.
        """
        return await self._open(run_id)

    async def fork_run(self, run_id: str, *, step: int | None = None, operation: int | None = None) -> Run:
        """A new run that begins as a run was after a step of its optimizer, or after an operation.

        It is trained from here, also if the source was made through the Twinkle dialect.

        Raises:
            NotFound: There is no such run.
            InvalidInput: That state cannot be had, with the reason.
        """
        body = make_body(
            ForkRequest,
            step=step,
            operation=operation,
            session_id=await self._session.id(),
            model_seq_id=self._session.next_run(),
            dialect="tinker",
        )
        ticket = await self._connection.ask(f"{NATIVE_PREFIX}/runs/{run_id}/fork", BranchTicket, body)
        return await self._open(ticket.run_id, ticket.request_id)

    async def rewind_run(self, run_id: str, *, step: int | None = None, operation: int | None = None) -> Run:
        """The same run, going on from a past state, behind all that was accepted; train on with what this returns.

        Raises:
            NotFound: There is no such run.
            InvalidInput: That state cannot be had, with the reason.
        """
        body = make_body(RewindRequest, step=step, operation=operation)
        ticket = await self._connection.ask(f"{NATIVE_PREFIX}/runs/{run_id}/rewind", BranchTicket, body)
        return await self._open(ticket.run_id, ticket.request_id)

    async def history(self, run_id: str) -> HistoryResponse:
        """Where a run comes from, its steps, and how far back it can be taken."""
        return await self._connection.ask(f"{NATIVE_PREFIX}/runs/{run_id}/history", HistoryResponse)

    async def sampler(self, *, path: str | None = None, base_model: str | None = None) -> Sampler:
        """Something to sample from: a checkpoint's path, a base model, or both when they agree.

        Raises:
            NotFound: There is no such checkpoint.
            InvalidInput: Neither was given, or they do not agree.
        """
        body = make_body(
            CreateSamplingSessionRequest,
            session_id=await self._session.id(),
            sampling_session_seq_id=self._session.next_sampler(),
            base_model=base_model,
            model_path=path,
        )
        answer = await self._connection.ask(
            f"{TINKER_PREFIX}/create_sampling_session", CreateSamplingSessionResponse, body
        )
        return Sampler(self._connection, answer.sampling_session_id)

    def future(self, request_id: str) -> Future[Any]:
        """The future of an operation that this process or another one submitted; fails when there is none.

        Raises:
            ClientClosed: The client is closed.
        """
        return self._connection.follow(request_id)

    async def models(self) -> list[SupportedModel]:
        """The base models that are served."""
        answer = await self._connection.ask(f"{TINKER_PREFIX}/get_server_capabilities", CapabilitiesResponse)
        return answer.supported_models

    async def runs(self, *, limit: int = 20, offset: int = 0) -> list[TrainingRun]:
        """The tenant's runs, newest first."""
        path = f"{TINKER_PREFIX}/training_runs?limit={limit}&offset={offset}"
        return (await self._connection.ask(path, TrainingRunsResponse)).training_runs

    async def checkpoints(self, run_id: str) -> list[CheckpointInfo]:
        """A run's checkpoints."""
        path = f"{TINKER_PREFIX}/training_runs/{run_id}/checkpoints"
        return (await self._connection.ask(path, CheckpointsResponse)).checkpoints

    async def create_access_token(
        self, *, path: str | None = None, run_id: str | None = None, ttl_s: int = DEFAULT_TTL_S, name: str = ""
    ) -> NewAccessToken:
        """A token with which other tenants read one checkpoint, or all of a run; its ``token`` is shown this once.

        Raises:
            NotFound: There is no such checkpoint or run, or it is another tenant's.
            InvalidInput: Not one of the two was given.
        """
        body = make_body(CreateAccessTokenRequest, path=path, run_id=run_id, ttl_seconds=ttl_s, name=name)
        return await self._connection.ask(f"{NATIVE_PREFIX}/access_tokens", NewAccessToken, body)

    async def access_tokens(self, run_id: str | None = None) -> list[AccessTokenInfo]:
        """The tenant's tokens, of one run or of all, without themselves."""
        query = "" if run_id is None else f"?run_id={quote(run_id)}"
        path = f"{NATIVE_PREFIX}/access_tokens{query}"
        return (await self._connection.ask(path, AccessTokensResponse)).tokens

    async def revoke_access_token(self, token_id: str) -> AccessTokenInfo:
        """Let a token open nothing any more. Operations that were accepted with it go on.

        Raises:
            NotFound: There is no such token.
        """
        path = f"{NATIVE_PREFIX}/access_tokens/{quote(token_id, safe='')}"
        return await self._connection.ask(path, AccessTokenInfo, method="DELETE")

    async def flush(self, *, timeout_s: float | None = None) -> None:
        """Return when everything handed over so far is accepted, or has failed.

        Raises:
            TimeoutError: The time is up; it is still tried.
        """
        async with asyncio.timeout(timeout_s):
            await self._connection.flush()

    async def close(self, *, flush_timeout_s: float = 60.0) -> None:
        """Hand everything over, say goodbye and disconnect. What was accepted goes on without this client."""
        try:
            await self.flush(timeout_s=flush_timeout_s)
            async with asyncio.timeout(flush_timeout_s):
                await self._session.finish()
        except TimeoutError:
            _log.warning("closed with %d operations that the server did not take", self._connection.num_unsent)
        except TwinkleError as error:
            _log.warning("closed without saying goodbye: %s", error)
        finally:
            await self._connection.close()

    async def _open(self, run_id: str, begun_by: str | None = None) -> Run:
        run = await self._connection.ask(f"{NATIVE_PREFIX}/runs/{run_id}", RunResponse)
        return Run(
            self._connection,
            run.run_id,
            base_model=run.base_model,
            rank=run.rank,
            next_seq=run.next_seq,
            begun=None if begun_by is None else self.future(begun_by),
        )
