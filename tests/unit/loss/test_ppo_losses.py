"""PPO's losses of policy and critic, and the forms in which a sampler's logprobs may come."""

import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import BNPOLoss, GRPOLoss, PPOLoss, PPOValueLoss, PreferenceLossBase, create_loss

ADVANTAGES = [0.5, -1.0, 2.0, 0.1]


def test_tokens_are_averaged_at_once_or_row_by_row(make_batch):
    batch = make_batch(1)
    old = (batch.logps - 0.3).tolist()
    kwargs = {"advantages": ADVANTAGES, "old_logps": old}
    assert batch.value(PPOLoss(), **kwargs) == pytest.approx(batch.value(BNPOLoss(), **kwargs))
    by_row = PPOLoss(loss_agg_mode="seq-mean-token-mean", epsilon=0.1)
    assert batch.value(by_row, **kwargs) == pytest.approx(batch.value(GRPOLoss(epsilon=0.1), **kwargs))
    assert batch.check_gradient(PPOLoss(), **kwargs)
    with pytest.raises(InvalidInput, match="token-mean, seq-mean-token-mean"):
        PPOLoss(loss_agg_mode="sum")
    assert isinstance(create_loss("ppo"), PPOLoss) and isinstance(create_loss("ppo_value"), PPOValueLoss)


def test_old_logprobs_come_as_numbers_or_as_pairs(make_batch):
    batch = make_batch(2)
    old = batch.rows(batch.logps - 0.2)
    expected = batch.value(GRPOLoss(), advantages=ADVANTAGES, old_logps=old)
    pairs = [[(7, value) for value in row] for row in old]
    listed = [[[[7, value]] for value in row] for row in old]
    several = [[[(7, value), (8, -9.0)] for value in row] for row in old]
    arrays = [torch.tensor(row, dtype=torch.float64).numpy() for row in old]
    for form in (pairs, listed, several, arrays):
        assert batch.value(GRPOLoss(), advantages=ADVANTAGES, old_logps=form) == pytest.approx(expected)
    with pytest.raises(InvalidInput, match=r"old_logps\[0\]"):
        batch.value(GRPOLoss(), advantages=ADVANTAGES, old_logps=[["a"], *old[1:]])


def test_a_critic_is_held_near_what_it_said_before():
    labels = torch.tensor([[-100, 1, 2], [5, -100, -100]])
    values = torch.tensor([[9.0, 1.0, 0.5], [0.0, 9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    kwargs = {"old_values": [[0.5, 0.5], [1.0]], "returns": [[2.0, 0.0], [0.1]]}
    result = PPOValueLoss(epsilon=0.2)({"labels": labels}, {"values": values}, **kwargs)
    terms = [max((1 - 2) ** 2, (0.7 - 2) ** 2) / 2, 0.5**2 / 2, max((0 - 0.1) ** 2, (0.8 - 0.1) ** 2) / 2]
    assert float(result["loss"]) == pytest.approx(sum(terms) / 3)
    result["loss"].backward()
    # Where the held value is the worse one the critic has gone too far: no gradient takes it back.
    assert values.grad is not None and values.grad[0, 1] == 0 and values.grad[0, 2] != 0 and values.grad[0, 0] == 0
    assert result["num_tokens"] == 1
    columns = PPOValueLoss()({"labels": labels}, {"values": values[..., None]}, **kwargs)
    assert torch.equal(columns["loss"], result["loss"])
    with pytest.raises(InvalidInput, match="returns"):
        PPOValueLoss()({"labels": labels}, {"values": values}, old_values=[[0.5, 0.5], [1.0]])
    with pytest.raises(InvalidInput, match=r"outputs\.values"):
        PPOValueLoss()({"labels": labels}, {"logps": values}, **kwargs)


def test_a_preference_loss_of_ones_own_has_the_pairs(make_batch):
    class Margin(PreferenceLossBase):
        def __call__(self, inputs, outputs, **kwargs):
            chosen, rejected = self.pair_sums(inputs, outputs)
            return {"loss": (rejected - chosen).mean() + self.chosen_nll(inputs, outputs), "num_tokens": 1}

    batch = make_batch(3)
    sums = [sum(row) for row in batch.rows()]
    nll = [-lp for row in batch.rows()[0::2] for lp in row]
    expected = (sums[1] - sums[0] + sums[3] - sums[2]) / 2 + sum(nll) / len(nll)
    assert batch.value(Margin()) == pytest.approx(expected)
