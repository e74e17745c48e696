"""How models are made: upstream's arguments by keyword, precision, and settings that have nothing to set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from structlog.testing import capture_logs

from harness.training import Row, gradients
from twinkle.core.errors import InvalidInput, NoRoom
from twinkle.model import MultiLoraTransformersModel, TransformersModel

MakeConfig = Callable[..., peft.LoraConfig]


@pytest.mark.parametrize("model_cls", [transformers.AutoModelForCausalLM, "AutoModelForCausalLM"])
def test_the_arguments_of_upstream_are_taken_by_keyword(model_dir: Path, model_cls: Any) -> None:
    shared: dict[str, Any] = {
        "model_cls": model_cls,
        "model_id": f"ms://{model_dir}",
        "strategy": "native_fsdp",
        "ddp_config": {"find_unused_parameters": True},
        "fsdp_config": {"reshard_after_forward": False, "expert_parallel": {"enabled": False}},
        "memory_efficient_init": True,
        "mixed_precision": "no",
    }
    scaler = {"grad_scaler_config": {"init_scale": 8.0}}
    plain = TransformersModel(**shared, **scaler)
    fused = MultiLoraTransformersModel(**shared, **scaler, max_loras=1, max_length=64, lora_config={"r": 4})
    assert type(plain.model) is type(fused.model)


def test_the_class_may_come_before_the_id_as_it_does_upstream(model_dir: Path) -> None:
    for kind in (TransformersModel, MultiLoraTransformersModel):
        by_name = kind("AutoModelForCausalLM", str(model_dir))
        by_class = kind(transformers.AutoModelForCausalLM, str(model_dir), None, None)
        assert type(by_name.model) is type(by_class.model)
    with pytest.raises(InvalidInput, match="model_cls: came twice"):
        TransformersModel("AutoModelForCausalLM", str(model_dir), model_cls="AutoModel")
    with pytest.raises(InvalidInput, match="model_id: is missing"):
        TransformersModel(transformers.AutoModelForCausalLM)


def test_settings_that_nobody_knows_are_refused_with_what_was_meant(model_dir: Path) -> None:
    for wrong, message in (
        ({"fsdp_config": {"reshard_after_forwards": True}}, "did you mean reshard_after_forward"),
        ({"ddp_config": {"find_unused_parameter": True}}, "did you mean find_unused_parameters"),
        ({"strategy": "deepspeed"}, "send one of accelerate, native_fsdp"),
        ({"mixed_precision": "fp8"}, "mixed_precision: is 'fp8', which needs a GPU of NVIDIA's.* on cpu; send 'bf16'"),
        ({"mixed_precision": "fp4"}, "mixed_precision: is 'fp4'; send 'bf16', 'fp16', 'fp8' or 'no'"),
        ({"model_cls": "AutoModelForCausal"}, "no class 'AutoModelForCausal'"),
        ({"grad_scaler_config": {"initial_scale": 8.0}}, "grad_scaler_config: .*initial_scale"),
    ):
        with pytest.raises(InvalidInput, match=message):
            TransformersModel(model_id=str(model_dir), **wrong)


def test_float16_trains_with_a_scaled_loss_and_goes_on_from_a_checkpoint(
    model_dir: Path, tmp_path: Path, lora: MakeConfig, rows: list[Row]
) -> None:
    def make() -> TransformersModel:
        model = TransformersModel(model_id=str(model_dir), mixed_precision="fp16")
        torch.manual_seed(0)
        model.add_adapter_to_model("a", lora())
        model.set_grad_scaler(init_scale=1024.0, growth_interval=2)
        model.set_optimizer("AdamW", lr=1e-2)
        return model

    def step(model: TransformersModel, **settings: Any) -> float:
        loss = model.forward_backward(inputs=rows, **settings)["loss"]
        norm = model.clip_grad_and_step()
        assert norm is not None and 0 < norm < 100
        return loss

    model = make()
    exact = TransformersModel(model_id=str(model_dir), mixed_precision="no")
    exact.add_adapter_to_model("a", lora())
    with torch.no_grad():
        for name, parameter in exact.group("a").parameters.items():
            parameter.copy_(model.group("a").parameters[name])
    exact.forward_backward(inputs=rows)
    exact.clip_grad_norm(1e9)
    model.forward_backward(inputs=rows)
    assert max(float(gradient.abs().max()) for gradient in gradients(model).values()) > 1
    model.clip_grad_norm(1e9)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, gradients(exact)[name], atol=2e-3, rtol=0.05)
    model.zero_grad()
    losses = [step(model), step(model, micro_batch_size=2), step(model)]
    assert losses[-1] < losses[0]
    scaler = model.group("").scaler
    assert scaler is not None and scaler.get_scale() == 2048.0
    path = model.save("half", output_dir=tmp_path, save_optimizer=True)
    assert path is not None
    other = make()
    other.resume_from_checkpoint(path)
    resumed = other.group("").scaler
    assert resumed is not None and resumed.get_scale() == 2048.0
    assert step(other) == step(model)


def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_lowers_the_scale(
    model_dir: Path, lora: MakeConfig, rows: list[Row]
) -> None:
    model = TransformersModel(model_id=str(model_dir), mixed_precision="fp16", grad_scaler_config={"init_scale": 64.0})
    model.add_adapter_to_model("a", lora())
    model.set_optimizer("AdamW", lr=1e-2)
    model.forward_backward(inputs=rows)
    next(parameter.grad for parameter in model.group("").parameters.values() if parameter.grad is not None).fill_(
        float("inf")
    )
    before = model.get_state_dict()
    model.clip_grad_and_step()
    assert all(torch.equal(value, before[name]) for name, value in model.get_state_dict().items())
    scaler = model.group("").scaler
    assert scaler is not None and scaler.get_scale() == 32.0


def test_what_is_no_argument_of_ours_goes_to_transformers(model_dir: Path) -> None:
    model = TransformersModel(model_id=str(model_dir), attn_implementation="eager")

    assert model.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", [TransformersModel, MultiLoraTransformersModel])
def test_flash_attention_on_a_cpu_gives_way_and_the_log_says_so(kind: type, model_dir: Path) -> None:
    with capture_logs() as said:
        model = kind(model_id=str(model_dir), attn_implementation="flash_attention_2")

    assert isinstance(model, kind)
    assert [line["asked"] for line in said if line["event"] == "model.attention.on_cpu"] == ["flash_attention_2"]


@pytest.mark.parametrize("in_pieces", [True, False])
def test_the_length_of_a_window_may_be_said_in_every_call_of_a_step(
    plain: TransformersModel, lora: MakeConfig, rows: list[Row], in_pieces: bool
) -> None:
    plain.add_adapter_to_model("a", lora())
    plain.set_optimizer("AdamW", lr=1e-2)
    before = plain.get_state_dict()
    changed = []
    for _ in range(4):
        plain.forward_backward(inputs=rows, gradient_accumulation_steps=2)
        if in_pieces:
            plain.step(gradient_accumulation_steps=2)
            plain.zero_grad(gradient_accumulation_steps=2)
            plain.lr_step(gradient_accumulation_steps=2)
        else:
            plain.clip_grad_and_step(max_grad_norm=1.0, gradient_accumulation_steps=2)
        after = plain.get_state_dict()
        changed.append(any(not torch.equal(after[name], before[name]) for name in after))
        before = after

    assert changed == [False, True, False, True]


@pytest.mark.parametrize("form", [dict, peft.LoraConfig])
def test_the_slots_of_a_fused_model_may_be_said_as_a_config_of_peft(model_dir: Path, form: Callable[..., Any]) -> None:
    slots = form(r=4, target_modules=["q_proj"])
    model = MultiLoraTransformersModel(model_id=str(model_dir), lora_config=slots, max_r=32)

    model.add_adapter_to_model("a", peft.LoraConfig(r=2))
    assert {name.split(".")[-3] for name in model.get_state_dict()} == {"q_proj"}
    with pytest.raises(NoRoom, match="max_r is 4"):
        model.add_adapter_to_model("b", peft.LoraConfig(r=8))
    model.set_grad_scaler(init_scale=2.0)
    with pytest.raises(InvalidInput, match=r"grad_scaler_config: .*initial_scale"):
        model.set_grad_scaler(initial_scale=2.0)
    with pytest.raises(InvalidInput, match=r"lora_config: is no LoraConfig: .*rank"):
        MultiLoraTransformersModel(model_id=str(model_dir), lora_config={"rank": 4})
