"""What scripts ask of models beside a step: templates by name, hooks, a fresh start, answers in every form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from harness.training import Row, make_rows
from twinkle.core.errors import InvalidInput
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.processor import InputProcessor
from twinkle.template import Template

MakeConfig = Callable[..., peft.LoraConfig]
ASKED = [
    {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "the lazy dog"}]},
    {"messages": [{"role": "user", "content": "jumps"}, {"role": "assistant", "content": "over the quick brown fox"}]},
]


@pytest.fixture(params=["fused", "plain"])
def model(request: pytest.FixtureRequest, lora: MakeConfig) -> MultiLoraTransformersModel | TransformersModel:
    made = request.getfixturevalue(request.param)
    made.add_adapter_to_model("a", lora())
    return made


@pytest.mark.parametrize("form", ["name", "qwen", "class", "object"])
def test_conversations_are_encoded_by_a_template_given_in_any_form(
    model: MultiLoraTransformersModel | TransformersModel, model_dir: Path, form: str
) -> None:
    match form:
        case "name":
            model.set_template("Template", model_id=f"ms://{model_dir}", max_length=64)
        case "qwen":
            model.set_template("Qwen3_5Template", enable_thinking=False)
        case "class":
            model.set_template(Template, max_length=64)
        case "object":
            model.set_template(Template(str(model_dir)))
    model.set_optimizer("AdamW", lr=1e-2)
    encoded = Template(str(model_dir), enable_thinking=form != "qwen").batch_encode(ASKED)
    expected = model.forward_only(inputs=encoded)["logps"]
    losses = []
    for _ in range(3):
        output = model.forward_backward(inputs=ASKED)
        losses.append(output.loss)
        if len(losses) == 1:
            torch.testing.assert_close(output["logps"], expected)
        model.clip_grad_and_step()
    assert losses[-1] < losses[0]


def test_rows_too_long_are_dropped_or_cut_as_the_template_says(
    model: MultiLoraTransformersModel | TransformersModel,
) -> None:
    model.set_template("Template", max_length=12, truncation_strategy="split")
    assert len(model.forward_only(inputs=ASKED)["logps"]) > len(ASKED)
    model.set_template("Template", max_length=12, truncation_strategy="delete")
    with pytest.raises(InvalidInput, match="all of which the template drops"):
        model.forward_only(inputs=ASKED)


def test_answers_are_read_by_key_by_attribute_and_under_result(
    model: MultiLoraTransformersModel | TransformersModel, tmp_path: Path
) -> None:
    model.set_optimizer("AdamW", lr=1e-3)
    output = model.forward_backward(inputs=make_rows(0))
    assert output["loss"] == output.loss == output.result.loss == output.get("loss")
    with pytest.raises(AttributeError, match="there is no 'embeddings'; there is"):
        _ = output.embeddings
    model.clip_grad_and_step()
    log: dict[str, Any] = {}
    metrics = model.calculate_metric(is_training=True)
    log.update(metrics)
    assert log == metrics.result and float(metrics["loss"]) == float(metrics.loss)
    saved = model.save("both", output_dir=tmp_path)
    assert saved is not None and saved == str(tmp_path / "both") == saved.twinkle_path == saved.checkpoint_dir
    assert Path(saved, "adapter_config.json").is_file() and saved.endswith("both")


class Counting(InputProcessor):
    """A processor of one's own, in the documents' form."""

    seen = 0

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        Counting.seen += len(inputs)
        return super().__call__(inputs, **kwargs)


def test_a_processor_of_ones_own_makes_the_batches(plain: TransformersModel, rows: list[Row]) -> None:
    plain.set_processor(Counting, padding_side="left")
    plain.forward_only(inputs=rows)
    assert Counting.seen == len(rows)


def test_all_parameters_become_what_they_were(plain: TransformersModel, rows: list[Row]) -> None:
    before = {name: value.clone() for name, value in plain.get_state_dict().items()}
    plain.set_optimizer("AdamW", lr=1e-2)
    plain.forward_backward(inputs=rows)
    plain.clip_grad_and_step()
    assert any(not torch.equal(value, before[name]) for name, value in plain.get_state_dict().items())
    plain.reload_initial_weights()
    assert all(torch.equal(value, before[name]) for name, value in plain.get_state_dict().items())
    with pytest.raises(InvalidInput, match="set_optimizer"):
        plain.step()


def test_a_base_model_beneath_adapters_need_not_be_reloaded(plain: TransformersModel, lora: MakeConfig) -> None:
    plain.add_adapter_to_model("a", lora())
    with pytest.raises(InvalidInput, match="has not changed"):
        plain.reload_initial_weights()


class Watching(Template):
    seen: list[str]

    def pre_forward_hook(self, module: Any, args: Any, kwargs: Any) -> None:
        self.seen = sorted(kwargs)


class WatchingToo(Watching):
    """The hook is its parent's."""


def test_a_template_may_see_what_goes_into_the_model(
    plain: TransformersModel, model_dir: Path, rows: list[Row]
) -> None:
    with pytest.raises(InvalidInput, match="no pre_forward_hook"):
        plain.register_mm_forward_hook(plain.group(""))
    template = WatchingToo(str(model_dir))
    plain.set_template(template)
    plain.register_mm_forward_hook(plain.group(""))
    plain.forward_only(inputs=rows)
    assert {"input_ids", "attention_mask", "position_ids"} <= set(template.seen)
    plain.unregister_mm_forward_hook(plain.group(""))
    template.seen = []
    plain.forward_only(inputs=rows)
    assert template.seen == []
