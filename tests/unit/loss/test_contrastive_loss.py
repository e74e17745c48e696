"""The contrastive loss against sums over candidates written out group by group."""

import math

import pytest
import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import InfonceLoss

LABELS = [1, 0, 0, 0, 1, 0, 1, 0, 0]


def make_embeddings(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(LABELS), 4, generator=generator, dtype=torch.float64)


def run(loss, embeddings, labels=LABELS):
    return loss({"labels": torch.tensor(labels)}, {"embeddings": embeddings})["loss"]


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def reference(embeddings, *, t=0.1, batch=True, negatives=None, margin=None, qq=False, dd=False):
    groups = []
    for row, label in zip(embeddings.tolist(), LABELS, strict=True):
        if label == 1:
            groups.append((row, []))
        else:
            groups[-1][1].append(row)
    if negatives is not None:
        groups = [
            (q, docs[:1] + [docs[1 + i % (len(docs) - 1)] for i in range(negatives)] if len(docs) > 1 else docs)
            for q, docs in groups
        ]
    losses = []
    for q, docs in groups:
        positive = cosine(q, docs[0])
        limit = math.inf if margin is None else positive + margin
        others = [group for group in groups if group[0] is not q]
        outside = []
        if batch:
            outside += [cosine(q, d) for _, other in others for d in other]
        if qq:
            outside += [cosine(q, other) for other, _ in others]
        if dd:
            outside += [cosine(docs[0], d) for _, other in others for d in other]
        scores = [cosine(q, d) for d in docs] + [score for score in outside if score <= limit]
        losses.append(math.log(sum(math.exp((score - positive) / t) for score in scores)))
    return sum(losses) / len(losses)


CASES = [
    ({}, {}),
    ({"temperature": 0.5, "use_batch": False}, {"t": 0.5, "batch": False}),
    ({"hard_negatives": 1}, {"negatives": 1}),
    ({"hard_negatives": 3, "use_batch": False}, {"negatives": 3, "batch": False}),
    ({"mask_fake_negative": True, "fake_neg_margin": -0.2}, {"margin": -0.2}),
    ({"include_qq": True}, {"qq": True}),
    ({"include_dd": True}, {"dd": True}),
    ({"include_qq": True, "include_dd": True, "mask_fake_negative": True}, {"qq": True, "dd": True, "margin": 0.1}),
]


@pytest.mark.parametrize(("settings", "expected"), CASES)
def test_the_value_and_gradient_are_those_of_the_formula(settings, expected):
    loss = InfonceLoss(**settings)
    for seed in range(3):
        embeddings = make_embeddings(seed)
        assert run(loss, embeddings).item() == pytest.approx(reference(embeddings, **expected), rel=1e-9)
    assert torch.autograd.gradcheck(lambda x: run(loss, x), make_embeddings(9).requires_grad_(True))


def test_the_length_of_an_embedding_does_not_matter():
    embeddings = make_embeddings(1)
    assert run(InfonceLoss(), 7 * embeddings).item() == pytest.approx(run(InfonceLoss(), embeddings).item())


def test_a_single_group_of_query_and_positive_has_nothing_to_tell_apart():
    embeddings = make_embeddings(2)[:2].requires_grad_(True)
    value = run(InfonceLoss(include_qq=True, include_dd=True), embeddings, [1, 0])
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert embeddings.grad.abs().max() < 1e-9


def test_groups_and_settings_that_make_no_sense_are_refused():
    embeddings = make_embeddings()
    with pytest.raises(InvalidInput, match="begin with 1"):
        run(InfonceLoss(), embeddings[:3], [0, 1, 0])
    with pytest.raises(InvalidInput, match=r"inputs\.labels\[0\]: starts a group without a positive"):
        run(InfonceLoss(), embeddings[:3], [1, 1, 0])
    with pytest.raises(InvalidInput, match="temperature: is 0"):
        InfonceLoss(0.0)
