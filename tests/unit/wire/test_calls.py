"""Calls of the Twinkle dialect, as the journal keeps them."""

from __future__ import annotations

import pytest

from twinkle.wire.calls import Call, decode_call, encode_call, is_call


def test_a_call_comes_back_as_it_was_whatever_the_order_of_its_arguments() -> None:
    one = Call(method="set_loss", arguments={"loss_cls": "GRPOLoss", "epsilon": 0.2})
    other = Call(method="set_loss", arguments={"epsilon": 0.2, "loss_cls": "GRPOLoss"})

    assert encode_call(one) == encode_call(other)
    assert decode_call(encode_call(one)) == one


@pytest.mark.parametrize("payload", [b'{"adam_params":{}}', b"\x0a\x03abc", b"", b'{"method":"step","arguments":{}}'])
def test_what_the_other_dialect_sends_is_no_call(payload: bytes) -> None:
    assert not is_call(payload)
    with pytest.raises(ValueError, match="not a call"):
        decode_call(payload)
