"""Rows that a model cannot have are refused by name, before a device ends the process for them or trains on padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest

from twinkle.core.errors import InvalidInput
from twinkle.model import MultiLoraTransformersModel, TransformersModel

ROW = {"input_ids": [5, 6, 7], "labels": [6, 7, -100]}


@pytest.fixture(scope="module", params=["plain", "fused"])
def model(request: pytest.FixtureRequest, model_dir: Path) -> Any:
    make: Any = {"plain": TransformersModel, "fused": MultiLoraTransformersModel}[request.param]
    made = make(model_id=str(model_dir), mixed_precision="no")
    made.add_adapter_to_model("default", peft.LoraConfig(r=2, target_modules="all-linear"))
    return made


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (None, "inputs: is None; send a list of rows"),
        ([{**ROW, "input_ids": [5, 6, 10**6]}], "1000000"),
        ([{**ROW, "input_ids": [5, 6, -100]}], "-100"),
        ([{**ROW, "labels": [6, 10**6, -100]}], "1000000"),
        ([ROW, {"input_ids": [8, 9], "labels": [9, 5, -100]}], "labels"),
    ],
    ids=["none", "a token of another model", "a label as a token", "a label of another model", "labels of another row"],
)
def test_what_is_wrong_with_rows_is_told(model: Any, rows: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        model.forward_backward(inputs=rows, adapter_name="default")

    assert model.forward_only(inputs=[ROW], adapter_name="default").logps.shape == (1, 3)


def test_labels_that_stand_for_rows_are_not_those_of_tokens(model: Any) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [1]}, {"input_ids": [8, 9], "labels": [0]}]

    output = model.forward_only(inputs=rows, task="embedding", adapter_name="default")

    assert output.embeddings.shape[0] == 2


@pytest.mark.parametrize("interval", [0, -1])
def test_a_checkpoint_every_no_steps_is_refused(model: Any, tmp_path: Path, interval: int) -> None:
    with pytest.raises(InvalidInput, match=f"interval: is {interval}; send 1 or more"):
        model.save("x", output_dir=str(tmp_path), interval=interval, adapter_name="default")
