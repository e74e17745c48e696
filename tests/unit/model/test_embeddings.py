"""Training embeddings on the fused engine, against transformers and PEFT as they are."""

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch

from harness.training import Row, gradients, make_rows, randomize
from twinkle.core.errors import BatchTooLong, InvalidInput
from twinkle.model import MultiLoraTransformersModel, TransformersModel

MakeConfig = Callable[..., peft.LoraConfig]


def pairs(seed: int) -> list[Row]:
    """Query, positive, query, positive, negative: ``labels`` are one number a row."""
    marks = [1, 0, 1, 0, 0]
    return [
        {"input_ids": row["input_ids"], "labels": [mark]}
        for row, mark in zip(make_rows(seed, (7, 4, 9, 5, 6)), marks, strict=True)
    ]


@pytest.fixture
def both(
    fused: MultiLoraTransformersModel, plain: TransformersModel, lora: MakeConfig
) -> tuple[MultiLoraTransformersModel, TransformersModel]:
    for model in (fused, plain):
        model.add_adapter_to_model("a", lora())
        model.set_loss("InfonceLoss", temperature=0.5)
    randomize(fused, "a")
    with torch.no_grad():
        for key, parameter in plain.group("a").parameters.items():
            parameter.copy_(fused.get_state_dict()[key])
    return fused, plain


def test_embeddings_loss_and_gradient_are_those_of_the_plain_model(
    both: tuple[MultiLoraTransformersModel, TransformersModel],
) -> None:
    fused, plain = both
    ours = fused.forward_backward(inputs=pairs(0), task="embedding")
    theirs = plain.forward_backward(inputs=pairs(0), task="embedding")
    torch.testing.assert_close(ours["embeddings"], theirs["embeddings"], atol=1e-4, rtol=1e-4)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    expected = gradients(plain)
    for name, gradient in gradients(fused).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3)
    base = fused.forward_only(inputs=pairs(0), task="embedding", disable_lora=True)["embeddings"]
    plain_base = plain.forward_only(inputs=pairs(0), task="embedding", disable_lora=True)["embeddings"]
    torch.testing.assert_close(base, plain_base, atol=1e-4, rtol=1e-4)


def test_queries_come_nearer_to_what_belongs_to_them(fused: MultiLoraTransformersModel, lora: MakeConfig) -> None:
    fused.add_adapter_to_model("a", lora())
    fused.set_loss("InfonceLoss")
    fused.set_optimizer("AdamW", lr=1e-2)
    fused.add_metric("EmbeddingMetric", is_training=True)
    losses = []
    for _ in range(8):
        fused.forward(inputs=pairs(0), task="embedding")
        losses.append(fused.calculate_loss())
        fused.backward()
        fused.clip_grad_and_step()
    results = fused.calculate_metric(is_training=True)
    assert losses[-1] < losses[0] and {"pos_sim", "neg_sim", "loss", "grad_norm", "iters"} <= set(results)


def test_passes_of_few_tokens_and_company_change_no_bit(
    model_dir: Path, fused: MultiLoraTransformersModel, lora: MakeConfig
) -> None:
    small = MultiLoraTransformersModel(
        model_id=str(model_dir), max_loras=1, max_r=8, max_length=200, tokens_per_pass=10
    )
    for model in (fused, small):
        model.add_adapter_to_model("a", lora())
        randomize(model, "a")
        model.set_loss("InfonceLoss")
    whole = fused.forward_backward(inputs=pairs(1), task="embedding")
    parts = small.forward_backward(inputs=pairs(1), task="embedding")
    assert torch.equal(parts["embeddings"], whole["embeddings"]) and parts["loss"] == whole["loss"]
    expected = gradients(fused)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(small).items())


def test_rows_that_cannot_be_embedded_are_refused(fused: MultiLoraTransformersModel, lora: MakeConfig) -> None:
    fused.add_adapter_to_model("a", lora())
    fused.set_loss("InfonceLoss")
    with pytest.raises(BatchTooLong, match="max_length is 200"):
        fused.forward(inputs=[{"input_ids": [1] * 201}], task="embedding")
    with pytest.raises(InvalidInput, match=r"inputs\[0\]\.input_ids"):
        fused.forward(inputs=[{"input_ids": [100000], "labels": [1]}], task="embedding")
    for media in ({"pixel_values_videos": [[0.5]]}, {"pixel_values": [[0.5]], "image_position_ids": [[[0, 0]]]}):
        name = next(iter(media))
        with pytest.raises(InvalidInput, match=rf"inputs\[0\]\.{name}: is a picture; this model embeds text"):
            fused.forward(inputs=[{"input_ids": [1], "labels": [1], **media}], task="embedding")
        with pytest.raises(InvalidInput, match=rf"inputs\[0\]\.{name}: is of a kind that this model does not take"):
            fused.forward(inputs=[{"input_ids": [1], "labels": [1], **media}])
    with pytest.raises(InvalidInput, match="1 of 2 rows have labels"):
        fused.forward(inputs=[{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], task="embedding")
