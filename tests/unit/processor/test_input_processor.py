"""Rows become what a model takes: padded, packed, with pictures, or made by a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from harness.models import make_text_model
from harness.pictures import (
    IMAGE_TOKEN,
    MERGE_SIZE,
    VISION_END,
    VISION_START,
    image_processor,
    num_tokens,
    save_picture_model,
)
from twinkle.core.errors import InvalidInput
from twinkle.model import TransformersModel
from twinkle.module.mrope import PictureSpan, mrope_positions
from twinkle.processor import InputProcessor


def text_row(*tokens: int) -> dict[str, Any]:
    return {"input_ids": list(tokens), "labels": [*tokens[1:], -100], "messages": [{"role": "user"}], "length": 9}


def picture_row(seed: int, sizes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """As a template encodes it."""
    rng = np.random.default_rng(seed)
    images = [Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes]
    made = image_processor()(images, return_tensors="np")
    tokens: list[int] = [5, 6]
    spans = []
    for (width, height), grid in zip(sizes, made["image_grid_thw"].tolist(), strict=True):
        tokens.append(VISION_START)
        spans.append(PictureSpan(len(tokens), grid[1] // MERGE_SIZE, grid[2] // MERGE_SIZE))
        tokens += [IMAGE_TOKEN] * num_tokens(width, height) + [VISION_END, 7, 8]
    return {
        "input_ids": np.array(tokens),
        "labels": np.array([*tokens[1:], -100]),
        "position_ids": mrope_positions(len(tokens), spans)[0],
        "pixel_values": made["pixel_values"],
        "image_grid_thw": made["image_grid_thw"],
        "mm_token_type_ids": (np.array(tokens) == IMAGE_TOKEN).astype(np.int64),
    }


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_are_padded_and_other_fields_ignored(side: Any) -> None:
    batch = InputProcessor(padding_side=side)([text_row(1, 2, 3), text_row(4, 5)])

    assert set(batch.model_inputs) == {"input_ids", "position_ids", "attention_mask"}
    second = {"right": [4, 5, 0], "left": [0, 4, 5]}[side]
    assert batch.model_inputs["input_ids"].tolist() == [[1, 2, 3], second]
    assert batch.model_inputs["position_ids"][1].tolist() == {"right": [0, 1, -1], "left": [-1, 0, 1]}[side]
    assert batch.labels is not None
    assert batch.labels[1].tolist() == {"right": [5, -100, -100], "left": [-100, 5, -100]}[side]


def test_a_packed_row_and_rows_without_padding_are_unpacked_for_the_loss() -> None:
    packed = {"input_ids": [1, 2, 3, 4, 5], "labels": [2, 3, -100, 5, -100], "position_ids": [0, 1, 2, 0, 1]}

    batch = InputProcessor(padding_free=True)([packed, text_row(6, 7)])

    assert batch.model_inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch.unpack(batch.model_inputs["input_ids"]).tolist() == [[1, 2, 3], [4, 5, 0], [6, 7, 0]]
    assert batch.labels is not None and batch.labels.tolist() == [[2, 3, -100], [5, -100, -100], [7, -100, -100]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_text_are_filled_up_beside_rows_with_pictures(side: Any) -> None:
    one, two = picture_row(1, ((24, 16),)), picture_row(2, ((16, 16), (32, 16)))

    batch = InputProcessor(padding_side=side)([one, text_row(1, 2, 3), two]).model_inputs

    longest = len(two["input_ids"])
    assert batch["pixel_values"].shape[0] == len(one["pixel_values"]) + len(two["pixel_values"])
    assert batch["image_grid_thw"].tolist() == [*one["image_grid_thw"].tolist(), *two["image_grid_thw"].tolist()]
    assert batch["mm_token_type_ids"].shape == (3, longest) and int(batch["mm_token_type_ids"][1].sum()) == 0
    assert torch.equal(batch["mm_token_type_ids"].bool(), batch["input_ids"] == IMAGE_TOKEN)
    assert batch["position_ids"].shape == (3, 3, longest)
    kept = batch["attention_mask"].bool()
    assert batch["position_ids"][:, 0, kept[0]].tolist() == one["position_ids"].tolist()
    assert batch["position_ids"][:, 1, kept[1]].tolist() == [[0, 1, 2]] * 3


def test_pictures_of_other_sizes_and_kinds_are_filled_up() -> None:
    def row(num_patches: int) -> dict[str, Any]:
        return {
            "input_ids": [1, 2],
            "pixel_values": np.ones((1, num_patches, 4), np.float32),
            "image_position_ids": np.ones((1, num_patches, 2), np.int64),
        }

    batch = InputProcessor()([row(3), row(5)]).model_inputs

    assert batch["pixel_values"].shape == (2, 5, 4) and float(batch["pixel_values"][0, 3:].abs().sum()) == 0
    assert batch["image_position_ids"].shape == (2, 5, 2) and batch["image_position_ids"][0, 3:].unique().tolist() == [
        -1
    ]
    assert batch["position_ids"].tolist() == [[0, 1], [0, 1]]


def test_a_function_makes_other_rows_or_a_padded_batch() -> None:
    def doubled(rows: Any) -> Any:
        return [{**row, "input_ids": row["input_ids"] * 2, "labels": row["labels"] * 2} for row in rows]

    def padded(rows: Any) -> Any:
        return {
            "input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        }

    assert InputProcessor(function=doubled)([text_row(1, 2)]).model_inputs["input_ids"].tolist() == [[1, 2, 1, 2]]
    batch = InputProcessor(function=padded, padding_free=True)([text_row(1)])
    assert batch.model_inputs["input_ids"].tolist() == [[1, 2, 3, 4]] and batch.lengths == (3, 1)
    with pytest.raises(InvalidInput, match="function: gave a dict of labels; give input_ids"):
        InputProcessor(function=lambda rows: {"labels": [1]})([text_row(1)])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"position_ids": np.zeros((3, 2), np.int64)}, "inputs[0].position_ids: has shape (3, 2); send 3 integers"),
        ({"mm_token_type_ids": [0]}, "inputs[0].mm_token_type_ids: has 1 values for"),
        ({"image_grid_thw": None}, "inputs[0].image_grid_thw: is missing; send it with pixel_values"),
        ({"pixel_values": np.zeros((3, 4), np.float32)}, "inputs[0].pixel_values: has shape (3, 4); send a row for"),
        ({"pixel_values": "no"}, "inputs[0].pixel_values: must be a list, an array or a tensor"),
        ({"input_features": [[0.5]]}, "inputs[0].input_features: is sound, which no model here takes"),
    ],
)
def test_what_does_not_fit_a_picture_is_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        InputProcessor()([{**picture_row(1, ((24, 16),)), **change}])

    assert str(caught.value).startswith(told)


def test_a_model_with_a_tower_trains_on_mixed_rows_as_transformers_alone_sees_them(tmp_path: Path) -> None:
    folder = save_picture_model(tmp_path)
    row = picture_row(3, ((24, 16), (16, 16)))
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = whole(
            input_ids=torch.tensor(row["input_ids"])[None],
            pixel_values=torch.tensor(row["pixel_values"]),
            image_grid_thw=torch.tensor(row["image_grid_thw"]),
            mm_token_type_ids=torch.tensor(row["mm_token_type_ids"])[None],
        ).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(row["labels"]).clamp(min=0)[:, None])[:-1, 0]
    model = TransformersModel(model_id=str(folder), model_cls="AutoModelForImageTextToText", mixed_precision="no")

    out = model.forward_only(inputs=[text_row(1, 2, 3), row])

    torch.testing.assert_close(out["logps"][1][: len(expected)], expected, atol=1e-5, rtol=1e-4)
    other = {**row, "pixel_values": -np.asarray(row["pixel_values"])}
    one, two, three = model.forward_only(inputs=[row, other, text_row(1, 2, 3)], task="embedding")["embeddings"]
    assert not torch.allclose(one, two) and one.shape == three.shape
    model.set_optimizer("AdamW", lr=1e-3)
    losses = []
    for _ in range(3):
        losses.append(model.forward_backward(inputs=[text_row(1, 2, 3), row])["loss"])
        model.clip_grad_and_step()
    assert losses[-1] < losses[0]


def test_a_model_for_text_alone_says_which_class_takes_pictures(tmp_path: Path) -> None:
    model = TransformersModel(model_id=str(make_text_model(tmp_path / "model")), mixed_precision="no")

    with pytest.raises(InvalidInput, match="have pixel_values, but the model was loaded for text alone; name its"):
        model.forward_only(inputs=[picture_row(1, ((24, 16),))])


def test_a_model_takes_a_function_as_its_processor(tmp_path: Path) -> None:
    model = TransformersModel(model_id=str(make_text_model(tmp_path / "model")), mixed_precision="no")

    model.set_processor(lambda rows: [{**row, "input_ids": row["input_ids"][:2], "labels": [5, -100]} for row in rows])

    assert model.forward_only(inputs=[text_row(1, 2, 3)])["logps"].shape == (1, 2)
