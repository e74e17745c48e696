"""The calls of a training script, on both models: windows, schedules, metrics, adapters, errors."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from harness.training import Row, gradients, make_rows, randomize
from twinkle.core.errors import InvalidInput
from twinkle.metric import Accuracy, DPOMetric
from twinkle.model import MultiLoraTransformersModel, TransformersModel, TwinkleModel

MakeConfig = Callable[..., peft.LoraConfig]
KINDS = ("fused", "plain")


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, lora: MakeConfig) -> TwinkleModel:
    """Either model, with one adapter."""
    made: TwinkleModel = request.getfixturevalue(request.param)
    made.add_adapter_to_model("first", lora())
    return made


def weights(model: TwinkleModel, name: str = "") -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.get_state_dict(adapter_name=name).items()}


def changed(model: TwinkleModel, before: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(value, before[key]) for key, value in model.get_state_dict().items())


def test_the_pieces_of_a_step_make_the_same_as_the_whole(model: TwinkleModel, rows: list[Row]) -> None:
    model.set_loss("SimPOLoss")
    whole = model.forward_backward(inputs=rows)
    expected = gradients(model)
    model._clear_gradients(model.group(""))
    scored = model.forward(inputs=rows)
    assert "loss" not in scored and scored["logits"] is None
    loss = model.calculate_loss()
    model.backward()
    assert loss == whole["loss"]
    assert all(torch.equal(gradient, expected[key]) for key, gradient in gradients(model).items())


def test_the_optimizer_steps_at_every_window_exactly(model: TwinkleModel, rows: list[Row]) -> None:
    model.group("").set_accumulation(3)
    model.set_optimizer("AdamW", lr=1e-2)
    stepped = []
    for _ in range(7):
        before = weights(model)
        model.forward_backward(inputs=rows)
        norm = model.clip_grad_and_step()
        stepped.append(changed(model, before))
        assert (norm is not None) == stepped[-1]
    assert stepped == [False, False, True, False, False, True, False]


def test_a_window_divides_by_all_its_tokens(model: TwinkleModel, rows: list[Row]) -> None:
    model.forward_backward(inputs=rows, gradient_accumulation_steps=1)
    model.clip_grad_norm(1e9)
    at_once = gradients(model)
    model.zero_grad()
    model.group("").cur_step = 0
    for part in (rows[:1], rows[1:]):
        model.forward_backward(inputs=part, gradient_accumulation_steps=2)
        norm = model.clip_grad_norm(1e9)
    assert norm is not None
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, at_once[key], atol=1e-7, rtol=1e-4)


def test_the_norm_is_clipped_and_told_as_it_was(model: TwinkleModel, rows: list[Row]) -> None:
    model.forward_backward(inputs=rows)
    norm = model.clip_grad_norm(0.01)
    assert norm is not None and norm > 0.01
    left = torch.stack([gradient.norm() for gradient in gradients(model).values()]).norm()
    assert float(left) == pytest.approx(0.01, rel=1e-3)


def test_schedules_by_name_set_the_rate_of_each_step(model: TwinkleModel, rows: list[Row]) -> None:
    model.group("").set_accumulation(2)
    model.set_optimizer("AdamW", lr=1.0)
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=2, num_training_steps=4)
    rates = []
    for _ in range(8):
        rates += model.group("").learning_rates()
        model.forward_backward(inputs=rows)
        model.clip_grad_and_step()
    assert rates == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5]
    model.set_lr_scheduler("StepLR", step_size=1, gamma=0.1)
    model.set_lr_scheduler(torch.optim.lr_scheduler.ConstantLR, factor=0.5)
    model.set_lr_scheduler(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9))


def test_metrics_are_the_texts_scripts_print(model: TwinkleModel, rows: list[Row]) -> None:
    model.group("").set_accumulation(2)
    model.set_optimizer("AdamW", lr=1e-3)
    for _ in range(4):
        output = model.forward_backward(inputs=rows)
        norm = model.clip_grad_and_step()
    results = model.calculate_metric(is_training=True)
    assert list(results) == ["loss", "grad_norm", "learning rate", "iters", "total time elapse", "speed"]
    num_tokens = sum(label != -100 for row in rows for label in row["labels"])
    assert output["num_tokens"] == num_tokens
    assert float(results["loss"]) == pytest.approx(output["loss"] / num_tokens, rel=0.05)
    assert results["grad_norm"] == f"{norm:.6f}"
    assert results["learning rate"] == "1.000000e-03"
    assert results["iters"] == 2
    assert str(results["total time elapse"]).endswith(" seconds") and str(results["speed"]).endswith(" iters/s")
    assert "loss" not in model.calculate_metric(is_training=True)


def test_evaluation_has_metrics_of_its_own(model: TwinkleModel, rows: list[Row]) -> None:
    model.add_metric(Accuracy, is_training=False)
    model.forward_only(inputs=rows, return_logits=True)
    model.calculate_loss()
    results = model.calculate_metric(is_training=False)
    assert set(results) == {"loss", "accuracy", "correct_tokens", "total_tokens"}
    assert "loss" not in model.calculate_metric(is_training=True)


def test_preference_training_takes_the_base_model_as_reference(model: TwinkleModel, rows: list[Row]) -> None:
    model.set_loss("DPOLoss", beta=0.1)
    model.set_optimizer("AdamW", lr=3e-2)
    model.add_metric(DPOMetric, is_training=True)
    reference = model.forward_only(inputs=rows, disable_lora=True)
    losses = []
    for _ in range(6):
        losses.append(model.forward_backward(inputs=rows, ref_outputs=reference)["loss"])
        model.clip_grad_and_step()
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0] - 0.1
    again = model.forward_only(inputs=rows, disable_lora=True)
    torch.testing.assert_close(again["logps"], reference["logps"])
    assert "rewards/margins" in model.calculate_metric(True)


def test_rates_and_betas_can_be_set_with_a_step(model: TwinkleModel, rows: list[Row]) -> None:
    model.set_optimizer("AdamW", lr=1e-3)
    model.forward_backward(inputs=rows)
    model.step({"lr": 0.5, "betas": (0.5, 0.6)})
    assert model.group("").learning_rates() == [0.5]
    with pytest.raises(InvalidInput, match=r"optim_params\.momentum"):
        model.step({"momentum": 1})


def test_a_step_without_gradients_changes_nothing(model: TwinkleModel, rows: list[Row]) -> None:
    model.set_optimizer("AdamW", lr=1e-1)
    model.forward_backward(inputs=rows)
    model.clip_grad_and_step()
    before = weights(model)
    model.step()
    assert not changed(model, before)


def test_the_only_adapter_need_not_be_named_and_several_must(
    model: TwinkleModel, rows: list[Row], lora: MakeConfig
) -> None:
    assert model.group("").name == "first"
    model.add_adapter_to_model("second", lora())
    with pytest.raises(InvalidInput, match=r"adapter_name: is missing.*first, second"):
        model.forward_backward(inputs=rows)
    with pytest.raises(InvalidInput, match="'third' is not known"):
        model.set_loss("GRPOLoss", adapter_name="third")
    with pytest.raises(InvalidInput, match="taken"):
        model.add_adapter_to_model("second", lora())
    model.forward_backward(inputs=rows, adapter_name="second")
    assert (model.group("first").cur_step, model.group("second").cur_step) == (0, 1)
    model.remove_adapter("second")
    assert model.group("").name == "first"


def test_what_cannot_be_done_says_what_to_do(model: TwinkleModel, rows: list[Row]) -> None:
    with pytest.raises(InvalidInput, match="call set_optimizer first"):
        model.set_lr_scheduler("StepLR", step_size=1)
    with pytest.raises(InvalidInput, match="call set_optimizer first"):
        model.step()
    with pytest.raises(InvalidInput, match="forward pass"):
        model.calculate_loss()
    with pytest.raises(InvalidInput, match="did you mean GRPOLoss"):
        model.set_loss("GRPOLos")
    with pytest.raises(InvalidInput, match="plugin"):
        model.set_loss("ms://org/loss")
    with pytest.raises(InvalidInput, match="epsilom"):
        model.set_loss("GRPOLoss", epsilom=1)
    with pytest.raises(InvalidInput, match="set_template"):
        model.forward(inputs=[{"messages": []}])
    with pytest.raises(InvalidInput, match=r"template_cls.*Template"):
        model.set_template(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="did you mean Template"):
        model.set_template("Templat")
    with pytest.raises(InvalidInput, match="task"):
        model.forward_backward(inputs=rows, task="regression")


def test_conversations_go_through_the_template(model: TwinkleModel, rows: list[Row]) -> None:
    class Template:
        def encode(self, trajectory: Any) -> Any:
            return rows[trajectory["messages"][0]]

    model.set_template(Template())
    encoded = model.forward_only(inputs=[{"messages": [2]}, {"messages": [0]}])
    assert torch.equal(encoded["logps"], model.forward_only(inputs=[rows[2], rows[0]])["logps"])


def test_configs_are_told_to_people(model: TwinkleModel) -> None:
    model.set_optimizer("AdamW", lr=2e-4)
    text = model.get_train_configs()
    assert "adapter: first" in text and "CrossEntropyLoss" in text and "AdamW, learning rate 0.0002" in text
    assert model.get_peft_config_dict()["r"] == 4


def test_both_models_train_alike(
    fused: MultiLoraTransformersModel, plain: TransformersModel, lora: MakeConfig, rows: list[Row]
) -> None:
    fused.add_adapter_to_model("a", lora())
    plain.add_adapter_to_model("a", lora())
    with torch.no_grad():
        for key, parameter in plain.group("a").parameters.items():
            parameter.copy_(fused.get_state_dict()[key])
    for model in (fused, plain):
        model.set_optimizer("AdamW", lr=1e-2)
        model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=6)
    for step in range(6):
        batch = make_rows(step)
        ours, theirs = fused.forward_backward(inputs=batch), plain.forward_backward(inputs=batch)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["labels"]) for row in batch], True, -100) != -100
        torch.testing.assert_close(ours["logps"][mask], theirs["logps"][mask], atol=1e-3, rtol=1e-3)
        for model in (fused, plain):
            model.clip_grad_and_step()


def test_several_adapters_in_one_pass_are_each_what_they_are_alone(
    fused: MultiLoraTransformersModel, lora: MakeConfig
) -> None:
    batches = {"a": make_rows(1), "b": make_rows(2, (3, 12)), "c": make_rows(3, (6, 5))}
    kwargs = {"b": {"advantages": [1.0, -0.5], "old_logps": [[-5.0], [-5.0] * 10]}}
    for index, name in enumerate(batches):
        fused.add_adapter_to_model(name, lora(rank=2 + index))
        randomize(fused, name, seed=index)
        fused.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    fused.set_loss("GRPOLoss", adapter_name="b")
    fused.set_loss("ORPOLoss", adapter_name="c")
    assert fused.core.determinism != "none"
    alone = {
        name: fused.forward_backward(inputs=rows, adapter_name=name, **kwargs.get(name, {}))
        for name, rows in batches.items()
    }
    alone_gradients = {name: gradients(fused, name) for name in batches}
    for name in batches:
        fused._clear_gradients(fused.group(name))
    together = fused.fused_forward_backward(batches, kwargs)
    for name in batches:
        assert together[name]["loss"] == alone[name]["loss"]
        assert torch.equal(together[name]["logps"], alone[name]["logps"])
        for key, gradient in gradients(fused, name).items():
            assert torch.equal(gradient, alone_gradients[name][key])
        fused.clip_grad_and_step(adapter_name=name)


def test_one_adapters_bad_rows_leave_the_others_as_they_were(
    fused: MultiLoraTransformersModel, lora: MakeConfig, rows: list[Row]
) -> None:
    for name in ("good", "bad"):
        fused.add_adapter_to_model(name, lora())
    wrong = [{"input_ids": [1, 100000], "labels": [2, 3]}]
    with pytest.raises(InvalidInput, match="token id 100000"):
        fused.fused_forward_backward({"good": rows, "bad": wrong})
    assert fused.group("good").cur_step == 1 and fused.group("bad").cur_step == 0
    assert float(gradients(fused, "bad").popitem()[1].abs().max()) == 0.0


def test_the_fused_models_limits_are_errors_of_the_kinds_scripts_catch(
    fused: MultiLoraTransformersModel, lora: MakeConfig
) -> None:
    with pytest.raises(RuntimeError, match="r: is 17, max_r is 16"):
        fused.add_adapter_to_model("big", lora(rank=17))
    for name in ("a", "b", "c"):
        fused.add_adapter_to_model(name, lora())
    with pytest.raises(RuntimeError, match="all 3 slots are taken"):
        fused.add_adapter_to_model("d", lora())
    fused.remove_adapter("b")
    fused.add_adapter_to_model("d", lora())
    with pytest.raises(ValueError, match="hold 201 tokens, max_length is 200"):
        fused.forward_backward(inputs=make_rows(0, (100, 101)), adapter_name="a")
    fused.remove_adapter("d")
    with pytest.raises(InvalidInput, match="use_dora"):
        fused.add_adapter_to_model("e", lora(use_dora=True))
    with pytest.raises(InvalidInput, match="temperature"):
        fused.forward(inputs=make_rows(0), adapter_name="a", temperature=0.5)


def test_target_modules_choose_the_layers(fused: MultiLoraTransformersModel, lora: MakeConfig) -> None:
    fused.add_adapter_to_model("a", lora(target_modules=["q_proj", "v_proj"]))
    assert {key.split(".")[-3] for key in fused.get_state_dict()} == {"q_proj", "v_proj"}
    fused.add_adapter_to_model("b", lora(target_modules=r".*layers\.1\.mlp\..*"))
    assert {key.split(".")[4] for key in fused.get_state_dict(adapter_name="b")} == {"1"}
    with pytest.raises(InvalidInput, match="c_attn"):
        fused.add_adapter_to_model("c", lora(target_modules=["q_proj", "c_attn"]))


def test_without_an_adapter_all_parameters_are_trained(plain: TransformersModel, rows: list[Row]) -> None:
    plain.set_optimizer("AdamW", lr=1e-3)
    assert len(plain.group("").learning_rates()) == 2
    losses = []
    for _ in range(5):
        losses.append(plain.forward_backward(inputs=rows)["loss"])
        plain.clip_grad_and_step()
    assert losses[-1] < 0.8 * losses[0]
    assert "learning rate(param group 2)" in plain.calculate_metric(True)
    with pytest.raises(InvalidInput, match="no adapter"):
        plain.forward_only(inputs=rows, disable_lora=True)


def test_padding_free_rows_give_the_same_as_padded_ones(plain: TransformersModel, rows: list[Row]) -> None:
    padded = plain.forward_backward(inputs=rows)
    expected = gradients(plain)
    plain.zero_grad()
    plain.set_processor("InputProcessor", padding_free=True)
    packed = plain.forward_backward(inputs=rows)
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-5)
    for key, gradient in gradients(plain).items():
        torch.testing.assert_close(gradient, expected[key], atol=1e-5, rtol=1e-3)
