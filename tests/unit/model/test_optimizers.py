"""Optimizers by name, by class and from a script: which parameters each steps, and how training goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from harness.training import Row, make_rows
from twinkle.core.errors import InvalidInput
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.muon import MuonWithAdamW
from twinkle.model.optimizers import known_optimizers

MakeConfig = Callable[..., peft.LoraConfig]


def steps(model: TransformersModel | MultiLoraTransformersModel, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        losses.append(model.forward_backward(inputs=make_rows(step % 2))["loss"])
        model.clip_grad_and_step()
    return losses


def test_muon_steps_matrices_and_adamw_tables_and_vectors(plain: TransformersModel) -> None:
    plain.set_optimizer("Muon", lr=1e-3, weight_decay=0.1, momentum=0.9, betas=(0.8, 0.9))
    optimizer = plain.group("").require_optimizer()
    assert isinstance(optimizer, MuonWithAdamW)
    names = {id(parameter): name for name, parameter in plain.model.named_parameters()}
    muon, tables, vectors = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert "model.embed_tokens.weight" in tables and "model.layers.0.self_attn.q_proj.weight" in muon
    assert all("norm" in name for name in vectors) and muon | tables | vectors == set(names.values())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[1]["betas"] == (0.8, 0.9)
    plain.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=20)
    losses = steps(plain, 0, 8)
    assert losses[-1] < losses[0] - 1
    rates = plain.group("").learning_rates()
    assert len(set(rates)) == 1 and 0 < rates[0] < 1e-3
    state = optimizer.state[dict(plain.model.named_parameters())["model.layers.0.self_attn.q_proj.weight"]]
    assert set(state) == {"momentum_buffer"}


@pytest.mark.parametrize("kind", ["fused", "plain", "whole"])
def test_training_by_muon_goes_on_from_a_checkpoint_to_the_bit(
    request: pytest.FixtureRequest, kind: str, lora: MakeConfig, tmp_path: Path
) -> None:
    model = request.getfixturevalue("plain" if kind == "whole" else kind)

    def prepare() -> None:
        if kind != "whole":
            model.add_adapter_to_model("a", lora()) if "a" not in model.optimizer_group else None
        model.set_optimizer(torch.optim.Muon, lr=1e-2)

    prepare()
    steps(model, 0, 3)
    path = model.save("muon", output_dir=tmp_path, save_optimizer=True)
    expected = steps(model, 3, 6)
    prepare()
    model.resume_from_checkpoint(path)
    assert steps(model, 3, 6) == expected
    again = model.save("again", output_dir=tmp_path, save_optimizer=True)
    prepare()
    model.resume_from_checkpoint(again)


def test_an_optimizer_that_a_script_made_steps_what_it_was_made_for(plain: TransformersModel, rows: list[Row]) -> None:
    own = [p for name, p in plain.model.named_parameters() if "q_proj" in name]
    plain.set_optimizer(torch.optim.Muon(own, lr=0.1))
    before = {name: value.clone() for name, value in plain.get_state_dict().items()}
    plain.forward_backward(inputs=rows)
    plain.clip_grad_and_step()
    moved = {name for name, value in plain.get_state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "q_proj" in name}
    assert plain.optimizer_group[""].cur_step == 1


@pytest.mark.parametrize("name", sorted(known_optimizers()))
def test_torchs_optimizers_train_by_name(fused: MultiLoraTransformersModel, lora: MakeConfig, name: str) -> None:
    fused.add_adapter_to_model("a", lora())
    settings: dict[str, Any] = {"Rprop": {"lr": 1e-3}}.get(name, {"lr": 1e-2})
    fused.set_optimizer(name, **settings)
    before = fused.get_state_dict()
    steps(fused, 0, 2)
    assert any(not torch.equal(value, before[key]) for key, value in fused.get_state_dict().items())


def test_settings_that_do_not_fit_are_refused(plain: TransformersModel) -> None:
    with pytest.raises(InvalidInput, match=r"Muon.*momentun"):
        plain.set_optimizer("Muon", lr=1e-3, momentun=0.9)
    with pytest.raises(InvalidInput, match="optimizer_cls"):
        plain.set_optimizer("AdamW", lr=-1.0)
    with pytest.raises(InvalidInput, match="did you mean AdamW"):
        plain.set_optimizer("AdamWW")
    with pytest.raises(InvalidInput, match="LBFGS runs the model itself"):
        plain.set_optimizer(torch.optim.LBFGS)
