"""The largest operation: what it may be, and that a refusal names what would pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from harness.fake_worker import BASE_MODEL
from twinkle.core.errors import InvalidInput
from twinkle.core.operation_limits import OperationLimits, SampleSize
from twinkle.core.settings import Settings

if TYPE_CHECKING:
    from conftest import Api, ServeApi

LIMITS = OperationLimits(max_operation_tokens=1000, max_sample_tokens=2000, max_result_bytes=64_000, max_stop_bytes=100)


def test_by_default_a_request_of_two_hundred_bytes_cannot_ask_for_a_result_of_two_hundred_megabytes() -> None:
    size = SampleSize(num_prompt_tokens=3, num_samples=32, num_drawn=900, num_alternatives=1000)

    with pytest.raises(InvalidInput, match=r"come to a result of 230630400 bytes, 67108864 pass .*max_tokens=261 "):
        Settings().operation_limits.check_sample(size)


def test_a_pass_of_too_many_tokens_is_refused_with_the_number_that_passes() -> None:
    LIMITS.check_pass(1000)
    with pytest.raises(InvalidInput, match="data: has 1001 tokens, one operation takes 1000"):
        LIMITS.check_pass(1001)


def test_stop_texts_are_counted_in_bytes() -> None:
    size = SampleSize(num_prompt_tokens=1, num_samples=1, num_drawn=1, stops=["é" * 25, "a" * 50])
    LIMITS.check_sample(size)
    with pytest.raises(InvalidInput, match="stop: are 101 bytes of texts, 100 pass"):
        LIMITS.check_sample(dataclasses.replace(size, stops=[*size.stops, "b"]))


@given(
    num_prompt_tokens=st.integers(1, 3000),
    num_samples=st.integers(1, 64),
    num_drawn=st.integers(1, 3000),
    num_alternatives=st.integers(0, 40),
    scores_per_prompt_token=st.integers(0, 40),
)
def test_what_a_refusal_says_would_pass_does(**asked: int) -> None:
    size, refusals = SampleSize(**asked), list[str]()
    while refusals.count("") == 0 and not LIMITS.allow(size):
        with pytest.raises(InvalidInput) as refused:
            LIMITS.check_sample(size)
        refusals.append(refused.value.message.partition("max_tokens=")[2].partition(" ")[0])
        if refusals[-1]:
            size = dataclasses.replace(size, num_drawn=int(refusals[-1]))

    assert len(refusals) <= 2
    if "" not in refusals:
        assert size.num_tokens <= LIMITS.max_sample_tokens
        assert size.result_bytes <= LIMITS.max_result_bytes


@pytest.fixture(scope="module")
def small(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """A served app whose operations are to be small."""
    overrides = {"max_operation_tokens": 8, "max_sample_tokens": 50, "max_result_bytes": 800, "max_stop_bytes": 4}
    with serve_api(make_database_url("sqlite"), **overrides) as served:
        served.worker.start()
        yield served
        served.worker.stop()


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"num_samples": 4, "sampling_params": {"max_tokens": 12}}, "max_tokens=11 would pass"),
        ({"sampling_params": {"max_tokens": 10}, "topk_sample_logprobs": 10}, "max_tokens=9 would pass"),
        ({"sampling_params": {"max_tokens": 4, "stop": ["a", "bcde"]}}, "stop: are 5 bytes of texts, 4 pass"),
        ({"num_samples": 2}, "one sample takes 50 at most"),
    ],
)
def test_a_sample_that_is_too_large_is_refused_with_what_would_pass(
    small: Api, asked: dict[str, object], refusal: str
) -> None:
    with small.http(small.stores.tenants.create_key("samples", "test")) as http:
        session = http.post("/create_session", json={"type": "create_session"}).json()["session_id"]
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        sampler = http.post("/create_sampling_session", json=opened).json()["sampling_session_id"]
        address = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2, 3]}]}}

        refused = http.post("/asample", json={**address, **asked})
        accepted = http.post("/asample", json={**address, "sampling_params": {"max_tokens": 8}})

    assert refused.status_code in (400, 422)
    assert refusal in refused.text
    assert accepted.status_code == 200


def test_a_pass_that_is_too_large_fails_in_its_turn_and_the_next_one_goes_on(small: Api) -> None:
    client = small.sdk(small.stores.tenants.create_key("passes", "test"))
    trained = client.create_lora_training_client(BASE_MODEL, rank=8).result()

    def datum(num_tokens: int) -> tinker.Datum:
        tokens = list(range(1, num_tokens + 1))
        inputs = {"target_tokens": tinker.TensorData(data=tokens, dtype="int64", shape=[num_tokens])}
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)

    large = trained.forward_backward([datum(5), datum(4)], "cross_entropy")
    small_one = trained.forward_backward([datum(8)], "cross_entropy")

    with pytest.raises(tinker.RequestFailedError, match="has 9 tokens, one operation takes 8"):
        large.result()
    assert len(small_one.result().loss_fn_outputs) == 1
