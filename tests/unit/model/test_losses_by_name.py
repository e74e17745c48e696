"""Every loss by its name, on both models, against plain PEFT and transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from harness.training import (
    Row,
    gradients,
    make_rows,
    randomize,
    reference_gradients,
    reference_logits,
    reference_logps,
    reference_model,
)
from twinkle.core.batch_loss import BATCH_LOSSES
from twinkle.core.errors import InvalidInput
from twinkle.loss import LOSSES, Loss, create_loss
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome

MakeConfig = Callable[..., peft.LoraConfig]

ADVANTAGES = [0.7, -1.1, 0.4, 2.0]
OLD_LOGPS = [[-5.0] * 5, [-5.5] * 2, [-4.9] * 7, [-5.2] * 3]
REF_LOGPS = [[-5.1] * 5, [-5.2] * 2, [-5.3] * 7, [-5.4] * 3]
POLICY = {"advantages": ADVANTAGES, "old_logps": OLD_LOGPS}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "CrossEntropyLoss": ({"reduction": "sum"}, {}),
    "cross_entropy": ({"dft": True}, {}),
    "ChunkedCrossEntropyLoss": ({"chunk_size": 3}, {}),
    "LigerFusedLinearCrossEntropyLoss": ({}, {}),
    "GRPOLoss": ({"epsilon": 0.2, "beta": 0.04}, {**POLICY, "ref_logps": REF_LOGPS}),
    "PPOLoss": ({"loss_agg_mode": "token-mean"}, POLICY),
    "GSPOLoss": ({}, POLICY),
    "SAPOLoss": ({}, POLICY),
    "CISPOLoss": ({}, POLICY),
    "BNPOLoss": ({}, POLICY),
    "DRGRPOLoss": ({"max_completion_length": 8}, POLICY),
    "DPOLoss": ({"beta": 0.5, "sft_weight": 0.1}, {"ref_logps": REF_LOGPS}),
    "SimPOLoss": ({}, {}),
    "CPOLoss": ({}, {}),
    "ORPOLoss": ({}, {}),
}
TOLERANCE = {"atol": 2e-6, "rtol": 2e-4}
"""Float32 sums in another order; the gradients are of the order of 0.01 to 1."""


def test_every_loss_that_takes_logps_is_among_the_cases() -> None:
    covered = {type(create_loss(name, **settings)) for name, (settings, _) in CASES.items()}
    others = {kind.__name__ for kind in LOSSES.values()} - {kind.__name__ for kind in covered}
    assert others == {"GKDLoss", "InfonceLoss", "MSELoss", "PPOValueLoss"}


@pytest.mark.parametrize("name", CASES)
def test_a_step_by_name_has_the_gradient_of_plain_peft(
    name: str,
    fused: MultiLoraTransformersModel,
    plain: TransformersModel,
    model_dir: Path,
    lora: MakeConfig,
    rows: list[Row],
) -> None:
    settings, kwargs = CASES[name]
    fused.add_adapter_to_model("a", lora())
    randomize(fused, "a")
    state = fused.get_state_dict(adapter_name="a")
    reference = reference_model(model_dir, lora(), state)
    logits, labels = reference_logits(reference, rows)
    loss: Loss = create_loss(name, **settings)
    expected = loss({"labels": labels}, {"logps": reference_logps(logits, labels), "logits": logits}, **kwargs)
    expected["loss"].backward()
    wanted = reference_gradients(reference)
    plain.add_adapter_to_model("a", lora())
    with torch.no_grad():
        for key, parameter in plain.group("a").parameters.items():
            parameter.copy_(state[key])
    for model in (fused, plain):
        model.set_loss(name, **settings)
        output = model.forward_backward(inputs=rows, **kwargs)
        assert output["loss"] == pytest.approx(float(expected["loss"].detach()), rel=1e-5, abs=1e-6)
        assert output["num_tokens"] == expected["num_tokens"]
        found = gradients(model)
        assert found.keys() == wanted.keys()
        assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-4
        for key, gradient in wanted.items():
            torch.testing.assert_close(found[key], gradient, **TOLERANCE)
        before = model.get_state_dict()
        model.set_optimizer("SGD", lr=0.1)
        model.clip_grad_and_step(max_grad_norm=1e9)
        after = model.get_state_dict()
        assert all(not torch.equal(after[key], before[key]) for key in after)


@pytest.mark.parametrize("name", sorted(BATCH_LOSSES.keys() & CASES.keys()))
def test_an_operation_with_that_loss_adds_the_gradient_that_a_script_has(
    name: str, fused: MultiLoraTransformersModel, lora: MakeConfig, rows: list[Row]
) -> None:
    settings, kwargs = CASES[name]
    fused.add_adapter_to_model("a", lora())
    randomize(fused, "a")
    fused.set_loss(name, **settings)
    output = fused.forward_backward(inputs=rows, **kwargs)
    wanted = gradients(fused)
    fused.zero_grad()

    job = TrainJob(
        fused._adapters["a"], tuple(datum_of(row, index, kwargs) for index, row in enumerate(rows)), name, settings
    )
    [outcome] = fused.core.forward_backward([job])

    assert isinstance(outcome, TrainOutcome)
    assert outcome.loss == pytest.approx(float(output["loss"]), rel=1e-6)
    for key, parameter in fused.group("a").parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted[key], **TOLERANCE)


def datum_of(row: Row, index: int, kwargs: dict[str, Any]) -> Datum:
    """A row as an operation brings it: a mask in place of labels that are ignored, a value a token or one for all."""
    labels = np.array(row["labels"])
    trained = labels != -100
    inputs = {"target_tokens": np.where(trained, labels, 0), "weights": trained.astype(np.float32)}
    for name, rows in kwargs.items():
        values = np.zeros(labels.shape, np.float32)
        values[trained] = rows[index]
        inputs[name] = values if isinstance(rows[index], list) else np.array([rows[index]], np.float32)
    return Datum(np.array(row["input_ids"]), inputs)


def test_distillation_from_a_teachers_top_tokens_is_that_from_its_logits(
    fused: MultiLoraTransformersModel, plain: TransformersModel, lora: MakeConfig, rows: list[Row]
) -> None:
    fused.add_adapter_to_model("a", lora())
    randomize(fused, "a")
    plain.add_adapter_to_model("a", lora())
    with torch.no_grad():
        for key, parameter in plain.group("a").parameters.items():
            parameter.copy_(fused.get_state_dict()[key])
    teacher = torch.randn(4, 9, fused.core.info.vocab_size, generator=torch.Generator().manual_seed(1))
    outputs = []
    for model in (fused, plain):
        model.set_loss("GKDLoss", beta=0.3)
        outputs.append(model.forward_backward(inputs=rows, teacher_logits=teacher, topk=6))
    assert outputs[0]["loss"] == pytest.approx(outputs[1]["loss"], rel=1e-5)
    for key, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(fused)[key], gradient, **TOLERANCE)
    with pytest.raises(InvalidInput, match="logits"):
        fused.forward_backward(inputs=rows, teacher_logits=teacher)
    plain.forward_backward(inputs=rows, teacher_logits=teacher)


def test_an_entropy_bonus_has_the_same_loss_and_gradient_fused_and_plain(
    fused: MultiLoraTransformersModel, plain: TransformersModel, lora: MakeConfig, rows: list[Row]
) -> None:
    fused.add_adapter_to_model("a", lora())
    with pytest.raises(InvalidInput, match="TransformersModel"):
        fused.set_loss("MSELoss")
    randomize(fused, "a")
    plain.add_adapter_to_model("a", lora())
    with torch.no_grad():
        for key, parameter in plain.group("a").parameters.items():
            parameter.copy_(fused.get_state_dict(adapter_name="a")[key])
    outputs = []
    for model in (fused, plain):
        model.set_loss("GRPOLoss", entropy_coef=0.1)
        outputs.append(model.forward_backward(inputs=rows, advantages=[0.0] * 4))
    output = outputs[1]
    assert outputs[0]["loss"] == pytest.approx(output["loss"], rel=1e-5)
    found, wanted = gradients(fused), gradients(plain)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, **TOLERANCE)
    # Apart, as scripts write it: the same gradient once more.
    fused.forward(inputs=rows, advantages=[0.0] * 4)
    fused.calculate_loss()
    fused.backward()
    for key, gradient in gradients(fused).items():
        torch.testing.assert_close(gradient, 2 * wanted[key], **TOLERANCE)
    logits = plain.forward_only(inputs=rows, return_logits=True)["logits"]
    assert logits is not None
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    trained = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["labels"]) != -100 for row in rows], batch_first=True)
    means = (entropy * trained).sum(dim=1) / trained.sum(dim=1)
    assert output["loss"] == pytest.approx(-0.1 * float(means.mean()), rel=1e-5)


def test_embeddings_are_the_last_tokens_hidden_states(plain: TransformersModel) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": [int(index % 2 == 0)]} for index, row in enumerate(make_rows(3))]
    plain.set_loss("InfonceLoss")
    output = plain.forward_backward(inputs=rows, task="embedding")
    hidden = plain.model(torch.tensor([rows[1]["input_ids"]]), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(output["embeddings"][1], hidden[0, -1].detach(), atol=1e-5, rtol=1e-5)
    assert plain.clip_grad_norm() is not None


def test_a_function_may_be_the_loss(fused: MultiLoraTransformersModel, lora: MakeConfig, rows: list[Row]) -> None:
    fused.add_adapter_to_model("a", lora())
    fused.set_loss(lambda inputs, outputs, **kwargs: -(outputs["logps"] * (inputs["labels"] != -100)).sum())
    custom = fused.forward_backward(inputs=rows)["loss"]
    fused.set_loss("CrossEntropyLoss", reduction="sum")
    assert fused.forward_backward(inputs=rows)["loss"] == pytest.approx(custom, rel=1e-6)
