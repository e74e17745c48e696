"""Requests, as the API has stored them, into what an engine is handed. Touches no adapter; any thread may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from twinkle.core.operation import Claim, OperationKind
from twinkle.core.pictures import PictureRules
from twinkle.storage.blobs import BlobStore
from twinkle.storage.payloads import read_payload
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.training import OptimStepRequest
from twinkle.wire.calls import Call, decode_call, is_call
from twinkle.wire.training import ForwardBackwardBody, decode_data
from twinkle.workers.endings import refuse_rejected
from twinkle.workers.engines.loss_graphs import LossGraphs
from twinkle.workers.steps import Steps, Transfers

ReadAhead: TypeAlias = ForwardBackwardBody | Call | OptimStepRequest | Exception
"""A request that was read while the device was at work, or what its operation fails with in its turn."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Reads and decodes them."""

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
