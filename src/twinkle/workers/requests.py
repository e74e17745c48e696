"""Requests, as the API has stored them, into what an engine is handed, with the losses that they name by id.

Touches no adapter; any thread may.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from twinkle.core.errors import InvalidInput
from twinkle.core.loss_graph import LossGraph
from twinkle.core.operation import Claim, OperationKind
from twinkle.core.pictures import PictureRules
from twinkle.storage.blobs import BlobStore
from twinkle.storage.journal.journal import Journal
from twinkle.storage.payloads import read_payload
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.training import OptimStepRequest
from twinkle.wire.calls import Call, decode_call, is_call
from twinkle.wire.loss_graph import parse_loss_graph
from twinkle.wire.paths import CustomLossId, parse_custom_loss_id, parse_model_id
from twinkle.wire.training import ForwardBackwardBody, decode_data
from twinkle.workers.endings import refuse_rejected
from twinkle.workers.steps import Steps, Transfers

ReadAhead: TypeAlias = ForwardBackwardBody | Call | OptimStepRequest | Exception
"""A request that was read while the device was at work, or what its operation fails with in its turn."""

_CUSTOM_LOSS = "custom"
_LOSS_FIELD = "loss_fn_config.loss_id"
_MAX_LOSSES_KEPT = 64


@dataclass
class LossGraphs:
    """Looks up the losses that requests name, on any thread. A loss never changes, so those used last are kept."""

    journal: Journal
    _kept: OrderedDict[str, LossGraph] = field(init=False, default_factory=OrderedDict)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def complete(self, adapter: str, body: ForwardBackwardBody) -> ForwardBackwardBody:
        """The request with the graph of its loss, where it has one of its client's own.

        Raises:
            InvalidInput: It names no loss of the adapter's session. A session is one tenant's, and so are its losses.
            StorageUnavailable: The journal did not answer.
        """
        if body.loss_fn != _CUSTOM_LOSS:
            return body
        loss_id = body.loss_fn_config.get("loss_id")
        if not isinstance(loss_id, str):
            raise InvalidInput(_LOSS_FIELD, "is missing; create a loss with create_custom_loss and send its loss_id")
        return replace(body, loss_graph=self._graph(adapter, loss_id))

    def _graph(self, adapter: str, loss_id: str) -> LossGraph:
        found = parse_custom_loss_id(loss_id, field=_LOSS_FIELD)
        if found.session_id != parse_model_id(adapter).session_id:
            raise _unknown_loss(loss_id)
        with self._lock:
            graph = self._kept.get(loss_id)
        if graph is None:
            graph = self._read(found)
        with self._lock:
            self._kept[loss_id] = graph
            self._kept.move_to_end(loss_id)
            if len(self._kept) > _MAX_LOSSES_KEPT:
                self._kept.popitem(last=False)
        return graph

    def _read(self, found: CustomLossId) -> LossGraph:
        definition = self.journal.loss_definition(found.lane, found.custom_loss_seq_id)
        if definition is None:
            raise _unknown_loss(str(found))
        return parse_loss_graph(definition)


def _unknown_loss(loss_id: str) -> InvalidInput:
    return InvalidInput(
        _LOSS_FIELD,
        f"there is no custom loss {loss_id!r} in the adapter's session; create it there with create_custom_loss",
    )


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Reads and decodes requests."""

    blobs: BlobStore
    transfers: Transfers
    loss_graphs: LossGraphs
    pictures: PictureRules | None

    def read(self, claim: Claim) -> Steps[ForwardBackwardBody | Call]:
        """The request of a pass; what is stored is read and decoded beside the device.

        Raises:
            UserError: It was refused, or is no request.
            StorageUnavailable: The object store or the journal did not answer.
        """
        refuse_rejected(claim)
        payload = claim.payload
        if payload.inline is not None:
            return self.decoded(claim, payload.inline)
        yield from self.transfers.room()
        return (
            yield from self.transfers.away(
                lambda: self.decoded(claim, read_payload(self.blobs, payload)), num_bytes=payload.size_bytes
            )
        )

    def decoded_for(self, adapter: str, payload: bytes) -> ForwardBackwardBody | Call:
        """The request in the words of the wire, with the loss of the adapter's client where it names one."""
        if is_call(payload):
            return decode_call(payload)
        return self.loss_graphs.complete(adapter, decode_data(payload, picture_rules=self.pictures))

    def decoded(self, claim: Claim, payload: bytes) -> ForwardBackwardBody | Call:
        """The same of what was claimed."""
        return self.decoded_for(claim.lane, payload)

    def read_ahead(self, claim: Claim) -> ReadAhead | None:
        """The request of a pass or an optimizer step that is to follow, or what it fails with in its turn.

        ``None`` where it is stored, or refused anyway.
        """
        payload = claim.payload.inline
        if payload is None or claim.rejection is not None:
            return None
        try:
            if claim.kind is OperationKind.OPTIM_STEP and not is_call(payload):
                return parse_body(OptimStepRequest, payload)
            return self.decoded(claim, payload)
        except Exception as error:  # noqa: BLE001 - the border: it is this operation's, in its turn
            return error
