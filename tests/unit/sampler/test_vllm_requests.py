"""What vLLM is given of a request, without vLLM: the salt of its computed prompts above all."""

from __future__ import annotations

import pytest

from twinkle.sampler import SampleRequest
from twinkle.sampler.sequence import GrowingSequence
from twinkle.sampler.stops import stop_rule
from twinkle.sampler.vllm.progress import NAME, RunningSample, VLLMProgress
from twinkle.wire.sampling import SampleRequest as WireRequest
from twinkle.workers.engines.wire_forms import sampler_request
from twinkle.workers.sampling.sampling import CacheGroups

CONTEXT = 64


def running(request: SampleRequest, sample: int = 0) -> RunningSample:
    progress = VLLMProgress(
        request,
        stop_rule(request, eos_token_ids=(2,), decode_text=None),
        None,
        max_length=CONTEXT,
        vocab_size=100,
    )
    return RunningSample(f"name {sample}", progress, GrowingSequence(sample=sample))


def salt_of(tenant_name: str, tenant: str, *, generation: int = 0) -> str:
    """The salt of a prompt that a tenant sends, all the way from its request."""
    groups = CacheGroups({"t1": ["alice"], "research": ["bob", "carol"]}, {tenant: tenant_name}.__getitem__)
    body = WireRequest.model_validate(
        {
            "sampling_session_id": "s",
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [7, 8, 9]}]},
            "sampling_params": {"max_tokens": 4, "seed": 1},
        }
    )
    request = sampler_request("future", None, body, None, None, cache_group=groups.of(tenant))
    given = running(request).prompt(generation)
    assert given["prompt_token_ids"] == [7, 8, 9]
    return str(given["cache_salt"])


def test_the_prompts_of_two_tenants_never_have_the_same_salt() -> None:
    # The third is called as a group is, the fourth is in that group, the fifth carries the id of a tenant in its name.
    salts = {salt_of("x", "t1"), salt_of("y", "t2"), salt_of("research", "t3"), salt_of("alice", "t4")}
    salts.add(salt_of("tenant:t1", "t5"))

    assert len(salts) == 5


def test_a_tenant_and_those_the_operator_put_together_share_one_salt() -> None:
    assert salt_of("x", "t1") == salt_of("x", "t1")
    assert salt_of("bob", "t1") == salt_of("carol", "t2")


def test_what_was_computed_before_all_was_forgotten_has_another_salt() -> None:
    generations = (0, 1, 10, 11)

    salts = {salt_of("x", tenant, generation=number) for number in generations for tenant in ("t1", "1:t1", "0")}

    assert len(salts) == len(generations) * 3


@pytest.mark.parametrize(
    ("fields", "sample", "reads_cache"),
    [({}, 0, True), ({"prompt_logprobs": True}, 0, False), ({"prompt_logprobs": True}, 1, True)],
)
def test_only_the_sample_that_scores_a_prompt_computes_it_anew(
    fields: dict[str, bool], sample: int, reads_cache: bool
) -> None:
    request = SampleRequest(key="k", adapter=None, prompt=(7, 8, 9), seed=1, num_samples=2, **fields)  # type: ignore[arg-type]

    assert running(request, sample).sampling()["skip_reading_prefix_cache"] is not reads_cache


@pytest.mark.parametrize(("asked", "given"), [(None, CONTEXT - 3), (500, CONTEXT - 3), (5, 5), (0, 1)])
def test_vllm_is_given_no_choice_and_as_many_tokens_as_fit(asked: int | None, given: int) -> None:
    request = SampleRequest(key="k", adapter=None, prompt=(7, 8, 9), seed=1, max_tokens=asked, temperature=0.7)

    sampling = running(request).sampling()

    assert (sampling["temperature"], sampling["ignore_eos"], sampling["max_tokens"]) == (0, True, given)
    assert sampling["extra_args"] == {NAME: "name 0"}
