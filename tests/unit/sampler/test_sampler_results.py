"""What comes out of the sampler, against transformers and against a plain forward pass."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from twinkle.core.errors import Conflict, InvalidInput
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.sampler import SampleRequest, SampleResult, SteppedTorchSampler
from twinkle.sampler.kv_cache import BLOCK_TOKENS

from .conftest import CONTEXT, VOCAB_SIZE, beginning_of, run_and_follow, run_to_end

pytestmark = pytest.mark.usefixtures("either_cache")

NO_STOP = frozenset()


def prompt_of(length, seed=0):
    return tuple(np.random.default_rng(seed).integers(6, VOCAB_SIZE, length).tolist())


def request(key="r", *, length=9, seed=0, **fields):
    fields = {"adapter": None, "prompt": prompt_of(length, seed), "seed": seed, "max_tokens": 12, **fields}
    return SampleRequest(key=key, **fields)


def reference_logprobs(model, tokens, temperature=1.0):
    with torch.inference_mode():
        logits_TV = model(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits_TV.double() / temperature, -1).numpy()


def test_greedy_tokens_equal_those_of_generate(hf_model, run_requests):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 7, 40, 70))]
    ended = run_requests(
        [request(str(i), prompt=p, temperature=0.0, max_tokens=40) for i, p in enumerate(prompts)], chunk_tokens=32
    )
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = hf_model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
        sequence = ended[str(i)].sequences[0]
        assert sequence.tokens.tolist() == expected[0, len(prompt) :].tolist()
        lp = reference_logprobs(hf_model, [*prompt, *sequence.tokens.tolist()])
        rows = np.arange(len(prompt) - 1, len(prompt) + len(sequence.tokens) - 1)
        np.testing.assert_allclose(sequence.logprobs, lp[rows, sequence.tokens], atol=2e-5)


def test_sampled_logprobs_are_those_of_the_temperature_scaled_distribution_before_top_k(hf_model, run_requests):
    asked = request(temperature=0.6, top_k=5, top_p=0.9, stop_token_ids=NO_STOP, topk_sample_logprobs=3)
    sequence = run_requests([asked])["r"].sequences[0]
    lp = reference_logprobs(hf_model, [*asked.prompt, *sequence.tokens.tolist()], temperature=0.6)
    rows = np.arange(len(asked.prompt) - 1, len(asked.prompt) + 11)
    np.testing.assert_allclose(sequence.logprobs, lp[rows, sequence.tokens], atol=2e-5)
    np.testing.assert_array_equal(sequence.topk.token_ids, np.argsort(-lp[rows], axis=-1)[:, :3])
    np.testing.assert_allclose(sequence.topk.logprobs, -np.sort(-lp[rows], axis=-1)[:, :3], atol=2e-5)
    assert all(token in np.argsort(-lp[row])[:5] for row, token in zip(rows, sequence.tokens, strict=True))


def test_prompt_scores_equal_a_full_forward_pass(hf_model, run_requests):
    prompt = prompt_of(75)
    targets = np.stack([np.roll(prompt, 3)[1:], np.full(74, -1)], axis=1)
    asked = request(
        prompt=prompt,
        max_tokens=1,
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=2,
        temperature=0.8,
    )
    result = run_requests([asked], chunk_tokens=32)["r"]
    lp = reference_logprobs(hf_model, prompt)[:-1]
    rows = np.arange(74)
    assert np.isnan(result.prompt_logprobs[0])
    np.testing.assert_allclose(result.prompt_logprobs[1:], lp[rows, prompt[1:]], atol=1e-5)
    assert result.topk_prompt_logprobs.token_ids[0].tolist() == [0] * 4
    assert result.topk_prompt_logprobs.logprobs[0].tolist() == [-99999.0] * 4
    np.testing.assert_allclose(result.topk_prompt_logprobs.logprobs[1:], -np.sort(-lp, axis=-1)[:, :4], atol=1e-5)
    np.testing.assert_allclose(result.target_prompt_logprobs[:, 0], lp[rows, targets[:, 0]], atol=1e-5)
    assert not result.target_prompt_logprobs[:, 1].any()
    scaled = reference_logprobs(hf_model, prompt, temperature=0.8)[:-1]
    drawn = result.prompt_alt_tokens
    assert (drawn.token_ids[:, 0] != drawn.token_ids[:, 1]).any()
    np.testing.assert_allclose(drawn.logprobs, np.take_along_axis(scaled, drawn.token_ids, 1), atol=2e-5)


def test_prompt_logprobs_equal_the_trainers(sampled_model, adapters, run_requests):
    prompt = prompt_of(70)
    result = run_requests(
        [request(adapter=adapters[2], prompt=prompt, max_tokens=0, prompt_logprobs=True)], chunk_tokens=32
    )["r"]
    datum = Datum(
        tokens=np.array(prompt[:-1]),
        inputs={"target_tokens": np.array(prompt[1:]), "weights": np.ones(69, dtype=np.float32)},
    )
    (outcome,) = sampled_model.forward_backward(
        [TrainJob(adapter=adapters[2], data=(datum,), loss="cross_entropy", backward=False)]
    )
    np.testing.assert_allclose(result.prompt_logprobs[1:], outcome.logprobs[0], atol=1e-5)


def test_only_the_last_n_prompt_logprobs_are_filled_when_asked(run_requests):
    asked = request(length=40, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=1)
    whole = run_requests([asked])["r"]
    part = run_requests([replace(asked, prompt_logprobs_last_n=7)])["r"]
    assert np.isnan(part.prompt_logprobs[:33]).all()
    np.testing.assert_array_equal(part.prompt_logprobs[33:], whole.prompt_logprobs[33:])
    assert (part.topk_prompt_logprobs.logprobs[:33] == -99999.0).all()
    assert not part.topk_prompt_logprobs.token_ids[:33].any()
    np.testing.assert_array_equal(part.topk_prompt_logprobs.logprobs[33:], whole.topk_prompt_logprobs.logprobs[33:])
    np.testing.assert_array_equal(part.prompt_alt_tokens.token_ids, whole.prompt_alt_tokens.token_ids)


def test_a_one_token_prompt_can_be_scored_and_continued(run_requests):
    asked = request(length=1, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=1, max_tokens=3)
    result = run_requests([replace(asked, target_prompt_logprobs=np.zeros((0, 2), dtype=np.int64))])["r"]
    assert np.isnan(result.prompt_logprobs).tolist() == [True]
    assert result.target_prompt_logprobs.shape == (0, 2)
    assert result.prompt_alt_tokens.token_ids.shape == (0, 1)


def test_generation_ends_with_the_context(run_requests):
    ended = run_requests(
        [
            request("beyond", length=CONTEXT - 5, max_tokens=50, stop_token_ids=NO_STOP),
            request("open", length=CONTEXT - 9, max_tokens=None, stop_token_ids=NO_STOP),
            request("full", length=CONTEXT, max_tokens=1, prompt_logprobs=True, num_samples=2),
        ]
    )
    lengths = {key: [len(s.tokens) for s in result.sequences] for key, result in ended.items()}
    assert lengths == {"beyond": [5], "open": [9], "full": [0, 0]}
    assert {s.stop_reason for result in ended.values() for s in result.sequences} == {"length"}
    assert not np.isnan(ended["full"].prompt_logprobs[1:]).any()


def test_an_omitted_stop_is_the_models_eos_and_an_empty_one_is_none(run_requests):
    free = request(stop_token_ids=NO_STOP, max_tokens=CONTEXT - 9, temperature=1.5, num_samples=4, seed=4)
    unstopped = run_requests([free])["r"].sequences
    stopped = run_requests([replace(free, stop_token_ids=None)])["r"].sequences
    assert all(len(s.tokens) == CONTEXT - 9 for s in unstopped)
    assert any(s.stop_reason == "stop" for s in stopped)
    for full, cut in zip(unstopped, stopped, strict=True):
        hits = np.flatnonzero(np.isin(full.tokens, [2, 5]))
        expected = full.tokens[: hits[0] + 1] if hits.size else full.tokens
        assert cut.tokens.tolist() == expected.tolist()
        assert cut.stop_reason == ("stop" if hits.size else "length")


def test_stop_sequences_and_strings_end_a_sequence_and_stay_in_it(run_requests):
    free = request(stop_token_ids=NO_STOP, max_tokens=30)
    tokens = run_requests([free])["r"].sequences[0].tokens.tolist()
    by_ids = run_requests([replace(free, stop_token_ids=None, stop_sequences=(tuple(tokens[9:12]),))])["r"]
    assert by_ids.sequences[0].tokens.tolist() == tokens[:12]
    text = "".join(f"<{token}>" for token in tokens)
    stop = text[len("".join(f"<{token}>" for token in tokens[:14])) :][:6]
    by_text = run_requests(
        [replace(free, stop_token_ids=None, stop_strings=(stop,))],
        decode_text=lambda ids: "".join(f"<{token}>" for token in ids),
    )["r"]
    assert by_text.sequences[0].stop_reason == "stop"
    kept = by_text.sequences[0].tokens.tolist()
    assert kept == tokens[: len(kept)]
    assert stop in "".join(f"<{token}>" for token in kept)
    assert stop not in "".join(f"<{token}>" for token in kept[:-1])


def test_samples_of_one_request_equal_the_first_of_their_own_and_differ(run_requests):
    asked = request(num_samples=5, stop_token_ids=NO_STOP, max_tokens=8)
    many = run_requests([asked])["r"].sequences
    again = run_requests([asked], slots=2)["r"].sequences
    other_seed = run_requests([replace(asked, seed=1, num_samples=1)])["r"].sequences[0]
    assert [s.tokens.tolist() for s in many] == [s.tokens.tolist() for s in again]
    assert len({tuple(s.tokens.tolist()) for s in many}) == 5
    assert other_seed.tokens.tolist() != many[0].tokens.tolist()
    first = run_requests([replace(asked, num_samples=1)])["r"].sequences[0]
    assert first.tokens.tolist() == many[0].tokens.tolist()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"length": CONTEXT + 1}, "prompt"),
        ({"prompt": (1, VOCAB_SIZE)}, "prompt"),
        ({"prompt": (1, -1)}, "prompt"),
        ({"num_samples": 0}, "num_samples"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_token_ids": frozenset({VOCAB_SIZE})}, "stop"),
        ({"stop_strings": ("x",)}, "stop"),
        ({"stop_sequences": ((),)}, "stop"),
        ({"topk_prompt_logprobs": VOCAB_SIZE + 1}, "topk_prompt_logprobs"),
        ({"prompt_logprobs_last_n": -1}, "prompt_logprobs_last_n"),
        ({"target_prompt_logprobs": np.zeros((9, 1), dtype=np.int64)}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": np.full((8, 1), VOCAB_SIZE)}, "target_prompt_logprobs"),
    ],
)
def test_a_field_outside_its_limits_is_refused_by_name(sampled_model, fields, field):
    sampler = SteppedTorchSampler(sampled_model, slots=2)
    with pytest.raises(InvalidInput) as caught:
        sampler.add(request(**fields))
    assert caught.value.field == field
    assert not sampler.has_work


def test_a_key_is_taken_until_its_request_has_ended(sampled_model):
    sampler = SteppedTorchSampler(sampled_model, slots=2)
    sampler.add(request())
    with pytest.raises(Conflict):
        sampler.add(request())
    run_to_end(sampler)
    sampler.add(request())
    assert isinstance(run_to_end(sampler)["r"], SampleResult)


@pytest.mark.parametrize("options", [{}, {"slots": 3}, {"kv_tokens": 3 * BLOCK_TOKENS}])
def test_what_is_told_of_a_sample_under_way_is_the_beginning_of_its_result(sampled_model, adapters, options):
    requests = [
        request(f"r{i}", length=5 + 9 * i, seed=i, num_samples=3, max_tokens=40, adapter=adapter, **fields)
        for i, (adapter, fields) in enumerate(
            [
                (None, {"stop_token_ids": NO_STOP}),
                (adapters[1], {"topk_sample_logprobs": 3}),
                (None, {"stop_token_ids": NO_STOP, "topk_sample_logprobs": 1, "temperature": 0.5}),
                (adapters[2], {"temperature": 0.0}),
            ]
        )
    ]

    ended, told = run_and_follow(SteppedTorchSampler(sampled_model, **{"slots": 8, **options}), requests)

    for key, samples in told.items():
        for sample, tokens in enumerate(samples):
            assert tokens == beginning_of(ended[key], sample, len(tokens))
    # The last token comes with the result, and so does all of a sample that ran as the last of its request.
    assert all(len(told[key][0]) == 39 or len(told[key][0]) == 40 for key in ("r0", "r2"))


def test_nothing_is_told_of_a_request_that_is_unknown_or_waits(sampled_model):
    sampler = SteppedTorchSampler(sampled_model, slots=1)
    for key in ("first", "second"):
        sampler.add(request(key))
    sampler.step()

    assert sampler.drawn_so_far("second", [0]) == sampler.drawn_so_far("nobody's", [0]) == []
    assert len(sampler.drawn_so_far("first", [0])) == 1
