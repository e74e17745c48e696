"""A training run in a client's hands: every call returns a future at once, and the operations go out in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from twinkle.client.bodies import make_body, to_json
from twinkle.client.connection import Connection
from twinkle.client.datum import Datum, to_wire
from twinkle.client.future import Future
from twinkle.client.operations import OperationQueue
from twinkle.client.transport import TINKER_PREFIX, Request
from twinkle.wire.bodies.base import RequestBody
from twinkle.wire.bodies.training import (
    AdamParams,
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
from twinkle.wire.training import ForwardBackwardBody, write_forward_backward
from twinkle.wire.training_result import ForwardBackwardResult

BodyT = TypeVar("BodyT", bound=RequestBody)

_PROTOBUF = "application/x-protobuf"
# Replaced when the operation's turn comes.
_ANY_SEQ = 1


class Run:
    """One training run. Safe to use from any thread; the order of the calls is the order of the operations.

    Only one object at a time may train a run: a second one would use the same numbers for other operations, and the
    one that comes later is refused. (Where it asks for the very same operation, it gets the first one's outcome.)
    """

    def __init__(
        self,
        connection: Connection,
        run_id: str,
        *,
        base_model: str,
        rank: int,
        next_seq: int,
        begun: Future[Any] | None = None,
    ) -> None:
        """Use :class:`Client`'s ``create_run``, ``resume_run``, ``attach``, ``fork_run`` or ``rewind_run``."""
        self.id = run_id
        self.base_model = base_model
        self.rank = rank
        self.begun = begun
        """The outcome of the operation that made this run, or took it back; ``None`` after ``attach``."""
        self.num_accepted = next_seq - 1
        """Operations that were accepted before: 0 of a new run. A loop that begins again leaves so many calls out."""
        self._operations = OperationQueue(connection, run_id, next_seq=next_seq)

    def __repr__(self) -> str:
        return f"<Run {self.id} of {self.base_model}, rank {self.rank}>"

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[ForwardBackwardResult]:
        """Add a batch's gradients to those that wait for the next ``optim_step``; they are sums over the datums.

        Args:
            data: The batch; it is copied, so the arrays may be changed after the call.
            loss_fn: ``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo``, ``dro`` or ``gspo``; or a loss that
                compares datums, by its class in ``twinkle.loss``: ``DPOLoss``, ``GRPOLoss``, ... The datums of one
                call are then one batch.
            loss_fn_config: The loss function's settings.

        Raises:
            InvalidInput: The batch cannot be sent.
            ClientClosed: The client is closed.
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False)

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[ForwardBackwardResult]:
        """As :meth:`forward_backward`, without gradients."""
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True)

    def optim_step(
        self,
        learning_rate: float = 1e-4,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> Future[OptimStepResponse]:
        """Apply the gradients with one step of AdamW; a ``grad_clip_norm`` of 0 clips nothing."""
        adam_params = make_body(
            AdamParams,
            learning_rate=float(learning_rate),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(eps),
            weight_decay=float(weight_decay),
            grad_clip_norm=float(grad_clip_norm),
        )
        return self._put("optim_step", self._body(OptimStepRequest, adam_params=adam_params))

    def save_state(
        self, name: str, *, ttl_s: int | None = None, overwrite: bool = False, metadata: Mapping[str, str] | None = None
    ) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer under a name; the result's ``path`` is what ``resume_run`` takes."""
        body = self._body(
            SaveWeightsRequest, path=name, ttl_seconds=ttl_s, overwrite=overwrite, user_metadata=_copy(metadata)
        )
        return self._put("save_weights", body)

    def load_state(
        self, path: str, *, with_optimizer: bool = True, access_token: str | None = None
    ) -> Future[LoadWeightsResponse]:
        """Replace this run's weights by a checkpoint's, and its optimizer state by the checkpoint's or a new one.

        Somebody else's checkpoint takes a weights access token of its owner's, unless it is public.
        """
        body = self._body(LoadWeightsRequest, path=path, optimizer=with_optimizer, weights_access_token=access_token)
        return self._put("load_weights", body)

    def save_weights_for_sampler(
        self, name: str, *, ttl_s: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Save weights only; the result's ``path`` is what ``Client.sampler`` takes."""
        body = self._body(SaveWeightsForSamplerRequest, path=name, ttl_seconds=ttl_s, user_metadata=_copy(metadata))
        return self._put("save_weights_for_sampler", body)

    def unload(self) -> Future[UnloadModelResponse]:
        """End this run behind all that was called before: it leaves the device, and nothing more is accepted for it.

        Its checkpoints and the samplers on them stay; what else was kept of it, to fork or rewind it, goes.
        """
        content = to_json(make_body(UnloadModelRequest, model_id=self.id))
        return self._operations.put(lambda _: Request(path=f"{TINKER_PREFIX}/unload_model", content=content))

    def _pass(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> Future[ForwardBackwardResult]:
        message = write_forward_backward(
            ForwardBackwardBody(self.id, _ANY_SEQ, forward_only, loss_fn, dict(loss_fn_config or {}), to_wire(data))
        )

        def write(seq: int) -> Request:
            message.seq_id = seq
            return Request(
                path=f"{TINKER_PREFIX}/forward_backward",
                content=message.SerializeToString(),
                content_type=_PROTOBUF,
            )

        return self._operations.put(write)

    def _body(self, body_class: type[BodyT], /, **values: object) -> BodyT:
        return make_body(body_class, model_id=self.id, seq_id=_ANY_SEQ, **values)

    def _put(self, path: str, body: RequestBody) -> Future[Any]:
        def write(seq: int) -> Request:
            return Request(path=f"{TINKER_PREFIX}/{path}", content=to_json(body.model_copy(update={"seq_id": seq})))

        return self._operations.put(write)


def _copy(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if metadata is None else dict(metadata)
