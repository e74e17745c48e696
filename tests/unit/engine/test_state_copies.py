"""A recovery point is the state at one moment, whatever becomes of the adapter while it is written."""

from __future__ import annotations

import pytest
import torch

from twinkle.checkpoint_engine import snapshot
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


@pytest.mark.parametrize("at_once", [64, 1 << 24])
def test_sums_over_bits_tell_any_two_states_apart(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks on accelerators compare; on a CPU they hash all of it."""
    monkeypatch.setattr(snapshot, "CHECKED_AT_ONCE", at_once)
    buffer = torch.randn(1000, generator=torch.Generator().manual_seed(0))

    def told(values: torch.Tensor) -> list[int]:
        return torch.stack(snapshot.checksums(values)).tolist()

    assert told(buffer.clone()) == told(buffer)
    for place in (0, 500, 999):
        other = buffer.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(9.0))
        assert told(other) != told(buffer), "the last bit of one number"
    swapped = buffer.clone()
    swapped[[3, 700]] = buffer[[700, 3]]
    assert told(swapped) != told(buffer)
    neighbours = buffer.clone()
    neighbours[[3, 4]] = buffer[[4, 3]]
    assert told(neighbours) != told(buffer)
    zeros = torch.zeros(8)
    assert told(-zeros) != told(zeros)
    assert told(torch.full((8,), float("nan"))) == told(torch.full((8,), float("nan")))
