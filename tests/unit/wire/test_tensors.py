"""Tensors go over the wire unchanged, and what claims to be one is not believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker.proto import tinker_public_pb2 as sdk
from tinker.proto.request_conv import _tensor_data_to_proto
from tinker.proto.response_conv import _tensor_data_from_proto
from tinker.types import TensorData

from harness.measured import traced_peak_bytes
from twinkle.core.errors import InvalidInput
from twinkle.wire import protobuf as pb
from twinkle.wire.tensors import (
    Array,
    CellBudget,
    Csr,
    TensorJson,
    densify,
    read_batched,
    read_json_tensor,
    read_tensor,
    sparsify,
    write_batched,
    write_json_tensor,
    write_tensor,
)

DTYPES = st.sampled_from([np.dtype("<f4"), np.dtype("<i8")])
DENSE = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6))
)
MOSTLY_ZERO = DTYPES.flatmap(
    lambda dtype: hnp.arrays(
        dtype, st.tuples(st.integers(0, 7), st.integers(0, 7)), elements=st.integers(0, 3), fill=st.just(0)
    )
)


def _dense(tensor: Array | Csr) -> Array:
    return densify(tensor, field="t", budget=CellBudget())


def _csr_message(crow: list[int], col: list[int], shape: list[int], dtype: int = pb.DTYPE_FLOAT32) -> pb.Message:
    message = pb.Tensor(dtype=dtype, shape=shape)
    message.sparse_csr.values = np.ones(len(col), dtype="<f4").tobytes()
    message.sparse_csr.crow_indices = np.array(crow, dtype="<i8").tobytes()
    message.sparse_csr.col_indices = np.array(col, dtype="<i8").tobytes()
    return message


@settings(max_examples=150, deadline=None)
@given(DENSE)
def test_a_dense_tensor_survives_the_round_trip_and_the_sdk_reads_it(array: Array) -> None:
    message = write_tensor(array)

    back = read_tensor(message, field="t")

    assert isinstance(back, np.ndarray)
    np.testing.assert_array_equal(back, array)
    theirs = _tensor_data_from_proto(sdk.Tensor.FromString(message.SerializeToString()))
    np.testing.assert_array_equal(theirs.to_numpy(), array)
    resent = pb.parse_message(pb.Tensor, _tensor_data_to_proto(theirs).SerializeToString())
    np.testing.assert_array_equal(_dense(read_tensor(resent, field="t")), array)


@settings(max_examples=150, deadline=None)
@given(MOSTLY_ZERO)
def test_a_sparse_tensor_survives_the_round_trip_and_the_sdk_reads_it(array: Array) -> None:
    message = write_tensor(sparsify(array))

    back = read_tensor(message, field="t")

    assert isinstance(back, Csr)
    np.testing.assert_array_equal(_dense(back), array)
    np.testing.assert_array_equal(_dense(read_json_tensor(write_json_tensor(back), field="t")), array)
    theirs = _tensor_data_from_proto(sdk.Tensor.FromString(message.SerializeToString()))
    np.testing.assert_array_equal(theirs.to_numpy(), array)


@settings(max_examples=100, deadline=None)
@given(st.lists(hnp.arrays(np.dtype("<f4"), st.tuples(st.integers(0, 5), st.just(3))), min_size=1, max_size=6))
def test_batched_tensors_survive_the_round_trip(arrays: list[Array]) -> None:
    back = read_batched(write_batched(arrays), field="b")

    assert len(back) == len(arrays)
    for one, other in zip(back, arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_offsets_of_a_batch_are_counted_in_bytes() -> None:
    message = write_batched([np.zeros(3, dtype="<f4"), np.zeros(1, dtype="<f4")])

    assert np.frombuffer(message.offsets, dtype="<i8").tolist() == [0, 12, 16]


def test_narrow_dtypes_widen() -> None:
    integers = pb.Tensor(dtype=pb.DTYPE_INT32, shape=[2], dense=np.array([1, -1], dtype="<i4").tobytes())
    halves = pb.Tensor(dtype=pb.DTYPE_BFLOAT16, shape=[2], dense=np.array([0x3F80, 0xC000], dtype="<u2").tobytes())

    assert read_tensor(integers, field="t").dtype == np.int64  # type: ignore[union-attr]
    assert _dense(read_tensor(halves, field="t")).tolist() == [1.0, -2.0]


def test_without_a_shape_a_tensor_is_a_list_even_of_one() -> None:
    message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=np.ones(1, dtype="<f4").tobytes())

    assert _dense(read_tensor(message, field="t")).shape == (1,)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2]), "t"),
        (pb.Tensor(dtype=0, shape=[1], dense=b"1234"), "t.dtype"),
        (pb.Tensor(dtype=99, shape=[1], dense=b"1234"), "t.dtype"),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1], dense=b"123"), "t"),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2], dense=b"1234"), "t.shape"),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[-1], dense=b"1234"), "t.shape"),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[-1, -1], dense=b"1234"), "t.shape"),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1] * 9, dense=b"1234"), "t.shape"),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2**62, 2**62, 0], dense=b""), "t.shape"),
        (_csr_message([0, 1], [0], [1]), "t.shape"),
        (_csr_message([0, 1], [0], [1, 1, 1]), "t.shape"),
        (_csr_message([0, 1], [0], [-1, 5]), "t.shape"),
        (_csr_message([0, 1], [0], [2, 3]), "t.crow_indices"),
        (_csr_message([0, 2], [0], [1, 3]), "t.crow_indices"),
        (_csr_message([1, 1], [0], [1, 3]), "t.crow_indices"),
        (_csr_message([0, 2, 1, 1], [0], [3, 3]), "t.crow_indices"),
        (_csr_message([], [], [0, 3]), "t.crow_indices"),
        (_csr_message([0, 1], [3], [1, 3]), "t.col_indices"),
        (_csr_message([0, 1], [-1], [1, 3]), "t.col_indices"),
        (_csr_message([0, 1], [0], [1, 0]), "t.col_indices"),
        (_csr_message([0, 2], [1, 0], [1, 3]), "t.col_indices"),
        (_csr_message([0, 2], [1, 1], [1, 3]), "t.col_indices"),
        (_csr_message([0, 1], [0], [1, 3], dtype=pb.DTYPE_INT64), "t"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused_by_name(message: pb.Message, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_tensor(message, field="t")

    assert caught.value.field == field


def test_columns_may_fall_from_one_row_to_the_next() -> None:
    tensor = read_tensor(_csr_message([0, 2, 2, 3], [1, 2, 0], [3, 3]), field="t")

    assert _dense(tensor).tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 0]]


def test_a_giant_sparse_tensor_is_refused_and_never_allocated() -> None:
    giant = read_tensor(_csr_message([0, 1], [5], [1, 1 << 38]), field="t")

    def read() -> None:
        with pytest.raises(InvalidInput, match="make it smaller"):
            densify(giant, field="t", budget=CellBudget())

    assert traced_peak_bytes(read) < 1 << 20


def test_the_tensors_of_one_request_share_their_budget() -> None:
    budget = CellBudget(cells=10)
    tensor = read_tensor(_csr_message([0, 1], [0], [1, 6]), field="t")

    densify(tensor, field="t", budget=budget)

    with pytest.raises(InvalidInput, match="6 cells, more than the 4 left"):
        densify(tensor, field="t", budget=budget)


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": b""},
        {"offsets": b"1234567"},
        {"offsets": np.array([0, 8], dtype="<i8").tobytes()},
        {"offsets": np.array([4, 12], dtype="<i8").tobytes()},
        {"offsets": np.array([0, 6, 12], dtype="<i8").tobytes()},
        {"offsets": np.array([0, 16, 8, 12], dtype="<i8").tobytes()},
        {"offsets": np.array([0, -4, 12], dtype="<i8").tobytes()},
        {"trailing_shape": [2]},
        {"trailing_shape": [-3]},
        {"trailing_shape": [0]},
        {"dtype": 0},
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "data": np.ones(3, dtype="<f4").tobytes(),
        "offsets": np.array([0, 12], dtype="<i8").tobytes(),
        "dtype": pb.DTYPE_FLOAT32,
    }

    with pytest.raises(InvalidInput):
        read_batched(pb.BatchedTensor(**{**fields, **change}), field="b")


def test_what_cannot_be_sent_is_a_bug_of_ours() -> None:
    with pytest.raises(ValueError, match="float64"):
        write_tensor(np.zeros(2))
    with pytest.raises(ValueError, match="one trailing shape"):
        write_batched([np.zeros((2, 2), dtype="<f4"), np.zeros((2, 3), dtype="<f4")])


def test_json_tensors_of_the_sdk_are_read() -> None:
    sent = TensorData(
        data=[5, 7], dtype="int64", shape=[3, 4], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[2, 0]
    )
    body = TensorJson(
        data=sent.data,
        dtype=sent.dtype,
        shape=sent.shape,
        sparse_crow_indices=sent.sparse_crow_indices,
        sparse_col_indices=sent.sparse_col_indices,
    )

    np.testing.assert_array_equal(_dense(read_json_tensor(body, field="t")), sent.to_numpy())


@pytest.mark.parametrize(
    "body",
    [
        TensorJson(data=[1.5], dtype="int64"),
        TensorJson(data=[2**63], dtype="int64"),
        TensorJson(data=[10**400], dtype="float32"),
        TensorJson(data=[1, 2], dtype="int64", shape=[3]),
        TensorJson(data=[1], dtype="int64", shape=[1, 1], sparse_crow_indices=[0, 1]),
        TensorJson(data=[1], dtype="int64", shape=[1, 1], sparse_crow_indices=[0, 2**64], sparse_col_indices=[0]),
    ],
)
def test_a_json_tensor_that_contradicts_itself_is_refused(body: TensorJson) -> None:
    with pytest.raises(InvalidInput):
        read_json_tensor(body, field="t")
