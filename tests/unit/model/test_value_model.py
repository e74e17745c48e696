"""A critic beside a policy: a round of PPO with every piece of it."""

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch

from harness.training import Row, make_rows
from twinkle.advantage import GAEAdvantage
from twinkle.core.errors import InvalidInput
from twinkle.model import MultiLoraTransformersModel, TransformersModel, TransformersValueModel

MakeConfig = Callable[..., peft.LoraConfig]


@pytest.fixture
def critic(model_dir: Path) -> TransformersValueModel:
    return TransformersValueModel(model_id=str(model_dir))


def trained_values(model: TransformersModel, rows: list[Row]) -> list[list[float]]:
    values = model.forward_only(inputs=rows)["values"]
    return [
        [value for value, label in zip(found, row["labels"], strict=False) if label != -100]
        for found, row in zip(values.tolist(), rows, strict=True)
    ]


def test_a_round_of_ppo_moves_the_policy_and_teaches_the_critic(
    critic: TransformersValueModel, plain: TransformersModel, lora: MakeConfig, rows: list[Row]
) -> None:
    plain.add_adapter_to_model("policy", lora())
    plain.set_loss("PPOLoss")
    plain.set_optimizer("AdamW", lr=1e-2)
    plain.add_metric("PPOMetric", is_training=True)
    critic.set_optimizer("AdamW", lr=1e-2)
    critic.add_metric("PPOValueMetric", is_training=True)
    old = trained_values(critic, rows)
    assert all(value == 0 for row in old for value in row)
    lengths = [len(row) for row in old]
    rewards = GAEAdvantage.build_token_rewards([1.0, -1.0, 0.5, 2.0], lengths)
    advantages, returns = GAEAdvantage()(rewards, old)
    by_row = [advantages[index, :length].tolist() for index, length in enumerate(lengths)]
    goals = [returns[index, :length].tolist() for index, length in enumerate(lengths)]
    old_logps = plain.forward_only(inputs=rows)["logps"]
    losses = []
    for _ in range(8):
        output = critic.forward_backward(inputs=rows, old_values=old, returns=goals, micro_batch_size=2)
        losses.append(output["loss"])
        critic.clip_grad_and_step()
        plain.forward_backward(inputs=rows, advantages=by_row, old_logps=old_logps)
        plain.clip_grad_and_step()
    assert losses[-1] < losses[0]
    assert "train/approx_kl" in plain.calculate_metric() and "train/explained_variance" in critic.calculate_metric()


def test_a_critic_is_saved_and_made_again_with_its_head(
    critic: TransformersValueModel, rows: list[Row], tmp_path: Path
) -> None:
    critic.set_optimizer("AdamW", lr=1e-2)
    critic.forward_backward(inputs=rows, old_values=[0.0] * 4, returns=[1.0, 2.0, 3.0, 4.0])
    critic.clip_grad_and_step()
    values = critic.forward_only(inputs=make_rows(5))["values"]
    assert float(values.detach().abs().max()) > 0
    path = critic.save("critic", output_dir=tmp_path)
    assert path is not None
    again = TransformersValueModel(model_id=path)
    torch.testing.assert_close(again.forward_only(inputs=make_rows(5))["values"], values)
    critic.load(path)
    assert torch.equal(critic.forward_only(inputs=make_rows(5))["values"], values)


def test_what_a_critic_does_not_do_is_said(
    critic: TransformersValueModel, fused: MultiLoraTransformersModel, lora: MakeConfig, rows: list[Row]
) -> None:
    with pytest.raises(InvalidInput, match="trained whole"):
        critic.add_adapter_to_model("a", lora())
    with pytest.raises(InvalidInput, match="task"):
        critic.forward(inputs=rows, task="embedding")
    fused.add_adapter_to_model("a", lora())
    with pytest.raises(InvalidInput, match="TransformersValueModel"):
        fused.set_loss("PPOValueLoss")
