"""Tensors on the wire and numpy arrays, both ways, with nothing taken on trust.

Reading keeps a sparse tensor sparse (``Csr``) and views the message's own bytes, so it allocates nothing that was not
sent. Only ``densify`` expands, under a ``CellBudget`` that a whole request shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from twinkle.core.errors import InvalidInput
from twinkle.wire import protobuf as pb

Array: TypeAlias = npt.NDArray[Any]

MAX_DIMENSIONS = 8
DEFAULT_MAX_CELLS = 1 << 25
_MAX_SHAPE_PRODUCT = 1 << 40

_INT64 = np.dtype("<i8")
_STORED_AS: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: _INT64,
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_WRITTEN_AS: dict[np.dtype[Any], int] = {
    np.dtype("<f4"): pb.DTYPE_FLOAT32,
    _INT64: pb.DTYPE_INT64,
    np.dtype("<i4"): pb.DTYPE_INT32,
}


@dataclass(frozen=True, eq=False)
class Csr:
    """A validated two-dimensional sparse tensor in compressed rows; unlisted cells are 0."""

    values: Array
    crow_indices: Array
    col_indices: Array
    shape: tuple[int, int]


@dataclass
class CellBudget:
    """How many more cells the sparse tensors of one request may expand to; its pictures, how many more tokens."""

    cells: int = DEFAULT_MAX_CELLS

    def spend(self, cells: int, field: str) -> None:
        if cells > self.cells:
            raise InvalidInput(
                field, f"expands to {cells} cells, more than the {self.cells} left for this request; make it smaller"
            )
        self.cells -= cells


class TensorJson(BaseModel):
    """A tensor in a JSON body; the data are flat."""

    model_config = ConfigDict(extra="ignore", strict=True)

    # Whole numbers are read as such all the same; a complaint is the first one's.
    data: Annotated[list[float], Field(fail_fast=True)] | Annotated[list[int], Field(fail_fast=True)]
    dtype: Literal["int64", "float32"]
    shape: Annotated[list[int], Field(max_length=MAX_DIMENSIONS)] | None = None
    sparse_crow_indices: Annotated[list[int], Field(fail_fast=True)] | None = None
    sparse_col_indices: Annotated[list[int], Field(fail_fast=True)] | None = None


def read_tensor(message: pb.Message, *, field: str) -> Array | Csr:
    """Reads a ``Tensor``; int32 widens to int64 and bfloat16 to float32."""
    shape = _shape(message.shape, field)
    match message.WhichOneof("encoding"):
        case "sparse_csr":
            sparse = message.sparse_csr
            values = _widened(sparse.values, message.dtype, field)
            crow = _buffer(sparse.crow_indices, _INT64, f"{field}.crow_indices")
            col = _buffer(sparse.col_indices, _INT64, f"{field}.col_indices")
            return _checked_csr(values, crow, col, shape, field)
        case "dense":
            return _shaped(_widened(message.dense, message.dtype, field), shape, field)
        case _:
            raise InvalidInput(field, "has neither dense nor sparse data")


def write_tensor(tensor: Array | Csr) -> pb.Message:
    """Writes a float32, int32 or int64 array, or a ``Csr`` of such values."""
    message = pb.Tensor()
    message.shape.extend(tensor.shape)
    if isinstance(tensor, Csr):
        message.dtype = _written_dtype(tensor.values)
        message.sparse_csr.values = _little_endian(tensor.values)
        message.sparse_csr.crow_indices = tensor.crow_indices.astype(_INT64).tobytes()
        message.sparse_csr.col_indices = tensor.col_indices.astype(_INT64).tobytes()
    else:
        message.dtype = _written_dtype(tensor)
        message.dense = _little_endian(tensor)
    return message


def densify(tensor: Array | Csr, *, field: str, budget: CellBudget) -> Array:
    """Expands a sparse tensor within ``budget``; gives a dense one back as it is."""
    if not isinstance(tensor, Csr):
        return tensor
    rows, columns = tensor.shape
    budget.spend(rows * columns, field)
    dense = np.zeros(tensor.shape, dtype=tensor.values.dtype)
    row_of_value = np.repeat(np.arange(rows), np.diff(tensor.crow_indices))
    dense[row_of_value, tensor.col_indices] = tensor.values
    return dense


def sparsify(dense: Array) -> Csr:
    """Lists the cells of a two-dimensional array that are not 0."""
    rows, columns = dense.shape
    row_of_value, col_indices = np.nonzero(dense)
    crow_indices = np.zeros(rows + 1, dtype=_INT64)
    np.cumsum(np.bincount(row_of_value, minlength=rows), out=crow_indices[1:])
    return Csr(dense[row_of_value, col_indices], crow_indices, col_indices.astype(_INT64), (rows, columns))


def write_batched(arrays: Sequence[Array]) -> pb.Message:
    """Writes one array for each datum; they must agree in dtype and in all dimensions but the first."""
    trailing = {array.shape[1:] for array in arrays}
    dtypes = {array.dtype for array in arrays}
    if len(trailing) != 1 or len(dtypes) != 1:
        raise ValueError(f"a batched tensor needs one trailing shape and one dtype, not {trailing} and {dtypes}")
    sizes = [array.nbytes for array in arrays]
    return pb.BatchedTensor(
        data=b"".join(_little_endian(array) for array in arrays),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(_INT64).tobytes(),
        dtype=_written_dtype(arrays[0]),
        trailing_shape=trailing.pop(),
    )


def read_batched(message: pb.Message, *, field: str) -> list[Array]:
    """Reads the arrays of a ``BatchedTensor``, one for each datum."""
    offsets = _buffer(message.offsets, _INT64, f"{field}.offsets")
    itemsize = _stored_dtype(message.dtype, field).itemsize
    flat = _widened(message.data, message.dtype, field)
    if offsets.size == 0 or offsets[0] != 0 or offsets[-1] != len(message.data):
        raise InvalidInput(f"{field}.offsets", "must begin with 0 and end with the number of data bytes")
    if np.any(np.diff(offsets) < 0) or np.any(offsets % itemsize):
        raise InvalidInput(f"{field}.offsets", "must not fall, and must lie between elements")
    trailing = _shape(message.trailing_shape, field)
    cells = _cell_count(trailing, field)
    arrays = []
    for start, end in zip(offsets[:-1] // itemsize, offsets[1:] // itemsize, strict=True):
        rows, rest = divmod(int(end - start), cells) if cells else (0, int(end - start))
        if rest:
            raise InvalidInput(field, f"holds {end - start} elements, not a multiple of the trailing shape {trailing}")
        arrays.append(flat[start:end].reshape((rows, *trailing)))
    return arrays


def read_json_tensor(body: TensorJson, *, field: str) -> Array | Csr:
    """Reads a tensor out of a JSON body."""
    values = _array(body.data, np.dtype(body.dtype), f"{field}.data")
    shape = tuple(body.shape or ())
    if body.sparse_crow_indices is None and body.sparse_col_indices is None:
        return _shaped(values, shape, field)
    if body.sparse_crow_indices is None or body.sparse_col_indices is None:
        raise InvalidInput(field, "needs both sparse_crow_indices and sparse_col_indices, or neither")
    crow = _array(body.sparse_crow_indices, _INT64, f"{field}.sparse_crow_indices")
    col = _array(body.sparse_col_indices, _INT64, f"{field}.sparse_col_indices")
    return _checked_csr(values, crow, col, shape, field)


def write_sent_tensor(body: TensorJson, *, field: str) -> pb.Message:
    """Writes a tensor of a JSON body as it was sent; only numbers that its dtype does not have are refused."""
    message = pb.Tensor(shape=_array(body.shape or (), _INT64, f"{field}.shape").tolist())
    values = _array(body.data, np.dtype(body.dtype), f"{field}.data")
    message.dtype = _written_dtype(values)
    if body.sparse_crow_indices is None and body.sparse_col_indices is None:
        message.dense = _little_endian(values)
        return message
    message.sparse_csr.values = _little_endian(values)
    for name, indices in (("crow_indices", body.sparse_crow_indices), ("col_indices", body.sparse_col_indices)):
        setattr(message.sparse_csr, name, _little_endian(_array(indices or (), _INT64, f"{field}.sparse_{name}")))
    return message


def write_json_tensor(tensor: Array | Csr) -> TensorJson:
    """Writes a float or integer tensor for a JSON body."""
    values = tensor.values if isinstance(tensor, Csr) else tensor
    dtype: Literal["int64", "float32"] = "float32" if values.dtype.kind == "f" else "int64"
    body = TensorJson(data=values.ravel().tolist(), dtype=dtype, shape=list(tensor.shape))
    if isinstance(tensor, Csr):
        body.sparse_crow_indices = tensor.crow_indices.tolist()
        body.sparse_col_indices = tensor.col_indices.tolist()
    return body


def read_int32(raw: bytes, *, field: str) -> Array:
    """Views a buffer of little-endian int32, as token lists are sent."""
    return _buffer(raw, np.dtype("<i4"), field)


def read_float32(raw: bytes, *, field: str) -> Array:
    """Views a buffer of little-endian float32, as logprob lists are sent."""
    return _buffer(raw, np.dtype("<f4"), field)


def _array(values: Sequence[float], dtype: np.dtype[Any], field: str) -> Array:
    if dtype.kind == "i" and any(isinstance(value, float) for value in values):
        raise InvalidInput(field, "must hold whole numbers, as its dtype is int64")
    try:
        return np.asarray(values, dtype=dtype)
    except OverflowError as error:
        raise InvalidInput(field, f"holds a number outside the range of {dtype.name}") from error


def _buffer(raw: bytes, dtype: np.dtype[Any], field: str) -> Array:
    if len(raw) % dtype.itemsize:
        raise InvalidInput(field, f"has {len(raw)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(raw, dtype=dtype)


def _stored_dtype(number: int, field: str) -> np.dtype[Any]:
    if number not in _STORED_AS:
        raise InvalidInput(f"{field}.dtype", f"unknown dtype {number}; use float32 or int64")
    return _STORED_AS[number]


def _widened(raw: bytes, number: int, field: str) -> Array:
    stored = _buffer(raw, _stored_dtype(number, field), field)
    if number == pb.DTYPE_INT32:
        return stored.astype(_INT64)
    if number == pb.DTYPE_BFLOAT16:
        # A bfloat16 is the upper half of a float32.
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored


def _shape(sizes: Sequence[int], field: str) -> tuple[int, ...]:
    """Judged by its length first: a byte on the wire would be a number of Python's here."""
    if len(sizes) > MAX_DIMENSIONS:
        raise InvalidInput(f"{field}.shape", f"has {len(sizes)} dimensions; at most {MAX_DIMENSIONS} are understood")
    return tuple(sizes)


def _cell_count(shape: tuple[int, ...], field: str) -> int:
    if any(size < 0 for size in shape):
        raise InvalidInput(f"{field}.shape", f"{list(shape)} has a negative size")
    # An empty array may have a huge dimension beside the zero, which numpy cannot reshape to.
    if math.prod(max(size, 1) for size in shape) > _MAX_SHAPE_PRODUCT:
        raise InvalidInput(f"{field}.shape", f"{list(shape)} is too large")
    return math.prod(shape)


def _shaped(flat: Array, shape: tuple[int, ...], field: str) -> Array:
    """Gives a flat array its shape; without one it stays a list, as the SDK means it."""
    if not shape:
        return flat
    if _cell_count(shape, field) != flat.size:
        raise InvalidInput(f"{field}.shape", f"{list(shape)} does not hold the {flat.size} elements that were sent")
    return flat.reshape(shape)


def _checked_csr(values: Array, crow: Array, col: Array, shape: tuple[int, ...], field: str) -> Csr:
    if len(shape) != 2:
        raise InvalidInput(f"{field}.shape", f"a sparse tensor has two dimensions, not {len(shape)}")
    _cell_count(shape, field)
    rows, columns = shape
    if crow.size != rows + 1:
        raise InvalidInput(f"{field}.crow_indices", f"has {crow.size} entries for {rows} rows; needs rows + 1")
    if col.size != values.size:
        raise InvalidInput(f"{field}.col_indices", f"has {col.size} entries for {values.size} values")
    if crow[0] != 0 or crow[-1] != values.size or np.any(crow[1:] < crow[:-1]):
        raise InvalidInput(f"{field}.crow_indices", "must begin with 0, never fall, and end with the number of values")
    if col.size and (col.min() < 0 or col.max() >= columns):
        raise InvalidInput(f"{field}.col_indices", f"must lie between 0 and {columns - 1}")
    first_of_row = np.zeros(col.size + 1, dtype=bool)
    first_of_row[crow] = True
    if np.any((col[1:] <= col[:-1]) & ~first_of_row[1:-1]):
        raise InvalidInput(f"{field}.col_indices", "must rise within each row")
    return Csr(values, crow, col, (rows, columns))


def _written_dtype(array: Array) -> int:
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _WRITTEN_AS:
        raise ValueError(f"the wire has no {array.dtype} tensors; use float32, int32 or int64")
    return _WRITTEN_AS[dtype]


def _little_endian(array: Array) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
