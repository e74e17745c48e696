"""The engine that computes nothing still lets others go between what is large."""

from __future__ import annotations

from twinkle.wire.sampling import SampleRequest
from twinkle.workers.engines.null_calls import NullState
from twinkle.workers.engines.null_engine import NullEngine


def request(*, max_tokens: int, num_samples: int = 1) -> SampleRequest:
    return SampleRequest.model_validate(
        {
            "sampling_session_id": "s",
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": max_tokens},
            "num_samples": num_samples,
        }
    )


def test_large_samples_end_one_by_one_and_small_ones_together_in_the_order_in_which_they_came() -> None:
    engine = NullEngine(base_model="m", max_rank=8)
    sizes = [("large", 2**13, 32), ("huge", 2**13, 32), ("small", 4, 1), ("smaller", 1, 2), ("last", 2**13, 32)]
    for name, max_tokens, num_samples in sizes:
        asked = request(max_tokens=max_tokens, num_samples=num_samples)
        engine.add_sample(name, NullState(applied=""), asked, cache_group="t")

    ended = []
    while engine.num_samples_under_way:
        ended.append([output.request_id for output in engine.step_samples()])

    assert ended == [["large"], ["huge"], ["small", "smaller", "last"]]
    assert engine.step_samples() == []
