"""Rows become batches, and arguments become components."""

from typing import Any

import numpy as np
import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import LOSSES, CrossEntropyLoss, Loss
from twinkle.model.optimizers import create_optimizer
from twinkle.plugin.construct import construct_class
from twinkle.processor import InputProcessor

ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "labels": [6, 7, -100], "messages": ["x"], "user_data": {}},
    {"input_ids": np.array([8, 9]), "labels": torch.tensor([9, -100])},
]


def test_rows_are_padded_each_field_with_its_own_value() -> None:
    batch = InputProcessor()(ROWS)
    assert batch.model_inputs["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.model_inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2], [0, 1, -1]]
    assert batch.labels is not None and batch.labels.tolist() == [[6, 7, -100], [9, -100, -100]]
    assert set(batch.model_inputs) == {"input_ids", "attention_mask", "position_ids"}


def test_padding_may_be_on_the_left() -> None:
    batch = InputProcessor(padding_side="left")(ROWS)
    assert batch.model_inputs["input_ids"].tolist() == [[5, 6, 7], [0, 8, 9]]
    assert batch.labels is not None and batch.labels.tolist() == [[6, 7, -100], [-100, 9, -100]]
    values = torch.arange(6).reshape(2, 3)
    assert batch.last_positions(values).tolist() == [2, 5]


def test_without_padding_all_rows_lie_in_one_and_come_apart_again() -> None:
    batch = InputProcessor(padding_free=True)(ROWS)
    assert batch.model_inputs["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert "attention_mask" not in batch.model_inputs
    assert batch.unpack(torch.arange(1, 6)[None]).tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch.last_positions(torch.arange(1, 6)[None]).tolist() == [3, 5]
    assert batch.labels is not None and batch.labels.tolist() == [[6, 7, -100], [9, -100, -100]]


def test_a_packed_row_is_several_sequences_and_masked_tokens_are_none() -> None:
    packed = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1], "labels": [6, -100, 8, -100]}
    padded = {"input_ids": [0, 3, 4], "attention_mask": [0, 1, 1], "labels": [-100, 4, -100]}
    sequences = InputProcessor().sequences([packed, padded])
    assert [sequence.input_ids.tolist() for sequence in sequences] == [[5, 6], [7, 8], [3, 4]]
    assert [sequence.labels.tolist() for sequence in sequences if sequence.labels is not None] == [
        [6, -100],
        [8, -100],
        [4, -100],
    ]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "is empty"),
        ([{"messages": []}], r"inputs\[0\]\.input_ids: is missing"),
        ([{"input_ids": []}], "send at least one token"),
        ([{"input_ids": [1.5]}], "send integers"),
        ([{"input_ids": [[1], [2]]}], "has shape"),
        ([{"input_ids": [1, 2], "position_ids": [0]}], "position_ids: has 1 values for 2"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], "1 of 2 rows have labels"),
    ],
)
def test_rows_that_make_no_batch_are_refused(rows: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        InputProcessor()(rows)


def test_a_component_comes_as_an_object_a_class_a_name_or_a_function() -> None:
    def make(value: object, **settings: Any) -> Loss:
        return construct_class("loss_cls", value, Loss, LOSSES, **settings)  # type: ignore[type-abstract]

    ready = CrossEntropyLoss()
    assert make(ready) is ready
    assert isinstance(make(CrossEntropyLoss, reduction="sum"), CrossEntropyLoss)
    assert make("cross_entropy", reduction="sum").reduction == "sum"  # type: ignore[attr-defined]
    for value, problem in (
        (3, "is 3; send a Loss"),
        (print, "send a Loss"),
        (dict, "send a Loss"),
        ("hf://org/repo", "names no revision"),
        ("hf://org/repo@v1", "runs only when the operator says so"),
        ("gpro", "did you mean"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            make(value)
    with pytest.raises(InvalidInput, match="too late"):
        make(ready, reduction="sum")


def test_vectors_do_not_decay() -> None:
    parameters = {"w": torch.nn.Parameter(torch.ones(2, 2)), "b": torch.nn.Parameter(torch.ones(2))}
    optimizer = create_optimizer("AdamW", parameters, lr=0.1, weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    with pytest.raises(InvalidInput, match="did you mean AdamW"):
        create_optimizer("AdmW", parameters)
