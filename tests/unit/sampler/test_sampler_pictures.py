"""Pictures in prompts: greedy tokens of transformers' generate, bits alone as in company, prefixes by content."""

import functools
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from harness.picture_files import picture_file
from harness.pictures import IMAGE_TOKEN, image_processor, picture_prompt, save_picture_model
from twinkle.core.errors import InvalidInput
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.module.lora import LoraConfig
from twinkle.module.recurrence import CHUNK_TOKENS
from twinkle.sampler import SampleRequest, SteppedTorchSampler

from .conftest import run_to_end

NEW_TOKENS = 12
SIZES = ((40, 40), (9, 33))


@pytest.fixture(scope="module", params=["qwen3-vl", "qwen3.5", "kimi-k2.5"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return save_picture_model(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def model(folder):
    return FusedLoraModel.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def adapter(model):
    made = model.create_adapter(LoraConfig(rank=4, seed=1))
    made.params.add_(torch.randn(made.params.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    made.publish()
    return made


@pytest.fixture(scope="module")
def asked(family):
    return functools.partial(request_of, family)


def request_of(family, number, adapter=None, *, sizes=SIZES, **settings):
    tokens, pictures = picture_prompt(number, sizes=sizes, family=family)
    return SampleRequest(
        **{
            "key": str(number),
            "adapter": adapter,
            "prompt": tuple(tokens.tolist()),
            "pictures": pictures,
            "seed": number,
            "temperature": 0.0,
            "max_tokens": NEW_TOKENS,
            "stop_token_ids": frozenset(),
            **settings,
        }
    )


def chunk_tokens(model):
    """Small, but a state can be copied only where the recurrence is cut."""
    return CHUNK_TOKENS if model.remembers else 16


def run(model, requests, **options):
    sampler = SteppedTorchSampler(model, **{"slots": 32, "chunk_tokens": chunk_tokens(model), **options})
    for request in requests:
        sampler.add(request)
    return run_to_end(sampler)


def test_greedy_tokens_are_those_that_transformers_generates(model, folder, family, asked):
    plain = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    request = asked(1)
    ended = run(model, [request])

    tokens = torch.tensor([request.prompt])
    images = [Image.open(io.BytesIO(picture.content)) for picture in request.pictures]
    made = image_processor(family)(images=images, return_tensors="np")
    with torch.no_grad():
        theirs = plain.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **({} if family == "kimi-k2.5" else {"mm_token_type_ids": (tokens == IMAGE_TOKEN).int()}),
            **{name: torch.as_tensor(values) for name, values in made.items()},
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert ended["1"].sequences[0].tokens.tolist() == theirs[0, tokens.shape[1] :].tolist()


def test_tokens_and_scores_have_the_same_bits_alone_and_among_others(model, adapter, asked):
    mine = asked(1, adapter, temperature=1.0, num_samples=2, prompt_logprobs=True)
    text = asked(2, sizes=(), max_tokens=30)
    others = [text, asked(3, adapter, temperature=1.0, sizes=((64, 8),)), asked(4, None)]

    alone = run(model, [mine])["1"]
    fused = run(model, [*others, mine])["1"]

    assert np.array_equal(fused.prompt_logprobs, alone.prompt_logprobs, equal_nan=True)
    for found, expected in zip(fused.sequences, alone.sequences, strict=True):
        assert np.array_equal(found.tokens, expected.tokens)
        assert np.array_equal(found.logprobs, expected.logprobs)


def test_what_is_sampled_after_pictures_has_the_logprobs_that_training_gives_it(model, adapter, asked):
    request = asked(5, adapter, temperature=1.0)
    (sequence,) = run(model, [request])["5"].sequences

    tokens = np.array([*request.prompt, *sequence.tokens.tolist()])
    targets = np.where(tokens[1:] == IMAGE_TOKEN, 0, tokens[1:])
    datum = Datum(
        tokens[:-1], {"target_tokens": targets, "weights": np.zeros(len(targets), np.float32)}, request.pictures
    )
    (outcome,) = model.forward_backward([TrainJob(adapter, (datum,), "cross_entropy", backward=False)])

    np.testing.assert_allclose(sequence.logprobs, outcome.logprobs[0][-NEW_TOKENS:], atol=2e-5)


@pytest.mark.parametrize("settings", [{}, {"temperature": 3.0}, {"temperature": 1.0, "top_k": 3}], ids=str)
def test_the_places_of_pictures_and_films_are_never_drawn_however_likely_they_are(model, settings, monkeypatch, asked):
    request = asked(9, sizes=(), num_samples=4, prompt_alt_tokens_k=2, **settings)
    plain = run(model, [request])["9"]
    likely = {int(token) for sequence in plain.sequences for token in sequence.tokens} - set(request.prompt)
    assert likely
    # The model's favourites in the role of placeholders: they win wherever nothing bars them.
    rules = replace(model.picture_rules, other_token_ids=(*model.picture_rules.other_token_ids, *likely))
    monkeypatch.setattr(type(model), "picture_rules", rules)
    barred = run(model, [request])["9"]

    for sequence in barred.sequences:
        assert not set(sequence.tokens.tolist()) & set(rules.all_tokens)
        assert np.isfinite(sequence.logprobs).all()
    assert not set(barred.prompt_alt_tokens.token_ids.ravel().tolist()) & set(rules.all_tokens)


def test_a_prompt_is_shared_with_the_same_picture_and_not_with_another_of_its_size(model, asked):
    first = asked(6)
    again = replace(first, key="again")
    pictures = (replace(first.pictures[0], content=picture_file(999, width=40, height=40)), first.pictures[1])
    other = replace(first, key="other", pictures=pictures)
    sampler = SteppedTorchSampler(model, slots=4, chunk_tokens=chunk_tokens(model))

    ended = {}
    for request in (first, again, other):
        sampler.add(request)
        ended |= run_to_end(sampler)

    assert ended["again"].num_cached_tokens == len(first.prompt)
    # The words before the first picture end in the chunk that it begins in.
    assert ended["other"].num_cached_tokens == 0
    assert ended["other"].sequences[0].logprobs.tolist() == run(model, [other])["other"].sequences[0].logprobs.tolist()
    assert ended["other"].sequences[0].logprobs.tolist() != ended["again"].sequences[0].logprobs.tolist()


def test_prompts_that_cannot_be_are_refused_when_they_are_added(model, asked):
    request = asked(7)
    broken = replace(request.pictures[0], content=request.pictures[0].content[:60])
    for wrong, reason in (
        (replace(request, pictures=()), "tokens 300 that stand for pictures, but 0 pictures"),
        (replace(request, pictures=(broken, request.pictures[1])), "cannot be decoded"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            SteppedTorchSampler(model, slots=4).add(wrong)
