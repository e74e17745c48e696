"""The protobuf message classes of the Tinker protocol, made from ``schema.proto``.

What protoc makes of a schema lies beside it as a ``.binpb``, a ``FileDescriptorSet``; after a change it is made again
in ``src`` with ``python -m grpc_tools.protoc -I. --descriptor_set_out=twinkle/wire/schema.binpb
twinkle/wire/schema.proto``.

Each schema lives in a descriptor pool of its own: the official SDK registers a file with the same package in the
default pool, and both must be importable in one process.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, TypeAlias

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from twinkle.core.errors import InvalidInput

# A protobuf message has no static type here: its class is made at run time.
Message: TypeAlias = Any

_PACKAGE = "tinker_public"


def read_schema(name: str) -> DescriptorPool:
    """The messages of ``name.proto``, in a pool of their own."""
    pool = DescriptorPool()
    described = FileDescriptorSet.FromString(files(__package__).joinpath(f"{name}.binpb").read_bytes())
    for file in described.file:
        pool.Add(file)
    return pool


_POOL = read_schema("schema")


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
