"""Steps of the sampler on a device without values, of every family and over both kinds of caches: nothing is read but
tokens, a step behind, and all that goes there goes by the one way that nobody waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from harness.families import FAMILIES, SAMPLED, SAMPLED_WITH_STATES
from harness.valueless import Crossings, packed_kernel_for, valueless_model
from twinkle.core.errors import OutOfMemory
from twinkle.infra.sending import Arriving
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import LoraConfig
from twinkle.module.paged_varlen import PagedKernel
from twinkle.module.scaled_attention import AttentionForm
from twinkle.sampler import SampleRequest, SteppedTorchSampler
from twinkle.sampler.cache_kinds import ContiguousCaches, PagedCaches
from twinkle.sampler.caches import Caches
from twinkle.sampler.request import SampleResult

ALL = ("qwen3", *SAMPLED, *SAMPLED_WITH_STATES)
IN_BUFFERS = ("qwen3", "gemma2", "gpt-oss", "llama4", "qwen3_5-moe", "nemotron-h", "deepseek-v4")
DEVICE = torch.device("meta")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often tokens are read; each is made up."""
    found: Counter[str] = Counter()

    def read(arriving: Arriving) -> np.ndarray:
        found["tokens"] += 1
        return np.ones(arriving._values.shape)

    monkeypatch.setattr(Arriving, "read", read)
    return found


@pytest.fixture
def caches(kind: str, monkeypatch: pytest.MonkeyPatch) -> Caches:
    """Of that kind, with a kernel that takes all sequences in one call for the layers that torch's knows."""
    kernel = PagedKernel(lambda query, *rest, **options: query * 1, wants_ends=False)

    def paged_kernel_for(query: torch.Tensor, key: torch.Tensor, form: AttentionForm) -> PagedKernel | None:
        return kernel if packed_kernel_for(query, key, form) and form.chunk is None else None

    monkeypatch.setattr("twinkle.sampler.attention.kernel_for", packed_kernel_for)
    monkeypatch.setattr("twinkle.sampler.paged_attention.paged_kernel_for", paged_kernel_for)
    return PagedCaches(DEVICE, page_tokens=16) if kind == "pages" else ContiguousCaches(DEVICE)


def requests_of(model: FusedLoraModel) -> list[SampleRequest]:
    """With and without an adapter, several samples each, one longer than a chunk, all ways to choose."""
    adapter = model.create_adapter(LoraConfig(rank=3), trainable=False)
    chosen = [{"temperature": 0.0}, {"top_p": 0.9, "temperature": 0.7}, {"top_k": 5}, {"repetition_penalty": 1.2}]
    return [
        SampleRequest(
            key=str(number),
            adapter=adapter if number % 2 else None,
            prompt=tuple(range(7, 10 + 30 * number)),
            seed=number,
            num_samples=2,
            max_tokens=4,
            topk_sample_logprobs=number,
            stop_token_ids=frozenset(),
            **fields,
        )
        for number, fields in enumerate(chosen)
    ]


@pytest.mark.parametrize(
    ("kind", "family"), [*(("pages", family) for family in ALL), *(("buffers", family) for family in IN_BUFFERS)]
)
def test_a_step_reads_the_tokens_before_it_and_nothing_else(
    family: str, caches: Caches, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, others = valueless_model(FAMILIES[family](), monkeypatch)
    sampler = SteppedTorchSampler(model, slots=16, chunk_tokens=64, caches=caches)
    for request in requests_of(model):
        sampler.add(request)
    ended = []
    with Crossings() as crossings:
        while sampler.has_work:
            before = reads.total()
            ended += sampler.step()
            assert reads.total() - before <= 2
    assert all(isinstance(outcome, SampleResult) for outcome in ended), ended
    assert len(ended) == 4
    assert crossings.counts == {}
    assert others == {}


@pytest.mark.parametrize("kind", ["pages"])
def test_all_that_is_asked_about_a_prompt_is_read_at_once(
    caches: Caches, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        reads["scores"] += 1
        return [np.ones(tensor.shape) for tensor in tensors]

    monkeypatch.setattr("twinkle.sampler.prompt_scores.fetch", fetch)
    model, _ = valueless_model(FAMILIES["qwen3"](), monkeypatch)
    sampler = SteppedTorchSampler(model, slots=4, chunk_tokens=64, caches=caches)
    prompt = tuple(range(7, 57))
    sampler.add(
        SampleRequest(
            key="asked",
            adapter=None,
            prompt=prompt,
            seed=1,
            max_tokens=1,
            stop_token_ids=frozenset(),
            prompt_logprobs=True,
            topk_prompt_logprobs=3,
            prompt_alt_tokens_k=2,
            target_prompt_logprobs=np.full((len(prompt) - 1, 2), 5, dtype=np.int64),
        )
    )
    with Crossings() as crossings:
        while sampler.has_work:
            sampler.step()
    assert reads["scores"] == 1
    assert crossings.counts == {}


@pytest.mark.parametrize("kind", ["pages"])
def test_a_pass_that_did_not_fit_gives_back_what_is_kept_to_be_quick(
    caches: Caches, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's allocator keeps memory in pieces that nothing else fits into."""
    given_back: list[str] = []
    monkeypatch.setattr("twinkle.model.fused.model.Torch.empty_cache", lambda: given_back.append("the allocator's"))
    model, _ = valueless_model(FAMILIES["qwen3-moe"](), monkeypatch)
    sampler = SteppedTorchSampler(model, slots=4, chunk_tokens=64, caches=caches)
    request, *_ = requests_of(model)
    with monkeypatch.context() as patch:

        def no_room(*args: object, **options: object) -> None:
            raise torch.OutOfMemoryError("device")

        patch.setattr(model, "run_packed", no_room)
        patch.setattr(model.pool, "release_stacks", lambda: given_back.append("stacks"))
        sampler.add(request)
        with pytest.raises(OutOfMemory):
            sampler.step()
    assert given_back == ["stacks", "the allocator's"]
    ended = []
    while sampler.has_work:
        ended += sampler.step()
    assert [type(outcome) for outcome in ended] == [SampleResult]
