"""A batch in parts: the same loss, outputs and gradients as at once, whatever the loss compares."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from harness.training import gradients, make_rows, randomize
from twinkle.core.errors import InvalidInput
from twinkle.model import MultiLoraTransformersModel, TransformersModel

MakeConfig = Callable[..., peft.LoraConfig]
LENGTHS = (7, 4, 9, 5, 6, 3)
ROWS = make_rows(0, LENGTHS)
SAMPLED = {"advantages": [1.0, -1.0, 0.5, 2.0, -0.5, 0.1], "old_logps": [[-5.0] * (length - 2) for length in LENGTHS]}
PAIRS = {"ref_logps": [[-5.5] * (length - 2) for length in LENGTHS]}
CASES: dict[str, dict[str, Any]] = {
    "CrossEntropyLoss": {},
    "GRPOLoss": SAMPLED,
    "BNPOLoss": SAMPLED,
    "DPOLoss": PAIRS,
    "SimPOLoss": {},
}


@pytest.fixture
def model(plain: TransformersModel, lora: MakeConfig) -> TransformersModel:
    plain.add_adapter_to_model("a", lora())
    randomize(plain, "a")
    return plain


def take(model: TransformersModel) -> dict[str, torch.Tensor]:
    found = gradients(model)
    model._clear_gradients(model.group(""))
    return found


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("loss", CASES)
def test_parts_have_the_gradient_of_the_whole_batch(model: TransformersModel, loss: str, size: int) -> None:
    model.set_loss(loss)
    whole = model.forward_backward(inputs=ROWS, **CASES[loss])
    expected = take(model)
    parts = model.forward_backward(inputs=ROWS, micro_batch_size=size, **CASES[loss])
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert parts["num_tokens"] == whole["num_tokens"]
    trained = model.group("").require_last("the test").inputs["labels"] != -100
    torch.testing.assert_close(parts["logps"][trained], whole["logps"][trained], atol=1e-5, rtol=1e-5)
    # Products of fewer rows are rounded in another order.
    for name, gradient in take(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def test_the_pieces_of_a_step_work_in_parts_too(model: TransformersModel) -> None:
    model.set_loss("GRPOLoss", entropy_coef=0.1)
    model.forward_backward(inputs=ROWS, **SAMPLED)
    expected = take(model)
    model.forward(inputs=ROWS, micro_batch_size=2)
    model.calculate_loss(**SAMPLED)
    model.backward()
    for name, gradient in take(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def test_embeddings_are_compared_across_parts(model: TransformersModel) -> None:
    model.set_loss("InfonceLoss")
    rows = [{"input_ids": row["input_ids"], "labels": [1 - index % 2]} for index, row in enumerate(ROWS)]
    whole = model.forward_backward(inputs=rows, task="embedding")
    expected = take(model)
    parts = model.forward_backward(inputs=rows, task="embedding", micro_batch_size=1)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    for name, gradient in take(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def test_a_part_is_run_again_with_the_dropout_of_its_first_run(plain: TransformersModel, lora: MakeConfig) -> None:
    plain.add_adapter_to_model("a", lora(lora_dropout=0.5))
    randomize(plain, "a")
    plain.set_loss("SimPOLoss")
    torch.manual_seed(3)
    first = plain.forward_backward(inputs=ROWS, micro_batch_size=2)
    once = take(plain)
    torch.manual_seed(3)
    plain.group("").loss.gamma = 0.5  # type: ignore[attr-defined]
    plain.forward(inputs=ROWS, micro_batch_size=2)
    torch.manual_seed(99)
    assert plain.calculate_loss() == first["loss"]
    plain.backward()
    assert all(torch.equal(gradient, once[name]) for name, gradient in take(plain).items())


def test_rows_padded_to_the_left_or_packed_are_joined_as_they_lie(model: TransformersModel) -> None:
    for settings in ({"padding_side": "left"}, {"padding_free": True}):
        model.set_processor("InputProcessor", **settings)
        whole = model.forward_only(inputs=ROWS)["logps"]
        parts = model.forward_only(inputs=ROWS, micro_batch_size=4)["logps"]
        labels = model.group("").require_last("the test").inputs["labels"]
        torch.testing.assert_close(parts[labels != -100], whole[labels != -100], atol=1e-5, rtol=1e-5)
        model.set_loss("GRPOLoss")
        model.forward_backward(inputs=ROWS, **SAMPLED)
        expected = take(model)
        model.forward_backward(inputs=ROWS, micro_batch_size=4, **SAMPLED)
        for name, gradient in take(model).items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def test_the_fused_model_cuts_by_tokens_and_takes_the_argument(
    fused: MultiLoraTransformersModel, lora: MakeConfig
) -> None:
    fused.add_adapter_to_model("a", lora())
    whole = fused.forward_backward(inputs=ROWS)
    assert fused.forward_backward(inputs=ROWS, micro_batch_size=1)["loss"] == whole["loss"]


def test_a_size_that_is_none_is_refused(model: TransformersModel) -> None:
    with pytest.raises(InvalidInput, match="micro_batch_size: is 0"):
        model.forward_backward(inputs=ROWS, micro_batch_size=0)
