"""A recovery point is the state at one moment, whatever becomes of the adapter while it is written."""

from __future__ import annotations

import torch

from twinkle.checkpoint_engine.host_copy import copy_to_host


def test_a_copy_is_what_was_there_when_its_source_changes_right_after() -> None:
    source = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "none": torch.empty(0)}
    expected = {name: tensor.clone() for name, tensor in source.items()}

    copy = copy_to_host(source)
    for tensor in source.values():
        tensor.fill_(-1.0)

    assert copy.num_bytes == 6 * 4 + 4 * 2
    assert list(copy.tensors()) == list(expected)
    assert all(torch.equal(copy.tensors()[name], tensor) for name, tensor in expected.items())
