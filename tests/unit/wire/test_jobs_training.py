"""Specs of fine-tunings: what is taken, and what is refused with its field."""

from __future__ import annotations

import json

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.jobs_base import parse_part
from twinkle.wire.bodies.jobs_training import PreferenceSpec, SupervisedSpec


def read(**values: object) -> SupervisedSpec:
    return parse_part(SupervisedSpec, json.dumps({"model": "m", "data": "file-1", **values}).encode())


def test_little_is_needed_and_the_rest_is_decided_when_the_data_are_known() -> None:
    spec = read()

    assert (spec.epochs, spec.batch_size, spec.lr) == ("auto", "auto", "auto")
    assert not spec.has_evaluation


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1e-4}, "learning_rat"),
        ({"epochs": 2, "steps": 10}, "give either epochs or steps"),
        ({"patience": 3}, "patience needs eval_data or an eval_fraction"),
        ({"eval_data": "file-2", "eval_fraction": 0.1}, "give either eval_data or eval_fraction"),
        ({"loss": "CrossEntropyLoss", "loss_config": {"reductoin": "mean"}}, "did you mean reduction"),
        ({"loss_config": {"beta": 1}}, "cross_entropy has no settings"),
        ({"lr": 0}, "lr"),
        ({"model": "tinker://run/weights/a", "rank": 8}, "rank is the checkpoint's"),
        ({"with_optimizer": True}, "needs a checkpoint as model"),
        ({"suffix": "a:b"}, "suffix"),
        ({"samples": [{"messages": [], "prompt": "x"}]}, "samples"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(**values)


def test_a_prompt_may_be_a_bare_text() -> None:
    messages = read(samples=["2 + 2 ="]).samples[0].messages

    assert messages is not None
    assert [(message.role, message.content) for message in messages] == [("user", "2 + 2 =")]


@pytest.mark.parametrize(
    ("loss", "config", "expected"),
    [
        ("DPOLoss", {}, True),
        ("DPOLoss", {"reference_free": True}, False),
        ("SimPOLoss", {"gamma": 1}, False),
        ("ORPOLoss", {}, False),
    ],
)
def test_a_loss_says_whether_it_needs_a_reference(loss: str, config: dict[str, object], expected: bool) -> None:
    spec = PreferenceSpec.model_validate({"model": "m", "data": "file-1", "loss": loss, "loss_config": config})

    assert spec.needs_reference is expected
