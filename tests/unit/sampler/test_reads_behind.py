"""Tokens that the host reads one step behind the device: the same bits, one wait a step, and none before its work."""

from dataclasses import replace

import pytest
import torch
import transformers

from harness.families import FAMILIES, stir
from harness.host_reads import HostReads
from twinkle.core.errors import OutOfMemory, UserError
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import LoraConfig
from twinkle.sampler import SampleRequest, SteppedTorchSampler
from twinkle.sampler.kv_cache import BLOCK_TOKENS
from twinkle.sampler.unread import DrawnBatch

from .conftest import run_and_follow, run_to_end
from .test_sampler_invariance import bits_of, mixed_requests

pytestmark = pytest.mark.usefixtures("either_cache")


@pytest.fixture(scope="module")
def asked(adapters):
    """Every way to choose and to stop, penalties for what was just drawn among them."""
    requests = mixed_requests(adapters, count=12)
    return [
        *(replace(each, repetition_penalty=1.3) if i % 3 == 1 else each for i, each in enumerate(requests)),
        replace(requests[3], key="none", max_tokens=0),
        replace(requests[4], key="pair", stop_sequences=tuple((token,) for token in range(6, 40)), max_tokens=60),
    ]


@pytest.fixture(scope="module")
def at_once(sampled_model, asked):
    """Each by itself, read at once."""
    ended = {}
    for request in asked:
        sampler = SteppedTorchSampler(sampled_model, slots=8, chunk_tokens=32, reads_behind=False)
        sampler.add(request)
        ended |= run_to_end(sampler)
    assert {sequence.stop_reason for result in ended.values() for sequence in result.sequences} == {"stop", "length"}
    return ended


@pytest.mark.parametrize("options", [{}, {"slots": 3}, {"kv_tokens": 4 * BLOCK_TOKENS}])
def test_results_and_what_is_told_before_them_are_the_same_bits(sampled_model, asked, at_once, options):
    options = {"slots": 16, "chunk_tokens": 32, **options}
    ended, told = run_and_follow(SteppedTorchSampler(sampled_model, reads_behind=True, **options), asked)
    for key, result in at_once.items():
        assert bits_of(ended[key]) == bits_of(result), key
    for key, samples in told.items():
        for sample, tokens in enumerate(samples):
            drawn = at_once[key].sequences[sample]
            assert [token for token, _, _ in tokens] == drawn.tokens[: len(tokens)].tolist()


def test_each_step_waits_once_and_only_when_the_device_has_its_next_work(sampled_model):
    sampler = SteppedTorchSampler(sampled_model, slots=8, reads_behind=True)
    fields = {"adapter": None, "num_samples": 3, "stop_token_ids": frozenset(), "max_tokens": 6}
    for number in range(2):
        sampler.add(SampleRequest(key=str(number), prompt=(7, 8, 9 + number), seed=number, **fields))
    order, waits = [], []
    start, read = DrawnBatch.start, DrawnBatch.read

    def started(targets, logits_NV):
        order.append("drawn")
        return start(targets, logits_NV)

    def is_read(batch, active):
        order.append("read")
        return read(batch, active)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrawnBatch, "start", started)
        patch.setattr(DrawnBatch, "read", is_read)
        while sampler.has_work:
            with HostReads() as reads:
                sampler.step()
            waits.append(reads.counts.total())
    # The first step has nothing to read, the last one nothing to draw; no token takes more than one wait for all.
    assert waits == [0, *[1] * 6]
    assert order == ["drawn", *["drawn", "read"] * 5, "read"]


def test_a_request_that_fails_or_is_cancelled_takes_no_other_with_it(sampled_model, asked, at_once):
    broken = sampled_model.create_adapter(LoraConfig(rank=2), trainable=False)
    broken.params.fill_(float("nan"))
    broken.publish()
    sampler = SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=32, reads_behind=True)
    for request in asked:
        sampler.add(request)
    sampler.add(SampleRequest(key="sick", adapter=broken, prompt=(7, 8, 9), seed=0, num_samples=2, top_p=0.9))
    sampler.add(SampleRequest(key="gone", adapter=broken, prompt=(7, 8), seed=0))
    ended = {}
    for _ in range(2):
        for outcome in sampler.step():
            key, value = outcome if isinstance(outcome, tuple) else (outcome.key, outcome)
            ended[key] = value
    sampler.cancel("gone")  # what was drawn for it is not read yet
    ended |= run_to_end(sampler)
    assert isinstance(ended.pop("sick"), UserError)
    assert ended.keys() == at_once.keys()
    assert all(bits_of(ended[key]) == bits_of(result) for key, result in at_once.items())


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek-v4"])
def test_layers_with_a_memory_go_on_from_unread_tokens_and_after_a_pass_without_memory(family, monkeypatch):
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    stir(made)
    model = FusedLoraModel(made, name="tiny")
    requests = [
        SampleRequest(
            key=str(i), adapter=None, prompt=tuple(range(7, 10 + 40 * i)), seed=i, num_samples=2, max_tokens=8
        )
        for i in range(2)
    ]
    results = []
    for behind in (False, True):
        sampler = SteppedTorchSampler(model, slots=8, chunk_tokens=64, reads_behind=behind)
        for request in requests:
            sampler.add(request)
        ended = {}
        for _ in range(3):
            ended |= {outcome.key: outcome for outcome in sampler.step()}
        with monkeypatch.context() as broken:
            broken.setattr(model, "logits", _out_of_memory)
            with pytest.raises(OutOfMemory):
                sampler.step()
        results.append(ended | run_to_end(sampler))
    assert [bits_of(results[0][key]) for key in ("0", "1")] == [bits_of(results[1][key]) for key in ("0", "1")]


def _out_of_memory(*args):
    raise torch.OutOfMemoryError("device")
