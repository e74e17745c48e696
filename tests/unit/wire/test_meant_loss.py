"""What the name, the settings and the datums of a pass mean together, and what of it is refused before it is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import Datum, ForwardBackwardInput, ModelInput, TensorData
from tinker.types.forward_backward_request import ForwardBackwardRequest

from twinkle.core.errors import InvalidInput
from twinkle.wire import protobuf as pb
from twinkle.wire.json_passes import ForwardRequest, read_json_pass
from twinkle.wire.meant_loss import judge_loss, read_loss
from twinkle.wire.training import decode_data, encode_forward_backward, parse_envelope

REFERENCE = {"ref_logps": np.full(3, -4.0, np.float32)}


def sent(
    inputs: list[dict[str, Any]],
    config: dict[str, Any] | None = None,
    *,
    loss: str = "importance_sampling",
    forward_only: bool = False,
) -> pb.Message:
    """A request as the SDK writes it: for each datum what it brings beside its targets."""
    data = [
        Datum(
            model_input=ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={
                "target_tokens": TensorData(data=[2, 3, 4], dtype="int64"),
                **{name: TensorData.from_numpy(values) for name, values in extra.items()},
            },
        )
        for extra in inputs
    ]
    given = ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    message = forward_backward_request_to_proto(
        ForwardBackwardRequest(model_id="s:train:0", seq_id=4, forward_backward_input=given)
    )
    message.forward_only = forward_only
    return parse_envelope(message.SerializeToString()).message


def test_a_policy_loss_over_datums_with_a_reference_is_that_of_pairs() -> None:
    message = sent(
        [REFERENCE, REFERENCE], {"dpo_beta": 0.3, "dpo_sft_weight": 1.0, "dpo_loss_type": "hinge"}, forward_only=False
    )

    judge_loss(message)
    body = decode_data(message.SerializeToString())

    assert body.loss_fn == "DPOLoss"
    assert body.loss_fn_config == {"beta": 0.3, "sft_weight": 1.0, "loss_type": "hinge"}
    assert body.data[1].inputs["ref_logps"].tolist() == [-4.0] * 3


@pytest.mark.parametrize(
    ("inputs", "config", "field", "words"),
    [
        ([REFERENCE], {}, "data", "has 1 datums; DPOLoss takes pairs"),
        ([REFERENCE, {}], {}, "data[1].loss_fn_inputs.ref_logps", "is missing"),
        ([{}, {}], {"dpo_beta": 0.1}, "data[0].loss_fn_inputs.ref_logps", "is missing"),
        ([REFERENCE] * 2, {"dpo_beta": -0.1}, "loss_fn_config.dpo_beta", "0 or more"),
        ([REFERENCE] * 2, {"dpo_beta": "much"}, "loss_fn_config.dpo_beta", "finite number"),
        ([REFERENCE] * 2, {"dpo_beta": 0.0, "dpo_loss_type": "ipo"}, "loss_fn_config.dpo_beta", "positive"),
        ([REFERENCE] * 2, {"dpo_sft_weight": -1.0}, "loss_fn_config.dpo_sft_weight", "0 or more"),
        ([REFERENCE] * 2, {"dpo_loss_type": "sigmoit"}, "loss_fn_config.dpo_loss_type", "kto_pair"),
        ([REFERENCE] * 2, {"beta": 0.1}, "loss_fn_config.beta", "it takes dpo_beta"),
        ([REFERENCE] * 2, {"dpo_betta": 0.1}, "loss_fn_config.dpo_betta", "it takes dpo_beta"),
        (
            [REFERENCE, {**REFERENCE, "advantages": np.ones(3, np.float32)}],
            {},
            "data[1].loss_fn_inputs.advantages",
            "comes beside ref_logps",
        ),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused_by_field(
    inputs: list[dict[str, Any]], config: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        judge_loss(sent(inputs, config))

    assert refused.value.field == field
    assert words in refused.value.message


def test_what_was_taken_as_a_policy_loss_stays_one() -> None:
    """As an earlier release took it, which looked at no reference: it is done again with the same bits."""
    policy = {"advantages": np.ones(3, np.float32), "logprobs": np.ones(3, np.float32)}

    assert read_loss(sent([{**policy, **REFERENCE}])).name == "importance_sampling"


@pytest.mark.parametrize(("value", "expected"), [(True, True), (1.0, True), ("true", True), (False, False), (0, False)])
def test_the_base_model_alone_is_asked_by_a_setting_of_forward(value: Any, expected: bool) -> None:
    message = sent([{}], {"disable_lora": value, "count_correct": 1.0}, loss="cross_entropy", forward_only=True)

    body = decode_data(message.SerializeToString())
    again = decode_data(encode_forward_backward(body))

    assert body.without_adapter is again.without_adapter is expected
    assert body.loss_fn_config == again.loss_fn_config == {"count_correct": 1.0}


def test_a_forward_in_json_asks_for_the_base_model_as_the_other_does() -> None:
    raw = (
        b'{"model_id": "s:train:0", "seq_id": 4, "forward_input": {"loss_fn": "cross_entropy",'
        b' "loss_fn_config": {"disable_lora": true}, "data": [{"model_input": {"chunks": [{"type": "encoded_text",'
        b' "tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64"}}}]}}'
    )

    assert decode_data(read_json_pass(ForwardRequest, raw)).without_adapter


@pytest.mark.parametrize(
    ("value", "forward_only", "words"),
    [(True, False, "the base model alone is not trained"), ("perhaps", True, "true or false")],
)
def test_the_base_model_alone_is_not_trained(value: Any, forward_only: bool, words: str) -> None:
    message = sent([{}], {"disable_lora": value}, loss="cross_entropy", forward_only=forward_only)

    with pytest.raises(InvalidInput, match=words) as refused:
        judge_loss(message)

    assert refused.value.field == "loss_fn_config.disable_lora"
