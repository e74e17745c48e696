"""From one sampled turn to the next without cutting the text into tokens anew: what was sampled stays what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from twinkle.core.errors import InvalidInput

MARK = "\u2063twinkle\u2063"
"""Stands for what was sampled in a conversation that is written only to see what the template puts after it."""
IGNORED_LABEL = -100


class BridgeTemplate(Protocol):
    """The part of a template that a rollout needs."""

    tokenizer: Any
    max_length: int | None

    def encode(self, trajectory: Any, add_generation_prompt: bool = False) -> Any:
        """The row of a trajectory."""
        ...

    def format_trajectory(self, trajectory: Any, add_generation_prompt: bool = False) -> str:
        """The text of a trajectory."""
        ...


def extend_with_bridge(
    row: Mapping[str, Any], new_messages: Sequence[Mapping[str, Any]], template: BridgeTemplate
) -> dict[str, Any] | None:
    """The row with messages after its last turn, up to where the next turn begins; none if it is too long then.

    The tokens of the row stay as they are, and nothing of what is added trains.

    Args:
        row: Ends with what the assistant said, in tokens and in ``messages``.
        new_messages: Of tools or of the user.
        template: Of the model.
    """
    ids = list(row["input_ids"])
    tail = _text_after_turn(row, new_messages, template)
    tokenizer = template.tokenizer
    last = tokenizer.decode(ids[-1:], skip_special_tokens=False)
    # A turn that ended by itself has the token that ends it already.
    bridge = tokenizer.encode(tail.removeprefix(last), add_special_tokens=False)
    if template.max_length is not None and len(ids) + len(bridge) > template.max_length:
        return None
    return {
        **row,
        "input_ids": ids + bridge,
        "labels": [*row["labels"], *[IGNORED_LABEL] * len(bridge)],
        "attention_mask": [1] * (len(ids) + len(bridge)),
        "position_ids": longer_positions(row.get("position_ids"), len(ids), len(bridge)),
        "length": len(ids) + len(bridge),
        "messages": [*row["messages"], *(dict(message) for message in new_messages)],
    }


def _text_after_turn(
    row: Mapping[str, Any], new_messages: Sequence[Mapping[str, Any]], template: BridgeTemplate
) -> str:
    spoken = {"role": "assistant", "content": MARK}
    text = template.format_trajectory(
        {**row, "messages": [*row["messages"][:-1], spoken, *new_messages]}, add_generation_prompt=True
    )
    _, mark, after = text.rpartition(MARK)
    if not mark:
        raise InvalidInput("template", "does not write what the assistant said as it was said; no turn can follow")
    return after


def longer_positions(positions: Any, num_tokens: int, num_new: int) -> list[Any]:
    """Positions gone on with by some tokens of text, on each of their axes."""
    if positions is None or (not positions or not isinstance(positions[0], list)):
        known = list(range(num_tokens)) if positions is None else list(positions)
        start = max(known, default=-1) + 1
        return [*known, *range(start, start + num_new)]
    start = max(max(axis) for axis in positions) + 1
    return [[*axis, *range(start, start + num_new)] for axis in positions]
