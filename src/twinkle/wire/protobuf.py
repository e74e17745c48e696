"""The protobuf message classes of the Tinker protocol, built from ``schema.proto``.

They live in a descriptor pool of their own: the official SDK registers a file with the same package in the default
pool, and both must be importable in one process.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, TypeAlias

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from twinkle.core.errors import InvalidInput
from twinkle.wire.proto_source import parse_schema

# A protobuf message has no static type here: its class is made at run time.
Message: TypeAlias = Any

_PACKAGE = "tinker_public"
_FILE = parse_schema(
    files(__package__).joinpath("schema.proto").read_text("utf-8"), file_name="twinkle/wire/schema.proto"
)
_POOL = DescriptorPool()
_POOL.Add(_FILE)


def _message_class(name: str) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


SparseCsr = _message_class("SparseCsr")
Tensor = _message_class("Tensor")
BatchedTensor = _message_class("BatchedTensor")
ArrayRecord = _message_class("ArrayRecord")
ForwardBackwardOutput = _message_class("ForwardBackwardOutput")
Chunk = _message_class("Chunk")
Datum = _message_class("Datum")
ForwardBackwardRequest = _message_class("ForwardBackwardRequest")
TopkLogprobs = _message_class("TopkLogprobs")
PromptAltTokens = _message_class("PromptAltTokens")
SampledSequence = _message_class("SampledSequence")
SampleResponse = _message_class("SampleResponse")

# The enums' numbers, as in schema.proto.
STOP_REASON_STOP = 0
STOP_REASON_LENGTH = 1
DTYPE_FLOAT32 = 1
DTYPE_INT64 = 2
DTYPE_INT32 = 3
DTYPE_BFLOAT16 = 4


def parse_message(message_class: Any, raw: bytes, *, field: str = "body") -> Message:
    """Parses ``raw``, or raises ``InvalidInput`` when it is not such a message."""
    message = message_class()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidInput(field, f"is not a valid {message_class.DESCRIPTOR.name} protobuf message") from error
    return message
