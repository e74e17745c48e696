"""Arrays of several kinds go to a device in one copy, to where they were before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twinkle.infra.sending import FixedParcel

CPU = torch.device("cpu")
KINDS = [((3,), torch.int64), ((2, 2), torch.int32), ((), torch.float32), ((1, 5), torch.int64)]


def arrays(start: int) -> list[np.ndarray]:
    return [
        np.arange(start, start + 3),
        np.arange(start, start + 4, dtype=np.int32).reshape(2, 2).T,
        np.array(start / 2, dtype=np.float32),
        np.arange(start, start + 5)[None],
    ]


def test_every_array_lies_where_it_lay() -> None:
    parcel = FixedParcel(KINDS, CPU)
    places = [tensor.data_ptr() for tensor in parcel.tensors]
    for start in (1, 100):
        parcel.send(arrays(start))
        for tensor, array, (shape, dtype) in zip(parcel.tensors, arrays(start), KINDS, strict=True):
            assert tensor.dtype == dtype and tuple(tensor.shape) == shape
            np.testing.assert_array_equal(tensor.numpy(), array)
    assert [tensor.data_ptr() for tensor in parcel.tensors] == places
    base = parcel.tensors[0].data_ptr()
    assert all((place - base) % 16 == 0 for place in places), "kernels read from multiples of sixteen bytes"


@pytest.mark.parametrize("wrong", [np.arange(4), np.arange(3, dtype=np.int32)], ids=["longer", "narrower"])
def test_another_shape_or_dtype_is_refused(wrong: np.ndarray) -> None:
    parcel = FixedParcel(KINDS, CPU)
    with pytest.raises(ValueError, match=r"for torch.int64 \(3,\)"):
        parcel.send([wrong, *arrays(1)[1:]])
