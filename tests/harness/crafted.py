"""Bodies that claim more than they hold: many parts of two bytes, rows, shapes, groups, frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import zstandard

from harness.measured import Readings
from twinkle.wire.bodies.account import SearchRequest
from twinkle.wire.bodies.base import RequestBody, parse_body
from twinkle.wire.bodies.futures import RetrieveFuturesRequest
from twinkle.wire.bodies.native import CollectRequest
from twinkle.wire.bodies.openai import ChatRequest, CompletionRequest
from twinkle.wire.bodies.session import CreateSessionRequest
from twinkle.wire.compression import decompress, decompress_prefix
from twinkle.wire.protobuf import DTYPE_FLOAT32, DTYPE_INT64, ForwardBackwardRequest, Tensor
from twinkle.wire.sampling import parse_sample
from twinkle.wire.training import canonical_digest, decode_data, parse_envelope, peek_envelope

SIZE_BYTES = 4 << 20
# Just below as many values as are read at all.
_JSON_BYTES = 2 << 20

_BYTES, _GROUP, _GROUP_END, _FIXED32 = 2, 3, 4, 5
_ADDRESS = ForwardBackwardRequest(model_id="s:train:0", seq_id=1, loss_fn="cross_entropy").SerializeToString()


def _varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _times(piece: bytes) -> bytes:
    return piece * (SIZE_BYTES // len(piece))


def _tensor(tensor: bytes) -> bytes:
    """A request whose only datum has this tensor among its inputs."""
    return _ADDRESS + _field(3, _field(2, _field(1, b"weights") + _field(2, tensor)))


def _csr(*, rows: int, columns: int) -> bytes:
    """A sparse tensor of ``rows`` rows with nothing in them."""
    tensor = Tensor(dtype=DTYPE_FLOAT32, shape=[rows, columns])
    tensor.sparse_csr.values, tensor.sparse_csr.col_indices = b"", b""
    tensor.sparse_csr.crow_indices = bytes(8 * (rows + 1))
    return _tensor(tensor.SerializeToString())


def _full_csr(columns: int) -> bytes:
    """One row that lists all of its cells."""
    tensor = Tensor(dtype=DTYPE_INT64, shape=[1, columns])
    tensor.sparse_csr.values = bytes(8 * columns)
    tensor.sparse_csr.crow_indices = np.array([0, columns], dtype="<i8").tobytes()
    tensor.sparse_csr.col_indices = np.arange(columns, dtype="<i8").tobytes()
    return _tensor(tensor.SerializeToString())


def _read_passes(raw: bytes) -> None:
    """As the API and then the worker do."""
    peek_envelope(raw)
    envelope = parse_envelope(raw)
    canonical_digest(envelope.message)
    decode_data(envelope, max_cells=1 << 20)


def _reading(read: Callable[[bytes], object], make: Callable[[], bytes]) -> Callable[[], Callable[[], object]]:
    return lambda: partial(read, make())


def _json(head: bytes, piece: bytes, tail: bytes, *, size_bytes: int = _JSON_BYTES) -> bytes:
    return head + (piece * (size_bytes // len(piece)))[:-1] + tail


def _small(head: bytes, piece: bytes, tail: bytes) -> bytes:
    """Of the size up to which bodies without tensors or prompts are read at all."""
    return _json(head, piece, tail, size_bytes=1 << 20)


PASSES = {
    "empty datums": lambda: _ADDRESS + _times(_field(3, b"")),
    "empty datums behind a group": lambda: _ADDRESS + b"\x0b\x0c" + _times(_field(3, b"")),
    "groups": lambda: _ADDRESS + _times(bytes([9 << 3 | _GROUP, 9 << 3 | _GROUP_END])),
    "groups in groups": lambda: _ADDRESS + _times(bytes([9 << 3 | _GROUP])),
    "unknown fields": lambda: _ADDRESS + _times(bytes([9 << 3 | _FIXED32]) + bytes(4)),
    "empty chunks": lambda: _ADDRESS + _field(3, _times(_field(1, b""))),
    "empty spans": lambda: _ADDRESS + _field(3, _times(_field(3, b""))),
    "empty inputs": lambda: _ADDRESS + _field(3, _times(_field(2, b""))),
    "a chunk of chunks": lambda: _ADDRESS + _field(3, _field(1, _times(_field(1, b"")))),
    "groups in a datum": lambda: _ADDRESS + _field(3, _times(bytes([9 << 3 | _GROUP, 9 << 3 | _GROUP_END]))),
    "settings": lambda: _ADDRESS + _times(_field(5, b"")),
    "settings of the second kind": lambda: _ADDRESS + _times(_field(7, b"")),
    "a shape of many sizes": lambda: _tensor(_field(4, _times(b"\x01"))),
    "a shape of sizes one by one": lambda: _tensor(_times(bytes([4 << 3, 1]))),
    "unknown fields of a tensor": lambda: _tensor(_times(_field(9, b""))),
    "data again and again": lambda: _tensor(_times(_field(1, bytes(1)))),
    "rows without columns": lambda: _csr(rows=SIZE_BYTES // 8 - 1, columns=0),
    "rows with one column": lambda: _csr(rows=SIZE_BYTES // 8 - 1, columns=1),
    "rows with very many columns": lambda: _csr(rows=SIZE_BYTES // 8 - 1, columns=2**62),
    "a full row": lambda: _full_csr(SIZE_BYTES // 16),
    "tokens": lambda: _ADDRESS + _field(3, _field(1, _field(1, _field(1, bytes(SIZE_BYTES))))),
}
SAMPLES = {
    "empty chunks": lambda: _json(b'{"sampling_session_id":"s","seq_id":1,"prompt":{"chunks":[', b"{},", b"]}}"),
    "tokens": lambda: _json(b'{"sampling_session_id":"s","seq_id":1,"prompt":{"chunks":[{"tokens":[', b"1,", b"]}]}}"),
    "unknown lists": lambda: _json(b'{"sampling_session_id":"s","seq_id":1,"x":[', b"[],", b"]}"),
    "unknown keys": lambda: _json(b'{"a":1,', b'"":1,', b"}"),
    "stops": lambda: _json(b'{"prompt":{"chunks":[]},"sampling_params":{"stop":[', b'"a",', b"]}}"),
    "wrong tokens": lambda: _json(b'{"prompt":{"chunks":[{"tokens":[', b'"",', b"]}]}}"),
    "wrong chunks": lambda: _json(b'{"prompt":{"chunks":[', b"1,", b"]}}"),
    "wrong targets": lambda: _json(b'{"target_prompt_logprobs":{"data":[', b'"",', b"]}}"),
    "lists in lists": lambda: _json(b'{"x":[', b"[" * 150 + b"]" * 150 + b",", b"]}"),
    "targets": lambda: _json(
        b'{"sampling_session_id":"s","seq_id":1,"prompt":{"chunks":[{"tokens":[1,2]}]},"target_prompt_logprobs":'
        b'{"dtype":"int64","shape":[1,9],"data":[',
        b"1,",
        b"]}}",
    ),
}
CHATS = {
    "messages of nothing": lambda: _json(b'{"model":"m","messages":[', b"{},", b"]}"),
    "empty messages": lambda: _json(b'{"model":"m","messages":[', b'{"role":"user"},', b"]}"),
    "parts": lambda: _json(b'{"model":"m","messages":[{"role":"user","content":[', b"{},", b"]}]}"),
}
PROMPTS = {
    "tokens": lambda: _json(b'{"model":"m","prompt":[', b"1,", b"]}"),
    "a wrong token": lambda: _json(b'{"model":"m","prompt":[1,', b'"a",', b"]}"),
    "lists": lambda: _json(b'{"model":"m","prompt":[', b"[],", b"]}"),
}
SMALL: dict[str, tuple[type[RequestBody], Callable[[], bytes]]] = {
    "tags": (CreateSessionRequest, lambda: _small(b'{"tags":[', b"1,", b"]}")),
    "metadata": (CreateSessionRequest, lambda: _small(b'{"user_metadata":{', b'"":{},', b"}}")),
    "acknowledged": (
        RetrieveFuturesRequest,
        lambda: _small(b'{"target":{"sampling_session_id":"s"},"retrieved_request_ids":[', b"1,", b"]}"),
    ),
    "collected": (CollectRequest, lambda: _small(b'{"request_ids":[', b"1,", b"]}")),
    "projects": (SearchRequest, lambda: _small(b'{"project_ids":[', b"1,", b"]}")),
}
FRAMES = {
    "zeros": lambda: zstandard.compress(bytes(1 << 30)),
    "zeros without a size": lambda: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 30)),
    "a wide window": lambda: zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    ).compress(bytes(1 << 20)),
    "many frames": lambda: _times(zstandard.compress(bytes(1 << 17))),
}


def _open(raw: bytes) -> None:
    decompress_prefix(raw, 1 << 16)
    decompress(raw, SIZE_BYTES)


READINGS: Readings = {
    **{f"passes: {name}": _reading(_read_passes, make) for name, make in PASSES.items()},
    **{f"sample: {name}": _reading(parse_sample, make) for name, make in SAMPLES.items()},
    **{f"chat: {name}": _reading(partial(parse_body, ChatRequest), make) for name, make in CHATS.items()},
    **{f"prompts: {name}": _reading(partial(parse_body, CompletionRequest), make) for name, make in PROMPTS.items()},
    **{f"small: {name}": _reading(partial(parse_body, body), make) for name, (body, make) in SMALL.items()},
    **{f"zstd: {name}": _reading(_open, make) for name, make in FRAMES.items()},
}
