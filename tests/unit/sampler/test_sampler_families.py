"""Windows and experts in the sampler: greedy tokens of transformers, and the same bits alone and in company."""

import numpy as np
import pytest
import torch
import transformers

from harness.families import FAMILIES, SAMPLED, VOCAB_SIZE, stir
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import LoraConfig
from twinkle.sampler import SampleRequest, SteppedTorchSampler

from .conftest import run_to_end

PROMPT_LENGTHS = (1, 6, 7, 8, 33, 50)
NEW_TOKENS = 20


@pytest.fixture(scope="module", params=SAMPLED)
def models(request):
    """The untouched model and the same weights in the engine."""
    plain, ours = (_make(request.param) for _ in range(2))
    return plain, FusedLoraModel(ours, name="tiny")


def _make(family):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    stir(model)
    return model


def asked(adapter, number):
    prompt = np.random.default_rng(number).integers(6, VOCAB_SIZE, PROMPT_LENGTHS[number])
    return SampleRequest(
        key=str(number),
        adapter=adapter,
        prompt=tuple(prompt.tolist()),
        seed=number,
        temperature=0.0,
        max_tokens=NEW_TOKENS,
        stop_token_ids=frozenset(),
        prompt_logprobs=True,
    )


def run(model, requests):
    sampler = SteppedTorchSampler(model, slots=32, chunk_tokens=16)
    for request in requests:
        sampler.add(request)
    return run_to_end(sampler)


def test_greedy_tokens_are_those_of_a_plain_forward_pass(models):
    plain, ours = models
    requests = [asked(None, number) for number in range(len(PROMPT_LENGTHS))]

    ended = run(ours, requests)

    for request in requests:
        sequence = ended[request.key].sequences[0]
        tokens = torch.tensor([*request.prompt, *sequence.tokens.tolist()])
        with torch.inference_mode():
            logprobs = torch.log_softmax(plain(tokens[None]).logits[0].double(), -1)
        rows = logprobs[len(request.prompt) - 1 : -1]
        assert sequence.tokens.tolist() == rows.argmax(-1).tolist()
        scored = logprobs[torch.arange(len(request.prompt) - 1), tokens[1 : len(request.prompt)]]
        np.testing.assert_allclose(ended[request.key].prompt_logprobs[1:], scored.numpy(), atol=1e-4)


def test_bits_are_the_same_alone_and_beside_others_and_a_nan_tenant(models):
    _, ours = models
    assert ours.determinism != "none"
    adapters = [ours.create_adapter(LoraConfig(rank=rank, seed=rank), trainable=False) for rank in (2, 5, 3)]
    for number, adapter in enumerate(adapters):
        noise = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(number))
        adapter.params.add_(noise, alpha=0.1)
    adapters[2].params.fill_(float("nan"))
    requests = [asked(adapters[number % 2], number) for number in range(len(PROMPT_LENGTHS) - 1)]
    sick = asked(adapters[2], len(PROMPT_LENGTHS) - 1)

    together = run(ours, [sick, *requests])

    assert isinstance(together[sick.key], Exception)
    for request in requests:
        alone, ours_too = (ended[request.key] for ended in (run(ours, [request]), together))
        assert alone.sequences[0].tokens.tolist() == ours_too.sequences[0].tokens.tolist()
        assert alone.sequences[0].logprobs.tobytes() == ours_too.sequences[0].logprobs.tobytes()
        assert np.asarray(alone.prompt_logprobs).tobytes() == np.asarray(ours_too.prompt_logprobs).tobytes()
