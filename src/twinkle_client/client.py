"""What a server knows: runs, checkpoints, capacity, outcomes of calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from twinkle.core.keywords import known_keywords
from twinkle_client.answers import anything
from twinkle_client.connection import HEARTBEAT_S, Accepted, Connection, use
from twinkle_client.endpoint import find_endpoint
from twinkle_client.errors import BadAnswer, TwinkleError
from twinkle_client.futures import CallFuture
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler
from twinkle_client.sending import CALL_TIMEOUT_S
from twinkle_client.types import (
    CapacityInfoResponse,
    Checkpoint,
    CheckpointsResponse,
    Cursor,
    DeleteCheckpointResponse,
    ParsedCheckpointTwinklePath,
    Push,
    PushesResponse,
    ServerCapabilities,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)

AnswerT = TypeVar("AnswerT", bound=BaseModel)

_PAGE = 100
_HEALTH_TIMEOUT_S = 5.0


def init_twinkle_client(
    base_url: str | None = None,
    api_key: str | None = None,
    session_heartbeat_interval: float = HEARTBEAT_S,
    *,
    route_prefix: str = "/twinkle",
    session_metadata: Mapping[str, Any] | None = None,
    call_timeout_s: float = CALL_TIMEOUT_S,
    **options: object,
) -> TwinkleClient:
    """Connect this process to a server of the Twinkle dialect; the classes of this package use it from now on.

    Args:
        base_url: For example ``http://127.0.0.1:8000`` or ``https://host/twinkle``; ``/api/v1`` is appended if absent.
            Else ``TWINKLE_SERVER_URL``, else a server on this machine.
        api_key: Else ``TWINKLE_SERVER_TOKEN``, else ``EMPTY_TOKEN``; an empty string is none.
        session_heartbeat_interval: Seconds between two signs of life.
        route_prefix: Of the server's own routes.
        session_metadata: To recognise the session by.
        call_timeout_s: How long a blocking call may take, outages included.
        options: Others are taken, and named in the log.

    Raises:
        TwinkleError: The server cannot be reached or refuses the key.
    """
    known_keywords("init_twinkle_client", options, inspect.signature(init_twinkle_client).parameters)
    client = TwinkleClient(
        base_url,
        api_key,
        session_heartbeat_interval,
        route_prefix=route_prefix,
        session_metadata=session_metadata,
        call_timeout_s=call_timeout_s,
    )
    use(client.connection)
    return client


class TwinkleClient:
    """A session on a server, and its questions. A context manager."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        session_heartbeat_interval: float = HEARTBEAT_S,
        *,
        route_prefix: str = "/twinkle",
        session_metadata: Mapping[str, Any] | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Open a session; arguments and errors are those of :func:`init_twinkle_client`."""
        self.connection = Connection(
            find_endpoint(base_url, api_key, route_prefix=route_prefix),
            heartbeat_interval_s=session_heartbeat_interval,
            call_timeout_s=call_timeout_s,
        )
        self.connection.open_session(session_metadata)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def session_id(self) -> str | None:
        """The session's id; adapters belong to it."""
        return self.connection.session_id

    @property
    def is_session_lost(self) -> bool:
        """Whether the server has forgotten the session; it is said in the log as well."""
        return self.connection.is_session_lost

    def close(self) -> None:
        """Stop the signs of life. What was accepted goes on."""
        self.connection.close()

    def model(self, model_id: str, **settings: Any) -> MultiLoraTransformersModel:
        """The model of this name at the server, as ``MultiLoraTransformersModel(model_id)`` of this session."""
        return MultiLoraTransformersModel(model_id, connection=self.connection, **settings)

    def sampler(self, model_id: str, **settings: Any) -> vLLMSampler:
        """The same to sample from."""
        return vLLMSampler(model_id, connection=self.connection, **settings)

    # The server.

    def health_check(self) -> bool:
        """Whether the server answers that it is well."""
        try:
            answer = self.connection.ask("GET", self.connection.gateway("/healthz"), timeout_s=_HEALTH_TIMEOUT_S)
        except (TwinkleError, TimeoutError):
            return False
        return bool(answer.get("status") == "ok")

    def get_capacity_info(self) -> CapacityInfoResponse:
        """How many adapters there is room for."""
        return self._get(CapacityInfoResponse, "/capacity_info")

    def get_server_capabilities(self) -> ServerCapabilities:
        """Which base models are served."""
        return self._get(ServerCapabilities, "/get_server_capabilities")

    def create_session(self, metadata: Mapping[str, Any] | None = None) -> str:
        """Open another session, which takes the place of this client's; its id."""
        return self.connection.open_session(metadata)

    def future(self, request_id: str) -> CallFuture[Any]:
        """The outcome of a call that was accepted earlier, by whichever process of the same key."""
        future = CallFuture(self.connection, anything)
        future.set_accepted(Accepted(request_id=request_id))
        return future

    # Runs.

    def list_training_runs(self, limit: int = 20, offset: int = 0, all_users: bool = False) -> list[TrainingRun]:
        """Runs, newest first. Those of others are never shown, whatever ``all_users`` says."""
        return self.list_training_runs_with_cursor(limit, offset, all_users)[0]

    def list_training_runs_with_cursor(
        self, limit: int = 20, offset: int = 0, all_users: bool = False
    ) -> tuple[list[TrainingRun], Cursor]:
        """The same, and which part of all runs these are."""
        answer = self._get(TrainingRunsResponse, "/training_runs?" + urlencode({"limit": limit, "offset": offset}))
        return answer.training_runs, answer.cursor

    def get_training_run(self, run_id: str) -> TrainingRun:
        """One run; ``NotFound`` where there is none, or none of yours."""
        return self._get(TrainingRun, _run(run_id))

    def find_training_run_by_model(self, base_model: str) -> list[TrainingRun]:
        """All runs on a base model."""
        found: list[TrainingRun] = []
        offset = 0
        while True:
            runs, cursor = self.list_training_runs_with_cursor(_PAGE, offset)
            found += [run for run in runs if run.base_model == base_model]
            offset += len(runs)
            if not runs or offset >= cursor.total_count:
                return found

    # Checkpoints.

    def list_checkpoints(self, run_id: str) -> list[Checkpoint]:
        """The checkpoints of a run, in the order in which they were made."""
        return self._get(CheckpointsResponse, f"{_run(run_id)}/checkpoints").checkpoints

    def get_checkpoint_path(self, run_id: str, checkpoint_id: str) -> ParsedCheckpointTwinklePath:
        """Where a checkpoint is."""
        path = f"/checkpoint_path/{quote(run_id, safe='')}/{quote(checkpoint_id)}"
        return self._get(ParsedCheckpointTwinklePath, path)

    def get_checkpoint_twinkle_path(self, run_id: str, checkpoint_id: str) -> str:
        """The ``twinkle://`` path of a checkpoint."""
        return self.get_checkpoint_path(run_id, checkpoint_id).twinkle_path

    def get_latest_checkpoint_path(self, run_id: str) -> str | None:
        """Where the last checkpoint of a run is, or None if it has none."""
        checkpoints = self.list_checkpoints(run_id)
        return self.get_checkpoint_path(run_id, checkpoints[-1].checkpoint_id).path if checkpoints else None

    def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> DeleteCheckpointResponse:
        """Delete a checkpoint for good; ``NotFound`` where there is none."""
        path = f"{_run(run_id)}/checkpoints/{quote(checkpoint_id)}"
        return self._read(DeleteCheckpointResponse, self.connection.ask("DELETE", self.connection.gateway(path)))

    def get_weights_info(self, path: str) -> WeightsInfoResponse:
        """What the checkpoint of a path holds."""
        answer = self.connection.ask("POST", self.connection.gateway("/weights_info"), {"twinkle_path": str(path)})
        return self._read(WeightsInfoResponse, answer)

    def push_checkpoints(
        self, to: str, *, hub_token: str | None = None, run_id: str | None = None, private: bool = True
    ) -> Push:
        """Let the server push every checkpoint that is saved from now on; upstream's servers do not.

        Args:
            to: ``owner/name`` on ModelScope, or with ``hf://``; ``{run}`` and ``{checkpoint}`` in it are filled in.
            hub_token: What opens the hub. The server keeps it sealed.
            run_id: Whose; default: of all runs of the key's tenant, but for those that have a push of their own.
            private: Whether a repository that is made for it is hidden from others.
        """
        wanted = {"to": to, "hub_token": hub_token, "run_id": run_id, "private": private}
        sent = {name: value for name, value in wanted.items() if value is not None}
        return self._read(Push, self.connection.ask("POST", self.connection.gateway("/pushes"), sent))

    def list_pushes(self) -> list[Push]:
        """What the server pushes by itself, the newest first."""
        return self._get(PushesResponse, "/pushes").pushes

    def end_push(self, push_id: str) -> Push:
        """Push no more by it; uploads that were begun go on."""
        path = f"/pushes/{quote(push_id, safe='')}"
        return self._read(Push, self.connection.ask("DELETE", self.connection.gateway(path)))

    def _get(self, kind: type[AnswerT], path: str) -> AnswerT:
        return self._read(kind, self.connection.ask("GET", self.connection.gateway(path)))

    def _read(self, kind: type[AnswerT], answer: Any) -> AnswerT:
        try:
            return kind.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise BadAnswer(f"{kind.__name__}: {place}: {first['msg']}; is it a server of this dialect?") from None


def _run(run_id: str) -> str:
    return f"/training_runs/{quote(run_id, safe='')}"
