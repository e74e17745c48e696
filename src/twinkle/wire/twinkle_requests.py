"""Requests of the Twinkle dialect as calls: what of them is judged before they are accepted.

Arguments that are not known here pass through to the call, whose method judges them by name; how large a request is,
how many rows it has and what it comes to are judged here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.core.operation import OperationKind
from twinkle.wire.bodies.twinkle_calls import MethodCall
from twinkle.wire.calls import CALL_KINDS, Call, encode_call
from twinkle.wire.paths import (
    MAX_NAME_LENGTH,
    OTHER_SCHEME,
    SCHEME,
    CheckpointPath,
    parse_checkpoint_path,
    validate_name,
)

MAX_ROWS = 16_384
"""Of one call: more is for several."""

PASSES = frozenset({"forward", "forward_only", "forward_backward"})
"""Methods that need rows or conversations."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]", re.ASCII)
NO_FOLDERS = (
    "folders of the server's disk and models of hubs are not read here: load a checkpoint by its path,"
    " twinkle://<run>/weights/<name>, or by its name in this run"
)
"""Why a path that is no checkpoint's is not taken."""


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """A call, the adapter it is about, and what it may come to."""

    adapter_name: str
    call: Call
    num_tokens: int
    payload: bytes

    @property
    def kind(self) -> OperationKind:
        """What it is as an operation."""
        return CALL_KINDS[self.call.method]

    @property
    def embeds(self) -> bool:
        """Whether its rows are to be turned into embeddings, which are then compared."""
        return self.call.method in PASSES and self.call.arguments.get("task") == "embedding"

    @property
    def digest(self) -> str:
        """Tells a resend from another request."""
        return hashlib.sha256(self.payload).hexdigest()


def read_call(method: str, body: MethodCall) -> CallRequest:
    """Makes a call of a body whose arguments are its method's own. Not for the event loop if it is large.

    Raises:
        InvalidInput: Its rows are none, or too many.
    """
    arguments = dict(body.model_extra or {})
    num_tokens = count_tokens(arguments.get("inputs")) if method in PASSES else 0
    call = Call(method=method, arguments=arguments)
    return CallRequest(adapter_name=body.adapter_name, call=call, num_tokens=num_tokens, payload=encode_call(call))


def count_tokens(inputs: object) -> int:
    """What the rows of a call come to: of rows their tokens, of conversations the bytes of their texts at most.

    Raises:
        InvalidInput: They are no rows, or too many.
    """
    rows = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(rows, list) or not rows:
        raise InvalidInput(
            "inputs", "must be a list of rows (input_ids, labels) or conversations (messages), at least one"
        )
    if len(rows) > MAX_ROWS:
        raise InvalidInput("inputs", f"has {len(rows)} rows, at most {MAX_ROWS} go in one call; send several")
    return sum(_tokens_of(row, place) for place, row in enumerate(rows))


def checkpoint_name(name: str | None) -> str | None:
    """A name for a checkpoint made of what a client calls it: foreign characters become ``_``; none for none.

    Raises:
        InvalidInput: Nothing can be made of it.
    """
    if not name:
        return None
    safe = _UNSAFE.sub("_", name).replace("..", "__")[:MAX_NAME_LENGTH]
    return validate_name("_" if safe == "." else re.sub(r"\A-", "_", safe), field="name")


def checkpoint_path(name: str, *, run_id: str, field: str = "name") -> CheckpointPath:
    """The checkpoint that a client names, by its path or by its name among the run's own.

    Raises:
        InvalidInput: It names a folder, a model of a hub, or nothing.
    """
    if name.startswith((SCHEME, OTHER_SCHEME)):
        return parse_checkpoint_path(name, field=field)
    if "/" in name or "\\" in name or name.startswith("~"):
        raise InvalidInput(field, NO_FOLDERS)
    return CheckpointPath(run_id, "weights", validate_name(name, field=field))


def _tokens_of(row: Any, place: int) -> int:
    if not isinstance(row, Mapping):
        raise InvalidInput(f"inputs[{place}]", "must be an object: a row or a conversation")
    tokens = row.get("input_ids")
    if isinstance(tokens, list):
        return sum(len(one) if isinstance(one, list) else 1 for one in tokens)
    return _num_bytes(row)


def _num_bytes(value: object) -> int:
    """Bytes of the texts in a value, however deep; the parser has bounded how deep that is."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, Mapping):
        return sum(_num_bytes(one) for one in value.values())
    return sum(_num_bytes(one) for one in value) if isinstance(value, list) else 0
