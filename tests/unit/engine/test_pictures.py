"""Pictures in training: logits and gradients as transformers and PEFT have them, bits alone as in any company."""

import io
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
import transformers
from PIL import Image

from harness.pictures import (
    IMAGE_TOKEN,
    PICTURE_FAMILIES,
    TEXT_TOKENS,
    VIDEO_TOKEN,
    image_processor,
    num_tokens,
    picture_prompt,
    save_picture_model,
)
from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.core.errors import InvalidInput, UserError
from twinkle.hub.image_processor import picture_rules
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.rows import job_of, open_pass
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.module.lora import LoraConfig
from twinkle.processor import InputProcessor

from .test_gradients import peft_gradients, randomize

SIZES = (((24, 16),), ((40, 40), (9, 33)), ((64, 8),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_picture_model(tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


def load(folder):
    return FusedLoraModel.from_pretrained(str(folder), tokens_per_pass=200)


@pytest.fixture(scope="module", params=PICTURE_FAMILIES)
def family(request, tmp_path_factory):
    """The name, the folder and the model of each kind."""
    folder = save_picture_model(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, folder, load(folder)


def datum_of(seed, *, sizes=((24, 16),), **prompt):
    tokens, pictures = picture_prompt(seed, sizes=sizes, **prompt)
    return with_losses(tokens, pictures, seed)


def text_datum(seed, length=23):
    return with_losses(np.random.default_rng(seed).integers(3, TEXT_TOKENS, length), (), seed)


def with_losses(tokens, pictures, seed):
    rng = np.random.default_rng(seed)
    inputs = {
        "target_tokens": rng.integers(3, TEXT_TOKENS, len(tokens)),
        "weights": rng.normal(size=len(tokens)).astype(np.float32),
    }
    return Datum(tokens, inputs, pictures)


def plain_logits(plain, datum, family):
    tokens = torch.tensor(datum.tokens)[None]
    if not datum.pictures:
        return plain(input_ids=tokens).logits[0]
    images = [Image.open(io.BytesIO(picture.content)) for picture in datum.pictures]
    return plain(
        input_ids=tokens,
        mm_token_type_ids=(tokens == IMAGE_TOKEN).int(),
        **tensors_of(image_processor(family)(images=images, return_tensors="np")),
    ).logits[0]


def tensors_of(made):
    return {name: torch.as_tensor(values) for name, values in made.items()}


def adapter_of(model, seed, **settings):
    adapter = model.create_adapter(LoraConfig(rank=4, seed=seed, **settings))
    randomize(adapter, seed)
    return adapter


def outcome_and_gradient(model, adapter, data):
    adapter.clear_gradients()
    (outcome,) = model.forward_backward([TrainJob(adapter, data, "cross_entropy")])
    return outcome, adapter.grad.clone()


def test_logprobs_and_gradients_are_those_of_transformers_and_peft(family, tmp_path):
    name, folder, model = family
    data = (*(datum_of(seed, sizes=sizes, family=name) for seed, sizes in enumerate(SIZES)), text_datum(9))
    adapter = adapter_of(model, 1)
    outcome, _ = outcome_and_gradient(model, adapter, data)
    for file, content in export_adapter(adapter, str(folder)).items():
        (tmp_path / file).write_bytes(content)
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    twin = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)

    loss = torch.zeros(())
    for datum, logprobs in zip(data, outcome.logprobs, strict=True):
        targets = torch.tensor(datum.inputs["target_tokens"])
        expected = torch.log_softmax(plain_logits(twin, datum, name), -1).gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=5e-5)
        loss = loss - (expected * torch.tensor(datum.inputs["weights"])).sum()
    loss.backward()

    assert not any("visual" in target.path or "vision" in target.path for target in model.pool.targets)
    for path, theirs in peft_gradients(twin, adapter).items():
        for ours, expected in zip(adapter.grad_views[path], theirs, strict=True):
            torch.testing.assert_close(ours, expected, atol=2e-4 * expected.abs().max().item(), rtol=1e-3)


def test_a_job_has_the_same_bits_alone_among_others_and_again_after_its_features_were_forgotten(family):
    name, _, model = family
    mine = (datum_of(1, sizes=SIZES[1], group="mine", family=name), text_datum(2))
    adapter, other = adapter_of(model, 1), adapter_of(model, 2)
    alone, gradient = outcome_and_gradient(model, adapter, mine)
    adapter.clear_gradients()

    beside = TrainJob(other, (text_datum(3), datum_of(4, sizes=SIZES[2], group="theirs", family=name)), "cross_entropy")
    _, fused = model.forward_backward([beside, TrainJob(adapter, mine, "cross_entropy")])
    fused_gradient = adapter.grad.clone()
    model.pictures.clear()
    again, gradient_again = outcome_and_gradient(model, adapter, mine)

    for outcome, found in ((fused, fused_gradient), (again, gradient_again)):
        assert torch.equal(found, gradient)
        for one, expected in zip(outcome.logprobs, alone.logprobs, strict=True):
            assert np.array_equal(one, expected)


def test_a_picture_is_computed_once_for_each_group_and_none_is_shared_between_groups(folder):
    model = FusedLoraModel.from_pretrained(str(folder))
    adapter = adapter_of(model, 1)
    mine, theirs = datum_of(1, group="mine"), datum_of(1, group="theirs")
    assert mine.pictures[0].content == theirs.pictures[0].content

    outcome_and_gradient(model, adapter, (mine, mine))
    outcome_and_gradient(model, adapter, (mine,))
    assert model.pictures.num_computed == 1

    outcome_and_gradient(model, adapter, (theirs,))
    assert model.pictures.num_computed == 2


def test_kept_features_stay_within_their_bytes(folder):
    model = FusedLoraModel.from_pretrained(str(folder), picture_cache_bytes=3 * 6 * 64 * 4)
    adapter = adapter_of(model, 1)
    for seed in (1, 2, 1):
        outcome_and_gradient(model, adapter, (datum_of(seed),))
    assert model.pictures.num_computed == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda datum: replace(datum, pictures=()), "tokens 300 that stand for pictures, but 0 pictures"),
        (
            lambda datum: replace(datum, tokens=np.where(datum.tokens == IMAGE_TOKEN, 299, datum.tokens)),
            "holds 0 tokens",
        ),
        (lambda datum: replace(datum, tokens=np.r_[datum.tokens[1:], VIDEO_TOKEN]), "stands for a film"),
        (
            lambda datum: replace(datum, pictures=(replace(datum.pictures[0], start=datum.pictures[0].start + 1),)),
            "at other places",
        ),
    ],
    ids=["tokens without a picture", "another model's token", "a film", "at another place"],
)
def test_picture_tokens_and_pictures_that_disagree_are_refused_before_anything_is_computed(model, change, reason):
    computed = model.pictures.num_computed
    adapter = adapter_of(model, 1)
    (refusal,) = model.forward_backward([TrainJob(adapter, (change(datum_of(70)),), "cross_entropy")])
    assert isinstance(refusal, InvalidInput)
    assert refusal.field == "data[0].model_input"
    assert reason in refusal.message
    assert model.pictures.num_computed == computed


def test_a_picture_that_cannot_be_decoded_ends_its_own_job_alone(model):
    broken = datum_of(5)
    broken = replace(broken, pictures=(replace(broken.pictures[0], content=broken.pictures[0].content[:60]),))
    adapter, other = adapter_of(model, 1), adapter_of(model, 2)
    expected, _ = outcome_and_gradient(model, other, (datum_of(6),))
    other.clear_gradients()

    refusal, outcome = model.forward_backward(
        [
            TrainJob(adapter, (text_datum(1), broken), "cross_entropy"),
            TrainJob(other, (datum_of(6),), "cross_entropy"),
        ]
    )

    assert isinstance(refusal, UserError)
    assert refusal.message.startswith("data[1].model_input: picture: cannot be decoded")
    assert not adapter.has_gradients
    assert np.array_equal(outcome.logprobs[0], expected.logprobs[0])


@pytest.mark.parametrize("family", ["qwen3-vl", "kimi-k2.5"])
def test_tokens_are_counted_as_the_image_processor_counts_them(family):
    rules = picture_rules(PICTURE_FAMILIES[family](), image_processor(family))
    for side in (8, 9, 12, 16, 33, 63, 64, 65, 100, 199):
        for other in (1, 4, 20, 28, 77, 150):
            assert rules.num_tokens(side, other) == num_tokens(side, other, family)
            assert rules.could_make(*rules.grid(side, other))


def test_a_config_without_an_end_of_text_makes_a_model_without_one(tmp_path):
    config = PICTURE_FAMILIES["qwen3-vl"]()
    del config.text_config.eos_token_id
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    assert FusedLoraModel.from_pretrained(str(tmp_path)).info.eos_token_ids == ()


def test_a_model_of_text_alone_refuses_a_picture(load_model):
    model = load_model("qwen3")
    (refusal,) = model.forward_backward([TrainJob(adapter_of(model, 1), (datum_of(1),), "cross_entropy")])
    assert isinstance(refusal, InvalidInput)
    assert refusal.message == "data[0].model_input: holds a picture, but this model takes text alone"


def test_rows_with_pixel_values_are_trained_as_their_files_are(model, folder):
    datum = datum_of(8, sizes=SIZES[1])
    expected, _ = outcome_and_gradient(model, adapter_of(model, 1, train_unembed=False), (datum,))
    images = [Image.open(io.BytesIO(picture.content)) for picture in datum.pictures]
    row = {
        "input_ids": datum.tokens,
        "labels": datum.inputs["target_tokens"],
        **image_processor()(images, return_tensors="np"),
    }
    settings = {"is_training": False, "max_length": 512, "picture_rules": model.picture_rules}
    opened = open_pass([row], InputProcessor(), {}, **settings)
    (outcome,) = model.forward_backward([job_of(opened, adapter_of(model, 1, train_unembed=False), None)])
    assert np.array_equal(outcome.logprobs[0], expected.logprobs[0])

    wrong = {**row, "input_ids": np.where(datum.tokens == IMAGE_TOKEN, 299, datum.tokens)}
    with pytest.raises(InvalidInput, match=r"inputs\[0\]\.input_ids: holds 0 tokens 300 .* makes"):
        open_pass([wrong], InputProcessor(), {}, **settings)
    with pytest.raises(InvalidInput, match=r"inputs\[0\]\.pixel_values: is a picture, but this model takes text"):
        open_pass([row], InputProcessor(), {}, **{**settings, "picture_rules": None})
    with pytest.raises(InvalidInput, match="padding_free: takes no pixel_values"):
        InputProcessor(padding_free=True)([row])
