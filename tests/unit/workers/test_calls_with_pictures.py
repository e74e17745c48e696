"""Rows with pictures, as an image processor leaves them, in calls: JSON in, the bits of the local class out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from PIL import Image

from harness.called_engine import Called
from harness.pictures import image_processor, picture_prompt, save_picture_model
from twinkle.core.errors import InvalidInput
from twinkle.core.settings import Settings
from twinkle.model import MultiLoraTransformersModel
from twinkle.workers.engines.transformers_engine import TransformersEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_picture_model(tmp_path_factory.mktemp("qwen3-vl"))


def _row(seed: int) -> dict[str, Any]:
    tokens, pictures = picture_prompt(seed, sizes=((24, 16), (40, 40)))
    images = [Image.open(io.BytesIO(picture.content)) for picture in pictures if isinstance(picture.content, bytes)]
    media = image_processor()(images, return_tensors="np")
    return {
        "input_ids": tokens.tolist(),
        "labels": [*(token if token < 300 else -100 for token in tokens[1:].tolist()), -100],
        **{name: values.tolist() for name, values in media.items()},
    }


def test_rows_with_pictures_train_by_calls_as_they_do_locally(folder: Path) -> None:
    engine = TransformersEngine.from_settings(Settings(model=str(folder), model_name="tiny", threads=1))
    local = MultiLoraTransformersModel(model_id=str(folder), max_r=4)
    local.add_adapter_to_model("x", peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    at_once, in_pieces = Called(engine), Called(engine, parks=True)
    local._adapters["x"].params.copy_(at_once.params)
    local._adapters["x"].publish()
    rows = [_row(1), _row(2)]

    told = at_once("forward_backward", inputs=rows)
    in_pieces("forward", inputs=rows)
    loss = in_pieces("calculate_loss")
    in_pieces("backward")
    output = local.forward_backward(inputs=rows)

    assert told["loss"] == loss == output["loss"]
    assert torch.equal(at_once.grad, in_pieces.grad)
    assert torch.equal(at_once.grad, local._adapters["x"].grad)
    assert at_once.grad.any()


def test_a_packed_row_with_pictures_trains_by_calls_as_its_members_do(folder: Path) -> None:
    engine = TransformersEngine.from_settings(Settings(model=str(folder), model_name="tiny", threads=1))
    alone, packed = Called(engine), Called(engine)
    rows = [_row(1), {"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, _row(2)]
    whole: dict[str, Any] = {name: [*rows[0][name], *rows[2][name]] for name in ("pixel_values", "image_grid_thw")}
    for name in ("input_ids", "labels"):
        whole[name] = [value for row in rows for value in row[name]]
    whole["member_lengths"] = [len(row["input_ids"]) for row in rows]
    whole["member_pictures"] = [2, 0, 2]

    expected = alone("forward_backward", inputs=rows)
    told = packed("forward_backward", inputs=[whole])

    assert told["loss"] == expected["loss"] and torch.equal(packed.grad, alone.grad) and alone.grad.any()
    with pytest.raises(InvalidInput, match="member_pictures"):
        packed("forward_backward", inputs=[{**whole, "member_pictures": [2, 1, 0]}])
