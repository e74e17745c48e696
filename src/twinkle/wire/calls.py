"""Calls of the Twinkle dialect as the journal keeps them: the name of a method and its keyword arguments.

A call's payload cannot be mistaken for one of the Tinker dialect, whose operations have the same kinds: no protobuf and
no JSON begins with a zero byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from twinkle.core.operation import OperationKind

_MARK = b"\x00call:"

CALL_KINDS: Mapping[str, OperationKind] = MappingProxyType(
    {
        "add_adapter_to_model": OperationKind.CREATE_MODEL,
        "forward": OperationKind.FORWARD,
        "forward_only": OperationKind.FORWARD,
        "forward_backward": OperationKind.FORWARD_BACKWARD,
        "backward": OperationKind.FORWARD_BACKWARD,
        "step": OperationKind.OPTIM_STEP,
        "clip_grad_and_step": OperationKind.OPTIM_STEP,
        "save": OperationKind.SAVE_WEIGHTS,
        "load": OperationKind.LOAD_WEIGHTS,
        "resume_from_checkpoint": OperationKind.LOAD_WEIGHTS,
        **dict.fromkeys(
            (
                "set_loss",
                "set_optimizer",
                "set_lr_scheduler",
                "set_template",
                "set_processor",
                "add_metric",
                "apply_patch",
                "calculate_loss",
                "clip_grad_norm",
                "zero_grad",
                "lr_step",
                "calculate_metric",
                "get_train_configs",
                "get_state_dict",
            ),
            OperationKind.CALL,
        ),
    }
)
"""What each method is as an operation: who waits for it, how it is charged, and what its failure means to others."""


QUESTIONS = frozenset({"get_train_configs", "get_state_dict"})
"""What changes nothing, so that a replay leaves it out."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a method. The arguments are JSON values; ``adapter_name`` is not among them, the lane says it."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def is_call(payload: bytes) -> bool:
    """Whether an operation's payload is a call of this dialect."""
    return payload.startswith(_MARK)


def encode_call(call: Call) -> bytes:
    """The payload: the same bytes for the same call, so that a resend has the same fingerprint."""
    document = {"method": call.method, "arguments": dict(call.arguments)}
    return _MARK + json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=True).encode()


def decode_call(payload: bytes) -> Call:
    """What :func:`encode_call` wrote; ``ValueError`` for anything else."""
    if not is_call(payload):
        raise ValueError("the payload is not a call of the Twinkle dialect")
    document = json.loads(payload[len(_MARK) :])
    return Call(method=document["method"], arguments=document["arguments"])
