"""Calls of the Twinkle dialect on the engine that computes nothing: each that changes something extends a chain."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.wire.calls import QUESTIONS, Call, encode_call
from twinkle.workers.engine import CallAnswer

_NO_GRADIENT = {"forward", "forward_only"}
_ONE_FLOAT = 1 << 32


@dataclass
class NullState:
    """``applied`` is the chain over all steps, ``pending`` the chain over the gradients since the last one.

    Of calls, ``settings`` is the chain over what was set since the last step, and ``last`` the one of the last pass.
    """

    applied: str
    pending: str = ""
    steps: int = 0
    settings: str = ""
    last: str = ""
    last_tokens: int = 0
    consumed: int = 0

    def step(self, how: str) -> None:
        """Fold what is pending, and what was set, into what is applied."""
        self.applied = chain(self.applied, self.pending, *([self.settings] if self.settings else []), how)
        self.pending = self.settings = ""
        self.steps += 1

    @property
    def loss(self) -> float:
        """A number that shows the gradients since the last step and what the last pass was."""
        return int(chain(self.pending, self.last)[:8], 16) / _ONE_FLOAT


def chain(previous: str, *parts: str) -> str:
    """The next link of a hash chain."""
    return hashlib.sha256("\n".join((previous, *parts)).encode()).hexdigest()


def answer_pass(state: NullState, call: Call) -> CallAnswer | Exception:
    """Log-probabilities of zero, and a loss that shows the state; a call that cannot be done changes nothing."""
    try:
        if call.method == "backward":
            return _backward(state)
        lengths = [_length(row) for row in _rows(call)]
    except InvalidInput as error:
        return error
    num_tokens = sum(lengths)
    state.last, state.last_tokens = chain("", _text_of(call)), num_tokens
    result: dict[str, Any] = {"logps": [[0.0] * length for length in lengths], "logits": None}
    times = 1
    if call.method not in _NO_GRADIENT:
        state.pending = chain(state.pending, state.last)
        result |= {"loss": state.loss, "num_tokens": num_tokens}
        times = 2
    return CallAnswer(body=_body(result), num_tokens=num_tokens, passed_tokens=times * num_tokens)


def answer_call(state: NullState, call: Call) -> bytes:
    """The answer to whatever needs no pass."""
    match call.method:
        case "step" | "clip_grad_and_step":
            state.step(_text_of(call))
            return b"null"
        case "zero_grad":
            state.pending = ""
            return b"null"
        case "save":
            state.consumed = int(call.arguments.get("consumed_train_samples") or state.consumed)
            return b"null"
        case "calculate_loss":
            return _body(_last(state).loss)
        case "clip_grad_norm":
            state.settings = chain(state.settings, _text_of(call))
            return _body(f"{state.loss:.6f}")
        case "calculate_metric":
            return _body({"loss": f"{state.loss:.4f}", "iters": state.steps, "state": state.applied[:12]})
        case "get_train_configs":
            return _body(f"step {state.steps}, state {state.applied[:12]}")
        case "get_state_dict":
            return _body({"state": [int(state.applied[:12], 16)]})
        case _:
            assert call.method not in QUESTIONS
            state.settings = chain(state.settings, _text_of(call))
            return b"null"


def answer_load(state: NullState, content: Mapping[str, Any], call: Call) -> tuple[NullState, bytes]:
    """The adapter with a checkpoint in it."""
    resumes = call.method == "resume_from_checkpoint" and not call.arguments.get("resume_only_model")
    with_optimizer = resumes or bool(call.arguments.get("load_optimizer"))
    loaded = replace(
        state,
        applied=content["applied"],
        pending="",
        last="",
        steps=content["steps"] if with_optimizer else 0,
        consumed=content.get("consumed", 0) if resumes else state.consumed,
    )
    if call.method == "load":
        return loaded, b"null"
    found = {
        "cur_step": content["steps"],
        "consumed_train_samples": content.get("consumed", 0),
        "gradient_accumulation_steps": 1,
    }
    return loaded, _body(found)


def _backward(state: NullState) -> CallAnswer:
    state.pending = chain(state.pending, _last(state).last)
    return CallAnswer(body=b"null", num_tokens=state.last_tokens, passed_tokens=state.last_tokens)


def _last(state: NullState) -> NullState:
    if not state.last:
        raise InvalidInput("inputs", "are missing: there is no forward pass to go on from; call forward first")
    return state


def _rows(call: Call) -> list[Mapping[str, Any]]:
    inputs = call.arguments.get("inputs")
    rows = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise InvalidInput("inputs", "must be a list of rows or of conversations, at least one")
    return rows


def _length(row: Mapping[str, Any]) -> int:
    """Of a row its tokens; of a conversation, which nothing here can encode, its characters."""
    tokens = row.get("input_ids")
    if isinstance(tokens, list):
        return len(tokens)
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise InvalidInput("inputs", "hold a row with neither input_ids nor messages")
    return max(1, sum(len(str(message.get("content", ""))) for message in messages if isinstance(message, Mapping)))


def _text_of(call: Call) -> str:
    return encode_call(call).hex()


def _body(result: object) -> bytes:
    return json.dumps({"result": result}).encode()
