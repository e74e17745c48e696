"""Bodies of ``create_custom_loss``: a loss of the client's own, traced to a graph."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from twinkle.wire.bodies.base import Identifier, RequestBody, ResponseBody, SeqId, Text, is_storable, read_keys
from twinkle.wire.paths import CustomLossId

MAX_LOSSES_PER_SESSION = 1000


class CustomLossInput(RequestBody):
    """One input of a loss, and the rank it has in every datum."""

    name: Text
    rank: Literal[0, 1, 2]


class CustomLossNode(RequestBody):
    """One node of a graph, as torch.fx writes it; the arguments are judged by :mod:`twinkle.wire.loss_graph`."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: Text
    target: Text
    args: list[Any] = Field(default=[])
    kwargs: dict[Text, Any] = Field(default={})


class CustomLossGraph(RequestBody):
    """A loss as its nodes, in the order of execution."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(RequestBody):
    """``POST create_custom_loss``."""

    session_id: Identifier
    custom_loss_seq_id: SeqId = Field(lt=MAX_LOSSES_PER_SESSION)
    name: Text
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(ResponseBody):
    """Result of ``create_custom_loss``: what ``forward_backward`` calls the loss, in the same session."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"


def peek_custom_loss(raw: bytes) -> CustomLossId | None:
    """Reads only the address of a custom loss, for a body that cannot be read as a whole."""
    keys = read_keys(raw)
    session_id, number = keys.get("session_id"), keys.get("custom_loss_seq_id")
    if not isinstance(session_id, str) or not 1 <= len(session_id) <= 512 or not is_storable(session_id):
        return None
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MAX_LOSSES_PER_SESSION:
        return None
    return CustomLossId(session_id, number)
