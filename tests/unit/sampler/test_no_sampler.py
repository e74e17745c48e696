"""A mesh that only trains: whoever asks it for samples is told so, and nothing else of it minds."""

from __future__ import annotations

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.sampler import SampleRequest
from twinkle.sampler.none import NoSampler


def test_it_takes_no_request_says_why_and_has_nothing_to_do() -> None:
    sampler = NoSampler()
    request = SampleRequest(key="a", adapter=None, prompt=(1, 2), seed=0)

    with pytest.raises(InvalidInput, match="this mesh only trains; sample on another one of its model"):
        sampler.add(request)
    with pytest.raises(InvalidInput, match="only trains"):
        sampler.load_adapter({})
    with pytest.raises(InvalidInput, match="only trains"):
        sampler.load_weights([])
    sampler.cancel("a")
    sampler.forget_prompts()
    sampler.shutdown()

    assert (sampler.has_work, sampler.num_requests, sampler.step(), sampler.weight_names()) == (False, 0, [], [])
    assert sampler.drawn_so_far("a", [0]) == []
