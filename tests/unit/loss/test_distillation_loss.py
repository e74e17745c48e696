"""Distillation against the divergence written out token by token."""

import math

import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import GKDLoss


def make(seed=0, num_rows=2, length=4, vocab=6):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, num_rows, length, vocab, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab, (num_rows, length), generator=generator)
    labels[0, :2] = -100
    return student, teacher, labels


def softmax(scores, temperature):
    powers = [math.exp(score / temperature) for score in scores]
    return [power / sum(powers) for power in powers]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def divergence(s, t, beta):
    if beta == 0:
        return kl(t, s)
    if beta == 1:
        return kl(s, t)
    m = [beta * b + (1 - beta) * a for a, b in zip(s, t, strict=True)]
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def reference(student, teacher, labels, beta, temperature, k=None):
    trained = labels != -100
    found = []
    for s, t in zip(student[trained].tolist(), teacher[trained].tolist(), strict=True):
        kept = sorted(range(len(t)), key=lambda i: -t[i])[:k]
        found.append(
            divergence(softmax([s[i] for i in kept], temperature), softmax([t[i] for i in kept], temperature), beta)
        )
    return sum(found) / len(found)


@pytest.mark.parametrize("chunk_size", [1, 4, 512])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_the_value_is_the_divergence_whatever_the_chunk(beta, chunk_size):
    student, teacher, labels = make()
    loss = GKDLoss(beta, 1.7, chunk_size=chunk_size)
    for topk in (None, 3):
        value = loss({"labels": labels}, {"logits": student}, teacher_logits=teacher, topk=topk)["loss"].item()
        assert value == pytest.approx(reference(student, teacher, labels, beta, 1.7, topk), rel=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_finite_differences(beta):
    student, teacher, labels = make(1)
    loss = GKDLoss(beta, chunk_size=3)
    leaf = student.requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda x: loss({"labels": labels}, {"logits": x}, teacher_logits=teacher)["loss"], leaf
    )


def test_the_teachers_rows_may_be_as_long_as_their_own_tokens():
    student, teacher, labels = make(2)
    labels[0, -2:] = -100
    logprobs, indices = torch.log_softmax(teacher, -1).topk(3, dim=-1)
    loss = GKDLoss(0.4, 1.3)
    padded = loss({"labels": labels}, {"logits": student}, teacher_topk_logprobs=logprobs, teacher_topk_indices=indices)
    rows = {
        "teacher_topk_logprobs": [logprobs[0, :-2].tolist(), *logprobs[1:].tolist()],
        "teacher_topk_indices": [indices[0, :-2].tolist(), *indices[1:].tolist()],
    }
    as_sampled = loss({"labels": labels}, {"logits": student}, **rows)
    torch.testing.assert_close(as_sampled["loss"], padded["loss"], atol=1e-6, rtol=1e-6)


def test_what_the_teacher_has_beyond_the_students_rows_is_left_out():
    """Padded to the longest row of all ranks, or scored with the beginning of a next answer."""
    student, teacher, labels = make(2)
    longer = torch.nn.functional.pad(teacher, (0, 0, 0, 3))
    logprobs, indices = torch.log_softmax(longer, -1).topk(3, dim=-1)
    loss = GKDLoss(0.4, 1.3)

    found = [
        loss({"labels": labels}, {"logits": student}, teacher_topk_logprobs=logprobs, teacher_topk_indices=indices),
        loss({"labels": labels}, {"logits": student}, teacher_logits=longer, topk=3),
    ]

    expected = loss({"labels": labels}, {"logits": student}, teacher_logits=teacher, topk=3)["loss"]
    for each in found:
        torch.testing.assert_close(each["loss"], expected)


def test_the_teachers_top_logprobs_give_the_same_from_logits_and_from_logprobs_at_its_tokens():
    student, teacher, labels = make(2)
    logprobs, indices = torch.log_softmax(teacher, -1).topk(3, dim=-1)
    loss = GKDLoss(0.4, 1.3)
    expected = loss({"labels": labels}, {"logits": student}, teacher_logits=teacher, topk=3)["loss"]
    from_logits = loss(
        {"labels": labels}, {"logits": student}, teacher_topk_logprobs=logprobs, teacher_topk_indices=indices
    )
    at_tokens = torch.log_softmax(student, -1).gather(-1, indices)
    from_tokens = loss({"labels": labels}, {"topk_logps": at_tokens}, teacher_topk_logprobs=logprobs)
    torch.testing.assert_close(from_logits["loss"], expected)
    torch.testing.assert_close(from_tokens["loss"], expected)


def test_a_student_that_equals_its_teacher_has_no_loss_and_the_teacher_no_gradient():
    student, _, labels = make(3)
    teacher = student.clone().requires_grad_(True)
    leaf = student.clone().requires_grad_(True)
    value = GKDLoss()({"labels": labels}, {"logits": leaf}, teacher_logits=teacher)["loss"]
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert leaf.grad.abs().max() < 1e-12
    assert teacher.grad is None


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_the_teacher_rules_out_keep_everything_finite(beta):
    student, teacher, labels = make(4)
    teacher[..., 0] = -math.inf
    leaf = student.requires_grad_(True)
    value = GKDLoss(beta)({"labels": labels}, {"logits": leaf}, teacher_logits=teacher)["loss"]
    value.backward()
    assert value.isfinite()
    assert leaf.grad.isfinite().all()


def test_nothing_trained_is_zero_and_can_be_differentiated():
    student, teacher, labels = make(5)
    leaf = student.requires_grad_(True)
    value = GKDLoss()({"labels": torch.full_like(labels, -100)}, {"logits": leaf}, teacher_logits=teacher)["loss"]
    value.backward()
    assert value == 0
    assert not leaf.grad.any()


def test_what_cannot_be_compared_is_refused():
    student, teacher, labels = make(6)
    with pytest.raises(InvalidInput, match="teacher_logits: are missing"):
        GKDLoss()({"labels": labels}, {"logits": student})
    with pytest.raises(InvalidInput, match=r"teacher_logits: have shape \(2, 4, 5\)"):
        GKDLoss()({"labels": labels}, {"logits": student}, teacher_logits=teacher[..., :5])
    with pytest.raises(InvalidInput, match="teacher_topk_indices: are missing"):
        GKDLoss()({"labels": labels}, {"logits": student}, teacher_topk_logprobs=teacher[..., :3])
    with pytest.raises(InvalidInput, match=r"beta: is 1\.5"):
        GKDLoss(1.5)
