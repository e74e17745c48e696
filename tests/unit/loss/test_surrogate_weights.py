"""A batch loss through per-datum weights gives the gradient it has in one piece."""

import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import (
    LOSSES,
    CrossEntropy,
    DPOLoss,
    GKDLoss,
    GRPOLoss,
    create_loss,
    differentiate,
    torch_loss_mapping,
)

LENGTHS, HIDDEN, VOCAB = (5, 3, 4, 6), 4, 7
CALLS = [
    (GRPOLoss(beta=0.1), {"advantages": [1.0, -0.5, 0.2, -1.0], "ref_logps": [[-1.0]] * 4}),
    (DPOLoss(0.7), {"ref_logps": [[-2.0]] * 4}),
]


def make_data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(HIDDEN, VOCAB, generator=generator, dtype=torch.float64, requires_grad=True)
    hidden = [torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64) for n in LENGTHS]
    labels = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
    for row in labels:
        row[0] = -100
    return weight, hidden, labels


@pytest.mark.parametrize(("loss", "kwargs"), CALLS)
def test_cross_entropy_with_the_weights_has_the_gradient_of_the_batch_loss(loss, kwargs):
    weight, hidden, labels = make_data()
    targets = [row.clamp(min=0) for row in labels]
    logprobs = [
        torch.log_softmax(x @ weight, -1).gather(1, y[:, None])[:, 0] for x, y in zip(hidden, targets, strict=True)
    ]
    padded = torch.nn.utils.rnn.pad_sequence
    inputs = {"labels": padded(labels, batch_first=True, padding_value=-100)}
    whole = loss(inputs, {"logps": padded(logprobs, batch_first=True)}, **kwargs)["loss"]
    (expected,) = torch.autograd.grad(whole, weight, retain_graph=True)
    found = differentiate(loss, logprobs, labels, loss_kwargs=kwargs)
    pieces = [CrossEntropy()(lp, {"weights": w}) for lp, w in zip(logprobs, found.weights, strict=True)]
    (gradient,) = torch.autograd.grad(torch.stack(pieces).sum(), weight)
    assert found.loss == pytest.approx(whole.item())
    torch.testing.assert_close(gradient, expected)


def test_distillation_runs_on_logprobs_at_the_teachers_tokens():
    _, _, labels = make_data()
    generator = torch.Generator().manual_seed(3)
    student, teacher = (
        [torch.log_softmax(torch.randn(n, 3, generator=generator, dtype=torch.float64), -1) for n in LENGTHS]
        for _ in range(2)
    )
    teacher_topk = torch.nn.utils.rnn.pad_sequence(teacher, batch_first=True)
    found = differentiate(GKDLoss(0.0), student, labels, loss_kwargs={"teacher_topk_logprobs": teacher_topk})
    num_trained = sum(LENGTHS) - len(LENGTHS)
    for weights, s, t in zip(found.weights, student, teacher, strict=True):
        # d KL(T || S) / d lp is -T, plus S again for the normalisation over the kept tokens.
        expected = (t.exp() - s.exp()) / num_trained
        expected[0] = 0
        torch.testing.assert_close(weights, expected)


def test_labels_of_another_length_are_refused():
    with pytest.raises(InvalidInput, match=r"labels\[0\]"):
        differentiate(GRPOLoss(), [torch.zeros(3)], [torch.zeros(4, dtype=torch.long)])


def test_losses_are_found_by_class_name_and_by_short_name():
    for short, kind in torch_loss_mapping.items():
        settings = {"chunk_size": 8} if short == "chunked_cross_entropy" else {}
        assert type(create_loss(short, **settings)) is kind is LOSSES[short]
        assert type(create_loss(kind.__name__, **settings)) is kind
    assert create_loss("GRPOLoss", epsilon=0.3).epsilon == 0.3
    with pytest.raises(InvalidInput, match="loss_cls: 'TRPOLoss' is not known; use one of BNPOLoss"):
        create_loss("TRPOLoss")
    with pytest.raises(InvalidInput, match=r"GRPOLoss cannot be built with these settings.*eps"):
        create_loss("GRPOLoss", eps=0.3)
