"""A job's adapter and its samplers: every operation has the number that its plan gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from twinkle.client.bodies import make_body, to_json
from twinkle.client.connection import Connection
from twinkle.client.datum import Datum, Tokens, to_chunks, to_wire
from twinkle.client.future import Future
from twinkle.client.transport import TINKER_PREFIX, Request
from twinkle.wire.bodies.base import RequestBody
from twinkle.wire.bodies.training import (
    AdamParams,
    CreateModelResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    OptimStepRequest,
    OptimStepResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from twinkle.wire.paths import ModelId
from twinkle.wire.sample_result import SampleResult
from twinkle.wire.sampling import Prompt, SampleRequest, SamplingParams
from twinkle.wire.training import ForwardBackwardBody, write_forward_backward
from twinkle.wire.training_result import ForwardBackwardResult

T = TypeVar("T")

Ticket: TypeAlias = Future[T]
"""An accepted operation. Awaiting it gives its result, or raises ``OperationFailed``, which is its outcome for ever."""

_PROTOBUF = "application/x-protobuf"


async def submit(connection: Connection, path: str, body: RequestBody) -> Ticket[Any]:
    """Hand one operation over; returns when it is in the journal.

    Raises:
        TwinkleError: It was refused, or could not be handed over.
    """
    return await _submit(connection, Request(path=f"{TINKER_PREFIX}/{path}", content=to_json(body)))


async def _submit(connection: Connection, request: Request, *, for_sample: bool = False) -> Ticket[Any]:
    future = connection.new_future(for_sample=for_sample)
    future.begin()
    await connection.submit(request, future)
    return future


class JobSampler:
    """Draws from a base model, a checkpoint, or weights without a name. Samples are numbered from 0."""

    def __init__(self, connection: Connection, sampler_id: str) -> None:
        self.id = sampler_id
        self._connection = connection

    async def sample(
        self,
        seq: int,
        prompt: Tokens,
        *,
        params: SamplingParams,
        num_samples: int = 1,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
    ) -> Ticket[SampleResult]:
        """Draw continuations of one prompt, as sample number ``seq`` of this sampler."""
        body = make_body(
            SampleRequest,
            prompt=Prompt(chunks=to_chunks(prompt, field="prompt")),
            sampling_params=params,
            num_samples=num_samples,
            sampling_session_id=self.id,
            seq_id=seq,
            prompt_logprobs=prompt_logprobs or None,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
        )
        request = Request(path=f"{TINKER_PREFIX}/asample", content=to_json(body))
        return await _submit(self._connection, request, for_sample=True)


class JobRun:
    """One adapter of a job. Operations are numbered from 1, without a gap; each method returns at acceptance."""

    def __init__(
        self,
        connection: Connection,
        session_id: str,
        index: int,
        begun: Ticket[CreateModelResponse | LoadWeightsResponse],
    ) -> None:
        self.id = str(ModelId(session_id, index))
        self.begun = begun
        """The outcome of the operation that made it."""
        self._connection = connection
        self._session_id = session_id

    async def forward_backward(
        self,
        seq: int,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Ticket[ForwardBackwardResult]:
        """Add a batch's gradients to those that wait for the next ``optim_step``."""
        return await self._pass(seq, data, loss_fn, loss_fn_config, forward_only=False)

    async def forward(
        self,
        seq: int,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Ticket[ForwardBackwardResult]:
        """As :meth:`forward_backward`, without gradients."""
        return await self._pass(seq, data, loss_fn, loss_fn_config, forward_only=True)

    async def optim_step(self, seq: int, adam_params: AdamParams) -> Ticket[OptimStepResponse]:
        """Apply the gradients."""
        return await self._put("optim_step", OptimStepRequest, seq, adam_params=adam_params)

    async def save_weights(
        self,
        seq: int,
        name: str,
        *,
        ttl_s: int | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> Ticket[SaveWeightsResponse]:
        """Save weights and optimizer under a name."""
        return await self._put(
            "save_weights",
            SaveWeightsRequest,
            seq,
            path=name,
            ttl_seconds=ttl_s,
            overwrite=overwrite,
            user_metadata=None if metadata is None else dict(metadata),
        )

    async def save_weights_for_sampler(
        self, seq: int, name: str, *, ttl_s: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Ticket[SaveWeightsForSamplerResponse]:
        """Save weights only, under a name; the result's ``path`` is what ``Door.sampler`` takes."""
        return await self._put(
            "save_weights_for_sampler",
            SaveWeightsForSamplerRequest,
            seq,
            path=name,
            ttl_seconds=ttl_s,
            user_metadata=None if metadata is None else dict(metadata),
        )

    async def open_sampler(self, seq: int, index: int) -> JobSampler:
        """The job's sampler number ``index``, on this adapter's weights as operation ``seq`` finds them, unnamed."""
        ticket = await self._put(
            "save_weights_for_sampler", SaveWeightsForSamplerRequest, seq, sampling_session_seq_id=index
        )
        answer: SaveWeightsForSamplerResponse = await ticket
        assert answer.sampling_session_id is not None, "weights without a name open a sampling session"
        return JobSampler(self._connection, answer.sampling_session_id)

    async def load_weights(self, seq: int, path: str, *, with_optimizer: bool = True) -> Ticket[LoadWeightsResponse]:
        """Replace this adapter's weights by a checkpoint's."""
        return await self._put("load_weights", LoadWeightsRequest, seq, path=path, optimizer=with_optimizer)

    async def unload(self) -> Ticket[UnloadModelResponse]:
        """End this adapter behind all that was submitted; its checkpoints stay."""
        return await submit(self._connection, "unload_model", make_body(UnloadModelRequest, model_id=self.id))

    async def _pass(
        self,
        seq: int,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> Ticket[ForwardBackwardResult]:
        message = write_forward_backward(
            ForwardBackwardBody(self.id, seq, forward_only, loss_fn, dict(loss_fn_config or {}), to_wire(data))
        )
        request = Request(
            path=f"{TINKER_PREFIX}/forward_backward", content=message.SerializeToString(), content_type=_PROTOBUF
        )
        return await _submit(self._connection, request)

    async def _put(self, route: str, body_class: type[RequestBody], seq: int, /, **values: object) -> Ticket[Any]:
        return await submit(self._connection, route, make_body(body_class, model_id=self.id, seq_id=seq, **values))
