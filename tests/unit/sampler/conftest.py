"""A tiny real model with adapters that matter, and a loop around the sampler."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers

from harness.paged_kernel import paged_kernel
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import LoraAdapter, LoraConfig
from twinkle.module.paged_varlen import PagedKernel
from twinkle.module.scaled_attention import AttentionForm
from twinkle.sampler import (
    SampleRequest,
    SampleResult,
    SteppedSampler,
    SteppedTorchSampler,
    paged_attention,
    torch_sampler,
)
from twinkle.sampler.cache_kinds import PagedCaches

prepare_environment()
torch.set_num_threads(1)

VOCAB_SIZE = 211
CONTEXT = 160
PAGE_TOKENS = 16

Outcomes = dict[str, SampleResult | Exception]
RunRequests = Callable[..., Outcomes]


@pytest.fixture(scope="session")
def hf_model() -> transformers.PreTrainedModel:
    """The untouched model, as the reference."""
    return _make_hf_model()


@pytest.fixture(scope="session")
def sampled_model() -> FusedLoraModel:
    """The same weights in the engine."""
    return FusedLoraModel(_make_hf_model(), name="tiny")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights on disk."""
    folder = tmp_path_factory.mktemp("model")
    _make_hf_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(sampled_model: FusedLoraModel) -> list[LoraAdapter]:
    """Adapters of different ranks whose B is not zero, the first without LoRA on the output head."""
    made = []
    for seed, rank in enumerate((2, 4, 8)):
        config = LoraConfig(rank=rank, seed=seed, train_unembed=seed > 0)
        adapter = sampled_model.create_adapter(config, trainable=False)
        generator = torch.Generator().manual_seed(seed)
        for pair in adapter.views.values():
            pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.02)
        adapter.publish()
        made.append(adapter)
    return made


@pytest.fixture(scope="session")
def run_requests(sampled_model: FusedLoraModel) -> RunRequests:
    """Steps a fresh sampler until all requests have ended."""

    def run(requests: Sequence[SampleRequest], **options: object) -> Outcomes:
        sampler = SteppedTorchSampler(sampled_model, **{"slots": 32, **options})  # type: ignore[arg-type]
        for request in requests:
            sampler.add(request)
        return run_to_end(sampler)

    return run


class Paged:
    """The samplers of a test keep pages, as on a GPU, and attend them by a stand-in for its kernel."""

    def __init__(self) -> None:
        self.kernel = paged_kernel()
        self.made: list[PagedCaches] = []

    def caches_for(self, model: FusedLoraModel) -> PagedCaches:
        self.made.append(PagedCaches(model.device, page_tokens=PAGE_TOKENS))
        return self.made[-1]

    def kernel_for(self, query: torch.Tensor, key: torch.Tensor, form: AttentionForm) -> PagedKernel | None:
        is_plain = form.chunk is None and form.cap is None and form.sinks is None
        return self.kernel if is_plain else None


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Paged:
    """Pages for whoever makes a sampler."""
    paged = Paged()
    monkeypatch.setattr(torch_sampler, "caches_for", paged.caches_for)
    monkeypatch.setattr(paged_attention, "paged_kernel_for", paged.kernel_for)
    return paged


@pytest.fixture(params=["buffers", "pages"])
def either_cache(request: pytest.FixtureRequest) -> None:
    """Both kinds of cache in turn. What is expected of pages is what buffers gave."""
    if request.param == "pages":
        request.getfixturevalue("paged")


def run_to_end(sampler: SteppedSampler, *, max_steps: int = 5000) -> Outcomes:
    ended: Outcomes = {}
    for _ in range(max_steps):
        if not sampler.has_work:
            # Whatever was cancelled, gave way or failed: no sequence holds anything any more.
            assert not isinstance(sampler, SteppedTorchSampler) or sampler._caches.num_held(()) == 0
            return ended
        for outcome in sampler.step():
            key, value = outcome if isinstance(outcome, tuple) else (outcome.key, outcome)
            assert key not in ended
            ended[key] = value
    raise AssertionError(f"still at work after {max_steps} steps")


Told = dict[str, list[list[tuple[int, float, list[tuple[int, float]]]]]]


def run_and_follow(sampler: SteppedSampler, requests: Sequence[SampleRequest]) -> tuple[Outcomes, Told]:
    """Steps until all have ended; what was told of each sample, one token after the other, before its request had."""
    told: Told = {request.key: [[] for _ in range(request.num_samples)] for request in requests}
    ended: Outcomes = {}
    for request in requests:
        sampler.add(request)
    while sampler.has_work:
        for outcome in sampler.step():
            assert isinstance(outcome, SampleResult), outcome
            ended[outcome.key] = outcome
        for key, samples in told.items():
            for stretch in sampler.drawn_so_far(key, [len(tokens) for tokens in samples]):
                assert key not in ended and stretch.tokens
                topk = stretch.topk or [[] for _ in stretch.tokens]
                samples[stretch.sample][stretch.start :] = zip(stretch.tokens, stretch.logprobs, topk, strict=True)
    return ended, told


def beginning_of(result: SampleResult | Exception, sample: int, num_tokens: int) -> list[object]:
    """A finished sample's first tokens in the form of what was told of it."""
    assert isinstance(result, SampleResult)
    sequence = result.sequences[sample]
    topk: list[object] = [[] for _ in sequence.tokens]
    if sequence.topk is not None:
        rows = zip(sequence.topk.token_ids.tolist(), sequence.topk.logprobs.tolist(), strict=True)
        topk = [list(zip(*row, strict=True)) for row in rows]
    return list(zip(sequence.tokens.tolist(), sequence.logprobs.tolist(), topk, strict=True))[:num_tokens]


def _make_hf_model() -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        eos_token_id=[2, 5],
        initializer_range=0.15,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()
