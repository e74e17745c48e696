"""``forward_backward`` and ``forward`` as SDKs before 0.22 send them: JSON, made into the protobuf of newer ones.

What comes out is what a newer client would have sent, so that nothing behind the door knows of two forms. Only what has
no place in the message is refused here; tensors are the worker's to judge.
"""

from __future__ import annotations

import re
from typing import Annotated, cast

import numpy as np
from pydantic import Field

from twinkle.core.errors import InvalidInput
from twinkle.wire import protobuf as pb
from twinkle.wire.bodies.base import Identifier, OperationSeqId, RequestBody, Text, parse_body
from twinkle.wire.bodies.training import peek_operation
from twinkle.wire.sampling import IMAGE, TEXT, PromptChunk
from twinkle.wire.tensors import TensorJson, write_sent_tensor
from twinkle.wire.training import MAX_SEQ_ID, EnvelopeKey, is_model_id

_PEEKED_WHOLE_BYTES = 1 << 20
_TAIL_BYTES = 2048
# The SDK writes a body's address behind its data.
_ADDRESS = re.compile(rb'"model_id":\s*"([^"\\]+)",\s*"seq_id":\s*([0-9]{1,10})\s*\}\s*\Z')


class PassChunks(RequestBody):
    """The tokens and pictures of one datum, in pieces."""

    chunks: Annotated[list[PromptChunk], Field(fail_fast=True)]


class PassDatum(RequestBody):
    """One training example."""

    model_input: PassChunks
    loss_fn_inputs: dict[Text, TensorJson] = Field(default_factory=dict)


class PassInput(RequestBody):
    """What to compute, and of what."""

    data: Annotated[list[PassDatum], Field(fail_fast=True)]
    loss_fn: Text
    loss_fn_config: dict[Text, bool | float | Text] | None = None


class ForwardBackwardRequest(RequestBody):
    """``POST forward_backward`` in JSON."""

    model_id: Identifier
    seq_id: OperationSeqId
    forward_backward_input: PassInput

    @property
    def sent(self) -> PassInput:
        """What to compute."""
        return self.forward_backward_input


class ForwardRequest(RequestBody):
    """``POST forward``: the same without gradients. Newer SDKs send a ``forward_backward`` that says so."""

    model_id: Identifier
    seq_id: OperationSeqId
    forward_input: PassInput

    @property
    def sent(self) -> PassInput:
        """What to compute."""
        return self.forward_input


def read_json_pass(body_class: type[ForwardBackwardRequest] | type[ForwardRequest], raw: bytes) -> bytes:
    """The same request as protobuf, a ``ForwardBackwardRequest`` of ``schema.proto``.

    Raises:
        InvalidInput: It names the first field at fault.
        TooLarge: It has very many values or keys.
    """
    body = parse_body(body_class, raw)
    forward_only = isinstance(body, ForwardRequest)
    sent, field = body.sent, "forward_input" if forward_only else "forward_backward_input"
    message = pb.ForwardBackwardRequest(
        model_id=body.model_id, seq_id=body.seq_id, loss_fn=sent.loss_fn, forward_only=forward_only
    )
    for key, value in (sent.loss_fn_config or {}).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = message.loss_fn_config_v2[key].number = value
    for i, datum in enumerate(sent.data):
        _write_datum(message.data.add(), datum, f"{field}.data[{i}]")
    return cast(bytes, message.SerializeToString(deterministic=True))


def peek_json_pass(raw: bytes) -> EnvelopeKey | None:
    """Reads only the address of a whole body that :func:`read_json_pass` refused; of a large one, from its end."""
    if len(raw) <= _PEEKED_WHOLE_BYTES:
        return peek_operation(raw)
    found = _ADDRESS.search(raw[-_TAIL_BYTES:])
    if found is None:
        return None
    try:
        model_id = found[1].decode()
    except UnicodeDecodeError:
        return None
    seq_id = int(found[2])
    return EnvelopeKey(model_id, seq_id) if is_model_id(model_id) and 1 <= seq_id <= MAX_SEQ_ID else None


def _write_datum(written: pb.Message, datum: PassDatum, field: str) -> None:
    for i, chunk in enumerate(datum.model_input.chunks):
        _write_chunk(written.model_input.add(), chunk, f"{field}.model_input.chunks[{i}]")
    for name, tensor in datum.loss_fn_inputs.items():
        written.loss_fn_inputs[name].CopyFrom(write_sent_tensor(tensor, field=f"{field}.loss_fn_inputs.{name}"))


def _write_chunk(written: pb.Message, chunk: PromptChunk, field: str) -> None:
    if chunk.type == IMAGE:
        picture = chunk.picture(field)
        written.image.data, written.image.format = picture.data, picture.format
        if picture.expected_tokens is not None:
            written.image.expected_tokens = picture.expected_tokens
    elif chunk.type == TEXT:
        written.encoded_text.tokens = np.asarray(chunk.tokens, dtype="<i4").tobytes()
    else:
        raise InvalidInput(field, f"is a chunk of kind {chunk.type[:60]}; this server takes text and pictures")
