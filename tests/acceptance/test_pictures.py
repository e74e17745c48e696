"""A vision-language model behind the whole stack, through the official SDK."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch
from PIL import Image

import twinkle.client
from harness.picture_files import picture_file
from harness.pictures import IMAGE_TOKEN, VISION_END, VISION_START, image_processor, num_tokens, save_picture_model
from harness.served import Served
from twinkle.core.errors import UserError
from twinkle_client import TwinkleClient
from twinkle_client.sampler import vLLMSampler

WIDTH = HEIGHT = 64
LENGTH = num_tokens(WIDTH, HEIGHT)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = save_picture_model(tmp_path_factory.mktemp("models") / "some" / "pictures")
    with Served(tmp_path_factory.mktemp("pictures") / "home", model=str(model), model_name="pictures") as it:
        yield it


def prompt_of(*pictures: bytes, expected: int | None = LENGTH) -> tinker.ModelInput:
    chunks: list[tinker.ModelInputChunk] = []
    for picture in pictures:
        chunks.append(tinker.EncodedTextChunk(tokens=[5, 6, VISION_START]))
        chunks.append(tinker.types.ImageChunk(data=picture, format="png", expected_tokens=expected))
        chunks.append(tinker.EncodedTextChunk(tokens=[VISION_END, 7, 8]))
    return tinker.ModelInput(chunks=chunks)


def datum_of(picture: bytes, target: int) -> tinker.Datum:
    prompt = prompt_of(picture)
    weights = np.zeros(prompt.length, np.float32)
    weights[-1] = 1.0
    return tinker.Datum(
        model_input=prompt,
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_torch(torch.full((prompt.length,), target)),
            "weights": tinker.TensorData.from_numpy(weights),
        },
    )


def test_a_run_learns_to_tell_two_pictures_apart_and_samples_what_it_learnt(served: Served) -> None:
    red, blue = picture_file(1, width=WIDTH, height=HEIGHT), picture_file(2, width=WIDTH, height=HEIGHT)
    run = served.client("pictures").create_lora_training_client(base_model="pictures", rank=8, seed=1).result()
    data = [datum_of(red, 11), datum_of(blue, 22)]
    for _ in range(12):
        run.forward_backward(data, "cross_entropy")
        run.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    outputs = run.forward(data, "cross_entropy").result().loss_fn_outputs
    sampler = run.save_weights_and_get_sampling_client().result()
    greedy = tinker.SamplingParams(max_tokens=1, temperature=0.0)
    drawn = [sampler.sample(prompt_of(picture), 1, greedy).result().sequences[0] for picture in (red, blue)]

    assert [sequence.tokens for sequence in drawn] == [[11], [22]]
    for sequence, output in zip(drawn, outputs, strict=True):
        assert sequence.logprobs == pytest.approx([output["logprobs"].data[-1]], abs=1e-4)


def test_patches_of_a_clients_processor_are_trained_on_as_the_file_they_were_made_of(served: Served) -> None:
    picture = picture_file(4, width=WIDTH, height=HEIGHT)
    made = image_processor()([Image.open(io.BytesIO(picture))], return_tensors="np")
    by_file = datum_of(picture, 11)
    tokens = [5, 6, VISION_START, *[IMAGE_TOKEN] * LENGTH, VISION_END, 7, 8]
    patches = {name: tinker.TensorData.from_numpy(made[name]) for name in ("pixel_values", "image_grid_thw")}
    by_patches = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs={**by_file.loss_fn_inputs, **patches}
    )
    narrow = {**patches, "pixel_values": tinker.TensorData.from_numpy(made["pixel_values"][:, :-1])}
    wrong = tinker.Datum(model_input=by_patches.model_input, loss_fn_inputs={**by_file.loss_fn_inputs, **narrow})
    run = served.client("patches").create_lora_training_client(base_model="pictures", rank=8, seed=1).result()

    outputs = run.forward([by_file, by_patches], "cross_entropy").result().loss_fn_outputs

    assert outputs[0]["logprobs"].data == outputs[1]["logprobs"].data
    with pytest.raises(tinker.RequestFailedError, match=r"pixel_values: has \(95,\) values for a patch"):
        run.forward([wrong], "cross_entropy").result()


def test_rows_of_patches_are_sampled_in_the_other_dialect_as_the_file_they_were_made_of(served: Served) -> None:
    picture = picture_file(6, width=WIDTH, height=HEIGHT)
    made = image_processor()([Image.open(io.BytesIO(picture))], return_tensors="np")
    row = {
        "input_ids": [5, 6, VISION_START, *[IMAGE_TOKEN] * LENGTH, VISION_END, 7, 8],
        **{name: made[name] for name in ("pixel_values", "image_grid_thw")},
    }
    narrow = {**row, "pixel_values": made["pixel_values"][:, :-1]}
    greedy = {"max_tokens": 2, "temperature": 0.0}
    by_file = (
        served.client("patches-in-rows")
        .create_sampling_client(base_model="pictures")
        .sample(prompt_of(picture), 1, tinker.SamplingParams(**greedy))
    ).result()

    with TwinkleClient(served.url, served.create_key("patches-in-rows")) as client:
        sampler = vLLMSampler("pictures", connection=client.connection)
        (response,) = sampler.sample([row], sampling_params=greedy)
        with pytest.raises(UserError, match=r"pixel_values: has \(95,\) values for a patch"):
            sampler.sample([narrow], sampling_params=greedy)

    assert response.sequences[0].tokens == by_file.sequences[0].tokens
    assert response.sequences[0].new_input_feature["pixel_values"] == made["pixel_values"].tolist()


def test_the_native_client_sends_pictures_among_tokens_as_the_sdk_does(served: Served) -> None:
    picture = picture_file(5, width=WIDTH, height=HEIGHT)
    pieces = [[5, 6, VISION_START], twinkle.client.Picture(picture, LENGTH), [VISION_END, 7, 8]]
    length = LENGTH + 6
    run = served.client("natively").create_lora_training_client(base_model="pictures", rank=8, seed=1).result()
    datum = datum_of(picture, 11)
    theirs = run.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    params = tinker.SamplingParams(max_tokens=4, temperature=0.0)
    sampler = served.client("natively").create_sampling_client(base_model="pictures")
    (expected,) = sampler.sample(prompt_of(picture), 1, params).result().sequences

    with twinkle.client.Client(served.url, served.create_key("native")) as client:
        ours = client.create_run("pictures", rank=8, seed=1)
        own = twinkle.client.Datum(pieces, {"target_tokens": [11] * length, "weights": np.ones(length)})
        (logprobs,) = ours.forward([own], "cross_entropy").result(timeout=120).logprobs
        native = client.sampler(base_model="pictures")
        (drawn,) = native.sample(pieces, max_tokens=4, temperature=0.0).result(timeout=120).sequences

    assert logprobs.tolist() == theirs
    assert list(drawn.tokens) == list(expected.tokens)


def test_what_the_model_would_count_otherwise_fails_before_anything_is_computed(served: Served) -> None:
    run = served.client("others").create_lora_training_client(base_model="pictures", rank=8).result()
    wrong = tinker.Datum(
        model_input=prompt_of(picture_file(3, width=WIDTH, height=HEIGHT), expected=LENGTH + 1),
        loss_fn_inputs={"target_tokens": [0] * (LENGTH + 7), "weights": [0.0] * (LENGTH + 7)},
    )
    with pytest.raises(tinker.RequestFailedError, match=f"is {LENGTH + 1}, but this model makes {LENGTH}"):
        run.forward([wrong], "cross_entropy").result()
