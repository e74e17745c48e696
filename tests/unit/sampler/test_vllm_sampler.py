"""Sampling through vLLM says what our own sampler and the trainer say, and never mixes adapters up."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.core.errors import Conflict, InvalidInput, UserError
from twinkle.hub.tiny import make_tiny_model
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.model.pictures import Picture
from twinkle.module.lora import LoraAdapter, LoraConfig
from twinkle.sampler import SampleRequest, SampleResult, SteppedSampler, SteppedTorchSampler
from twinkle.sampler.vllm.sampler import SteppedVLLMSampler

from .conftest import Outcomes, beginning_of, run_and_follow, run_to_end

pytest.importorskip("vllm")

LONG_PROMPT = tuple(int(token) for token in np.random.default_rng(8).integers(9, 200, 240))
TOLERANCE = 1e-4
"""Both compute in float32, with other kernels and in another order."""
TEXTS = ["how are you today my friend, the weather is fine and all is well in the world of words"] * 4
MAX_ADAPTERS = 3
MAX_RANK = 8
KEPT = MAX_ADAPTERS + 1
"""With the zeros through which the base model is sampled on a CPU."""
RULES = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.7, "temperature": 1.4},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.8},
)

MakeAdapter = Callable[..., LoraAdapter]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("vllm") / "tiny", texts=TEXTS, hidden_size=64, layers=2, context=256)


@pytest.fixture(scope="module")
def trainer(folder: Path) -> FusedLoraModel:
    return FusedLoraModel.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def decode(folder: Path) -> Callable[[Sequence[int]], str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda tokens: str(tokenizer.decode(list(tokens)))


@pytest.fixture(scope="module")
def vllm_sampler(folder: Path, decode: Callable[[Sequence[int]], str]) -> Iterator[SteppedVLLMSampler]:
    num_threads = torch.get_num_threads()
    sampler = SteppedVLLMSampler(
        str(folder), slots=32, max_rank=MAX_RANK, max_adapters_per_step=2, max_adapters=MAX_ADAPTERS, decode_text=decode
    )
    assert torch.get_num_threads() == num_threads
    yield sampler
    sampler.shutdown()


@pytest.fixture
def ours(trainer: FusedLoraModel, decode: Callable[[Sequence[int]], str]) -> SteppedTorchSampler:
    return SteppedTorchSampler(trainer, slots=32, decode_text=decode)


@pytest.fixture(scope="module")
def make_adapter(trainer: FusedLoraModel) -> MakeAdapter:
    """An adapter that changes what is said, drawn from its seed."""

    def make(seed: int, *, trainable: bool = False, **config: object) -> LoraAdapter:
        settings = {"rank": 4, "train_unembed": seed % 2 == 1, **config}
        adapter = trainer.create_adapter(LoraConfig(seed=seed, **settings), trainable=trainable)
        move(adapter, seed)
        return adapter

    return make


def move(adapter: LoraAdapter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for pair in adapter.views.values():
            pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.05)
    adapter.publish()


@pytest.fixture(scope="module")
def adapters(make_adapter: MakeAdapter) -> list[LoraAdapter]:
    """More than may be in one pass, and more than are kept; every other one trains the output projection."""
    return [make_adapter(seed, rank=2 + seed) for seed in range(5)]


@pytest.fixture(scope="module")
def prompts(trainer: FusedLoraModel) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(2)
    return [tuple(rng.integers(7, trainer.info.vocab_size, int(rng.integers(2, 70))).tolist()) for _ in range(16)]


def run(sampler: SteppedSampler, requests: Sequence[SampleRequest]) -> Outcomes:
    for request in requests:
        sampler.add(request)
    return run_to_end(sampler)


def mixed(adapters: Sequence[LoraAdapter], prompts: Sequence[tuple[int, ...]]) -> list[SampleRequest]:
    return [
        SampleRequest(
            key=f"r{i}",
            adapter=[None, *adapters][i % (len(adapters) + 1)],
            prompt=prompt,
            seed=i // 2,
            num_samples=1 + i % 3,
            max_tokens=5 + 3 * i,
            stop_token_ids=frozenset() if i % 2 else None,
            prompt_logprobs=i % 2 == 0,
            topk_prompt_logprobs=3 if i % 3 == 0 else 0,
            topk_sample_logprobs=2 if i % 4 == 0 else 0,
            prompt_alt_tokens_k=1 if i % 5 == 0 else 0,
            target_prompt_logprobs=np.full((len(prompt) - 1, 2), 9) if i % 7 == 0 else None,
            prompt_logprobs_last_n=1 if i == 6 else None,
            **RULES[i % len(RULES)],
        )
        for i, prompt in enumerate(prompts)
    ]


def assert_close(answer: object, wanted: object, *, tolerance: float = TOLERANCE) -> None:
    assert isinstance(answer, SampleResult) and isinstance(wanted, SampleResult), (answer, wanted)
    pairs = [
        (answer.prompt_logprobs, wanted.prompt_logprobs),
        (answer.target_prompt_logprobs, wanted.target_prompt_logprobs),
    ]
    tops = [
        (answer.topk_prompt_logprobs, wanted.topk_prompt_logprobs),
        (answer.prompt_alt_tokens, wanted.prompt_alt_tokens),
    ]
    for mine, theirs in zip(answer.sequences, wanted.sequences, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.stop_reason == theirs.stop_reason
        pairs.append((mine.logprobs, theirs.logprobs))
        tops.append((mine.topk, theirs.topk))
    for one, other in tops:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_ids.tolist() == other.token_ids.tolist()
            pairs.append((one.logprobs, other.logprobs))
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)


def test_tokens_logprobs_and_scores_of_prompts_are_those_of_our_own_sampler(
    vllm_sampler: SteppedVLLMSampler,
    ours: SteppedTorchSampler,
    adapters: list[LoraAdapter],
    prompts: list[tuple[int, ...]],
) -> None:
    requests = mixed(adapters, prompts)
    through_vllm, through_torch = run(vllm_sampler, requests), run(ours, requests)
    for request in requests:
        assert_close(through_vllm[request.key], through_torch[request.key])


def test_a_request_gets_the_same_alone_and_in_a_batch(
    vllm_sampler: SteppedVLLMSampler, adapters: list[LoraAdapter], prompts: list[tuple[int, ...]]
) -> None:
    requests = mixed(adapters, prompts)
    together = run(vllm_sampler, requests)
    for request in requests:
        assert_close(run(vllm_sampler, [request])[request.key], together[request.key], tolerance=2e-5)


def test_logprobs_are_the_trainers(
    vllm_sampler: SteppedVLLMSampler,
    trainer: FusedLoraModel,
    make_adapter: MakeAdapter,
    prompts: list[tuple[int, ...]],
) -> None:
    for seed in (20, 21):
        adapter = make_adapter(seed, trainable=True, rank=8)
        prompt = prompts[0]
        request = SampleRequest(
            key="r", adapter=adapter, prompt=prompt, seed=3, max_tokens=20, stop_token_ids=frozenset(),
            prompt_logprobs=True,
        )  # fmt: skip
        result = run(vllm_sampler, [request])["r"]
        assert isinstance(result, SampleResult) and result.prompt_logprobs is not None
        tokens = [*prompt, *result.sequences[0].tokens.tolist()]
        targets = np.array(tokens[1:])
        datum = Datum(
            tokens=np.array(tokens[:-1]), inputs={"target_tokens": targets, "weights": np.zeros(len(targets))}
        )
        (outcome,) = trainer.forward_backward(
            [TrainJob(adapter=adapter, data=(datum,), loss="cross_entropy", loss_config={}, backward=False)]
        )
        assert not isinstance(outcome, Exception), outcome
        said = [*result.prompt_logprobs[1:], *result.sequences[0].logprobs]
        np.testing.assert_allclose(said, outcome.logprobs[0], atol=TOLERANCE, rtol=0)


def test_versions_and_tenants_that_share_a_pass_are_each_sampled_as_alone(
    vllm_sampler: SteppedVLLMSampler,
    ours: SteppedTorchSampler,
    make_adapter: MakeAdapter,
    prompts: list[tuple[int, ...]],
) -> None:
    learner = make_adapter(31, trainable=True, rank=4)
    strangers = [make_adapter(32, rank=4), make_adapter(33, rank=4)]
    wanted: Outcomes = {}

    def ask(key: str, adapter: LoraAdapter) -> None:
        request = SampleRequest(
            key=key, adapter=adapter, prompt=prompts[3], seed=1, max_tokens=40, stop_token_ids=frozenset(),
            prompt_logprobs=True,
        )  # fmt: skip
        wanted.update(run(ours, [request]))
        vllm_sampler.add(request)

    ask("first version", learner)
    vllm_sampler.step()
    for index, stranger in enumerate(strangers):
        ask(f"stranger {index}", stranger)
    move(learner, 77)
    ask("second version", learner)
    move(learner, 78)  # trained on while both are under way
    ended = run_to_end(vllm_sampler)

    assert set(ended) == set(wanted)
    for key, result in wanted.items():
        assert_close(ended[key], result)
    said = {tuple(np.round(result.sequences[0].logprobs, 3).tolist()) for result in wanted.values()}
    assert len(said) == 4, "the four must differ, or this test shows nothing"


def test_evicted_adapters_come_back_as_they_are_under_numbers_never_used_before(
    vllm_sampler: SteppedVLLMSampler,
    ours: SteppedTorchSampler,
    make_adapter: MakeAdapter,
    prompts: list[tuple[int, ...]],
) -> None:
    many = [make_adapter(seed, rank=4) for seed in range(40, 40 + 3 * MAX_ADAPTERS)]
    seen: dict[int, str] = {}
    for adapter in [*many, *many]:
        request = SampleRequest(key="r", adapter=adapter, prompt=prompts[5], seed=0, max_tokens=6, prompt_logprobs=True)
        assert_close(run(vllm_sampler, [request])["r"], run(ours, [request])["r"])
        kept = vllm_sampler.loaded_adapters
        assert len(kept) <= KEPT
        assert sorted(path.name for path in kept[0].path.parent.iterdir()) == sorted(folder.name for folder in kept)
        for folder in kept:
            assert seen.setdefault(folder.number, folder.name) == folder.name


@pytest.mark.parametrize("train_unembed", [False, True])
def test_a_checkpoint_of_ours_is_sampled_from_its_files(
    vllm_sampler: SteppedVLLMSampler, ours: SteppedTorchSampler, make_adapter: MakeAdapter, train_unembed: bool
) -> None:
    files = export_adapter(make_adapter(60, train_unembed=train_unembed, trainable=True), "tiny", with_optimizer=True)
    asked = {"key": "r", "prompt": (9, 8, 7, 30, 12), "seed": 4, "max_tokens": 12, "num_samples": 2}
    asked |= {"stop_token_ids": frozenset(), "prompt_logprobs": True}

    def answered(sampler: SteppedSampler, adapter: object) -> SampleResult:
        found = run(sampler, [SampleRequest(adapter=adapter, **asked)])["r"]
        assert isinstance(found, SampleResult), found
        return found

    answer, wanted = (answered(sampler, sampler.load_adapter(files)) for sampler in (vllm_sampler, ours))
    base = answered(ours, None)

    assert_close(answer, wanted)
    assert np.nanmax(np.abs(wanted.prompt_logprobs - base.prompt_logprobs)) > 0.01


def test_an_adapter_that_vllm_does_not_load_fails_its_request_and_nothing_else(
    vllm_sampler: SteppedVLLMSampler, ours: SteppedTorchSampler, make_adapter: MakeAdapter, adapters: list[LoraAdapter]
) -> None:
    too_wide = make_adapter(70, rank=MAX_RANK + 1)
    good = SampleRequest(key="good", adapter=adapters[1], prompt=(9, 8, 7), seed=1, max_tokens=9)
    vllm_sampler.add(good)
    before = [folder.name for folder in vllm_sampler.loaded_adapters]
    with pytest.raises(InvalidInput, match="rank") as refused:
        vllm_sampler.add(SampleRequest(key="bad", adapter=too_wide, prompt=(9, 8, 7), seed=1))
    assert refused.value.field == "adapter"
    assert [folder.name for folder in vllm_sampler.loaded_adapters] == before
    ended = run_to_end(vllm_sampler)
    assert set(ended) == {"good"}
    assert_close(ended["good"], run(ours, [good])["good"])


def test_files_that_are_no_adapter_are_refused(vllm_sampler: SteppedVLLMSampler) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": []}
    files = {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": b"nothing of the kind",
    }
    with pytest.raises(InvalidInput) as refused:
        vllm_sampler.add(
            SampleRequest(key="files", adapter=vllm_sampler.load_adapter(files), prompt=(9, 8), seed=1, max_tokens=1)
        )
    assert refused.value.field == "adapter"
    assert not vllm_sampler.has_work


def test_pictures_are_refused_when_they_are_added(vllm_sampler: SteppedVLLMSampler) -> None:
    request = SampleRequest(key="p", adapter=None, prompt=(9, 8), seed=0, pictures=(Picture(0, 1, b"a file"),))
    with pytest.raises(InvalidInput, match="vLLM draws samples of text alone"):
        vllm_sampler.add(request)
    assert not vllm_sampler.has_work


def test_nan_weights_fail_their_own_requests_only(
    vllm_sampler: SteppedVLLMSampler, ours: SteppedTorchSampler, make_adapter: MakeAdapter, adapters: list[LoraAdapter]
) -> None:
    broken = make_adapter(71)
    broken.params.fill_(float("nan"))
    broken.publish()
    poison = [
        SampleRequest(key=f"x{i}", adapter=broken, prompt=(9, 8, 7), seed=0, prompt_logprobs=i == 1) for i in (0, 1)
    ]
    healthy = SampleRequest(key="h", adapter=adapters[2], prompt=(9, 8, 7), seed=1, max_tokens=9, num_samples=2)
    ended = run(vllm_sampler, [poison[0], healthy, poison[1]])
    assert isinstance(ended["x0"], UserError) and isinstance(ended["x1"], UserError)
    assert_close(ended["h"], run(ours, [healthy])["h"])


def test_nan_that_another_left_in_the_cache_fails_nobody(
    vllm_sampler: SteppedVLLMSampler, ours: SteppedTorchSampler, adapters: list[LoraAdapter]
) -> None:
    for cache in vllm_sampler._engine._runner.kv_caches:
        cache.fill_(float("nan"))
    requests = [
        SampleRequest(key=str(index), adapter=adapter, prompt=(9, 8, 7), seed=1, max_tokens=9, prompt_logprobs=True)
        for index, adapter in enumerate([None, *adapters])
    ]
    ended, wanted = run(vllm_sampler, requests), run(ours, requests)
    for request in requests:
        assert_close(ended[request.key], wanted[request.key])


def test_stops_of_every_kind_end_where_ours_do(
    vllm_sampler: SteppedVLLMSampler, ours: SteppedTorchSampler, decode: Callable[[Sequence[int]], str]
) -> None:
    base = {"adapter": None, "prompt": (9, 8, 7), "seed": 5, "max_tokens": 60, "temperature": 1.3}
    free = run(ours, [SampleRequest(key="r", stop_token_ids=frozenset(), **base)])["r"]
    tokens = free.sequences[0].tokens.tolist()
    requests = [
        SampleRequest(key="none", stop_token_ids=frozenset(), **base),
        SampleRequest(key="eos", **base),
        SampleRequest(key="id", stop_token_ids=frozenset(tokens[20:22]), **base),
        SampleRequest(key="string", stop_token_ids=frozenset(), stop_strings=(decode(tokens[10:13]),), **base),
        SampleRequest(key="sequence", stop_sequences=(tuple(tokens[30:33]),), **base),
    ]
    ended, wanted = run(vllm_sampler, requests), run(ours, requests)
    for request in requests:
        assert_close(ended[request.key], wanted[request.key])
    lengths = {key: len(result.sequences[0].tokens) for key, result in wanted.items()}
    assert lengths["none"] == 60 and min(lengths["id"], lengths["string"], lengths["sequence"]) < 60


def test_scoring_alone_and_filling_the_context(vllm_sampler: SteppedVLLMSampler, ours: SteppedTorchSampler) -> None:
    context = 256
    long = tuple(7 + index % 200 for index in range(context - 3))
    base = {"adapter": None, "seed": 0, "stop_token_ids": frozenset()}
    requests = [
        SampleRequest(key="score", prompt=(9, 8, 7), num_samples=2, max_tokens=0, prompt_logprobs=True, **base),
        SampleRequest(key="full", prompt=long, topk_prompt_logprobs=1, **base),
    ]
    ended, wanted = run(vllm_sampler, requests), run(ours, requests)
    for request in requests:
        assert_close(ended[request.key], wanted[request.key])
    assert len(ended["full"].sequences[0].tokens) == 3
    with pytest.raises(InvalidInput) as refused:
        vllm_sampler.add(SampleRequest(key="x", adapter=None, prompt=(*long, 7, 7, 7), seed=0, max_tokens=0))
    assert refused.value.field == "prompt"


def test_what_is_told_of_a_sample_under_way_is_the_beginning_of_its_result(
    vllm_sampler: SteppedVLLMSampler, adapters: list[LoraAdapter], prompts: list[tuple[int, ...]]
) -> None:
    ended, told = run_and_follow(vllm_sampler, mixed(adapters, prompts))

    for key, samples in told.items():
        for sample, tokens in enumerate(samples):
            assert tokens == beginning_of(ended[key], sample, len(tokens))
    assert sum(len(tokens) for samples in told.values() for tokens in samples) > 100


def test_a_cancelled_request_is_never_heard_of_again(
    vllm_sampler: SteppedVLLMSampler, adapters: list[LoraAdapter]
) -> None:
    for index, adapter in enumerate(adapters):
        vllm_sampler.add(
            SampleRequest(key=str(index), adapter=adapter, prompt=(9, 8), seed=0, num_samples=2, max_tokens=30)
        )
    with pytest.raises(Conflict):
        vllm_sampler.add(SampleRequest(key="0", adapter=None, prompt=(9, 8), seed=0))
    vllm_sampler.step()
    vllm_sampler.cancel("0")
    vllm_sampler.cancel("3")
    vllm_sampler.cancel("never added")
    assert set(run_to_end(vllm_sampler)) == {"1", "2", "4"}
    assert len(vllm_sampler.loaded_adapters) <= KEPT


def test_only_the_same_group_finds_a_prompt_computed(vllm_sampler: SteppedVLLMSampler) -> None:
    cached = []
    for key, group in enumerate(("tenant:victim", "tenant:stranger", "tenant:victim", "group:victim", "group:victim")):
        fields = {"num_samples": 2, "max_tokens": 1, "cache_group": group}
        vllm_sampler.add(SampleRequest(key=str(key), adapter=None, prompt=LONG_PROMPT, seed=1, **fields))
        (ended,) = run_to_end(vllm_sampler).values()
        assert isinstance(ended, SampleResult)
        cached.append(ended.num_cached_tokens)

    assert [count > 0 for count in cached] == [False, False, True, False, True]


def test_a_large_sample_leaves_places_to_others_and_keeps_its_tokens(
    vllm_sampler: SteppedVLLMSampler, ours: SteppedTorchSampler
) -> None:
    def asked(key: str, *, num_samples: int, max_tokens: int) -> SampleRequest:
        return SampleRequest(
            key=key,
            adapter=None,
            prompt=(5, 6, 7),
            seed=3,
            num_samples=num_samples,
            max_tokens=max_tokens,
            stop_token_ids=frozenset(),
            cache_group=f"tenant:{key}",
        )

    large, small = asked("large", num_samples=80, max_tokens=60), asked("small", num_samples=2, max_tokens=3)
    vllm_sampler.add(large)
    for _ in range(20):
        assert not vllm_sampler.step()
    drawn = {stretch.sample: len(stretch.tokens) for stretch in vllm_sampler.drawn_so_far("large", [0] * 80)}
    vllm_sampler.add(small)
    steps, found = 0, list[str]()
    while "small" not in found:
        steps += 1
        found += [outcome.key for outcome in vllm_sampler.step() if isinstance(outcome, SampleResult)]
    outcomes = run_to_end(vllm_sampler)

    # Forty sequences have places here, and one tenant 32 of them.
    assert len(drawn) == 32 and min(drawn.values()) >= 15
    assert steps <= 6
    assert_close(outcomes["large"], run(ours, [large])["large"])


def test_what_waits_for_a_place_is_cancelled_like_what_has_one(vllm_sampler: SteppedVLLMSampler) -> None:
    for key in ("a", "b"):
        vllm_sampler.add(
            SampleRequest(
                key=key,
                adapter=None,
                prompt=(5, 6, 7),
                seed=3,
                num_samples=64,
                max_tokens=100,
                stop_token_ids=frozenset(),
                cache_group="tenant:one",
            )
        )
    vllm_sampler.step()
    for key in ("a", "b"):
        vllm_sampler.cancel(key)

    assert not vllm_sampler.has_work and vllm_sampler.step() == []
