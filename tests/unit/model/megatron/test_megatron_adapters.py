"""What a script says to Megatron models about adapters, on one rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from harness.training import make_rows
from twinkle.core.errors import BatchTooLong, InvalidInput, NoRoom
from twinkle.infra.process_group import leave_world
from twinkle.model import MultiLoraMegatronModel, TransformersModel
from twinkle.model.megatron import MegatronModel
from twinkle.model.megatron.layout import leave_layout


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    yield
    leave_layout()
    leave_world()


@pytest.fixture(scope="module")
def shared_model(families_dir: Path) -> MultiLoraMegatronModel:
    return MultiLoraMegatronModel(model_id=str(families_dir / "qwen3"), max_loras=2, max_r=8, max_length=64)


@pytest.fixture
def multi(shared_model: MultiLoraMegatronModel) -> MultiLoraMegatronModel:
    for name in list(shared_model.optimizer_group):
        shared_model.remove_adapter(name)
    return shared_model


def lora(rank: int = 4, **settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": rank, "lora_alpha": 8, "target_modules": "all-linear", **settings})


def step(model: Any, name: str, *, seed: int = 0) -> None:
    model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    model.forward_backward(inputs=make_rows(seed, (6, 4)), adapter_name=name)
    model.clip_grad_and_step(adapter_name=name)


def test_the_same_seed_draws_the_adapter_that_peft_draws(families_dir: Path) -> None:
    ours = MegatronModel(model_id=str(families_dir / "qwen3"))
    theirs = TransformersModel(model_id=str(families_dir / "qwen3"))
    for model in (ours, theirs):
        torch.manual_seed(11)
        model.add_adapter_to_model("default", lora())

    expected = theirs.get_state_dict()
    found = ours.get_state_dict()

    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_adapters_train_one_beside_the_other_and_leave_the_base_as_it_is(multi: MultiLoraMegatronModel) -> None:
    rows = make_rows(5, (6, 4))
    multi.add_adapter_to_model("one", lora())
    before = multi.forward_only(inputs=rows, adapter_name="one", disable_lora=True)["logps"]
    step(multi, "one")
    kept = multi.forward_only(inputs=rows, adapter_name="one")["logps"]

    multi.add_adapter_to_model("two", lora(2, target_modules=["q_proj"]))
    step(multi, "two", seed=1)

    assert torch.equal(multi.forward_only(inputs=rows, adapter_name="one")["logps"], kept)
    assert not torch.equal(multi.forward_only(inputs=rows, adapter_name="two")["logps"], kept)
    assert torch.equal(multi.forward_only(inputs=rows, adapter_name="two", disable_lora=True)["logps"], before)
    assert list(multi.get_peft_config_dict(adapter_name="two")["target_modules"]) == ["q_proj"]


def test_dropout_drops_in_training_alone_and_the_same_again_in_the_second_run(multi: MultiLoraMegatronModel) -> None:
    rows = make_rows(5, (6, 4))
    multi.add_adapter_to_model("one", lora())
    multi.add_adapter_to_model("dropping", lora(lora_dropout=0.5))
    for name in ("one", "dropping"):
        step(multi, name)

    scored = [multi.forward_only(inputs=rows, adapter_name="dropping")["logps"] for _ in range(2)]
    trained = [multi.forward(inputs=rows, adapter_name="dropping")["logps"] for _ in range(2)]
    in_one_go = multi.forward(inputs=rows, adapter_name="dropping")
    loss = multi.calculate_loss(adapter_name="dropping")
    multi.backward(adapter_name="dropping")

    assert torch.equal(*scored)
    assert not torch.equal(*trained)
    assert in_one_go["logps"] is not None and loss > 0
    assert any(
        parameter.grad is not None and parameter.grad.abs().max() > 0
        for parameter in multi.optimizer_group["dropping"].parameters.values()
    )


def test_a_full_model_says_what_to_do(multi: MultiLoraMegatronModel) -> None:
    with pytest.raises(NoRoom, match="max_r is 8"):
        multi.add_adapter_to_model("large", lora(16))
    for name in ("one", "two"):
        multi.add_adapter_to_model(name, lora())
    with pytest.raises(NoRoom, match="remove_adapter one first"):
        multi.add_adapter_to_model("three", lora())
    with pytest.raises(InvalidInput, match="is taken"):
        multi.add_adapter_to_model("two", lora())
    with pytest.raises(BatchTooLong, match="max_length is 64"):
        multi.forward_only(inputs=make_rows(0, (40, 40)), adapter_name="one")
    multi.remove_adapter("one")
    multi.add_adapter_to_model("three", lora())


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"target_modules": ["q_prj"]}, "q_prj is no layer that can be trained"),
        (
            {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
            "target_parameters: .*leave it out",
        ),
        ({"use_dora": True}, "without DoRA"),
    ],
)
def test_what_is_not_computed_is_refused(
    settings: dict[str, Any], complaint: str, multi: MultiLoraMegatronModel
) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        multi.add_adapter_to_model("one", lora(**settings))

    assert not multi.optimizer_group


def test_an_adapter_goes_on_from_its_folder(multi: MultiLoraMegatronModel, tmp_path: Path) -> None:
    multi.add_adapter_to_model("one", lora(rank_pattern={"q_proj": 2}))
    step(multi, "one")
    saved = multi.save("half", output_dir=tmp_path, adapter_name="one", save_optimizer=True)

    multi.add_adapter_to_model("two", str(saved))
    multi.set_optimizer("AdamW", lr=1e-2, adapter_name="two")
    multi.resume_from_checkpoint(str(saved), adapter_name="two")
    for name in ("one", "two"):
        multi.forward_backward(inputs=make_rows(3, (6, 4)), adapter_name=name)
        multi.clip_grad_and_step(adapter_name=name)

    one, two = (multi.get_state_dict(adapter_name=name) for name in ("one", "two"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_a_merged_checkpoint_is_a_whole_model_with_the_update_in_it(
    multi: MultiLoraMegatronModel, tmp_path: Path
) -> None:
    rows = make_rows(5, (6, 6))
    multi.add_adapter_to_model("one", lora())
    step(multi, "one")

    whole = multi.save("whole", output_dir=tmp_path, merge_lora=True, adapter_name="one")
    alone = multi.save("alone", output_dir=tmp_path, adapter_name="one")

    opened = TransformersModel(model_id=str(whole), mixed_precision="no").forward_only(inputs=rows)["logps"]
    expected = multi.forward_only(inputs=rows, adapter_name="one")["logps"]
    torch.testing.assert_close(opened, expected, atol=1e-4, rtol=1e-4)
    assert alone is not None and not (Path(alone) / "config.json").exists()
    with pytest.raises(InvalidInput, match="merge_lora: goes with no optimizer"):
        multi.save("both", output_dir=tmp_path, merge_lora=True, save_optimizer=True, adapter_name="one")
