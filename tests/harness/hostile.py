"""Hypothesis strategies for what nobody should send: bytes and JSON a few steps beside what is valid."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import TypeAlias

from hypothesis import strategies as st

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"

PIECES = st.binary(max_size=12) | st.sampled_from(
    [b"\xff" * 9 + b"\x01", b"\x80\x80\x80\x08", b"NaN", b"null", b"1e999", b"{"]
)
TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        "\x00",
        "a\x00b",
        "\ud800",
        "a" * 5000,
        "..",
        "../../etc/passwd",
        "tinker://",
        "tinker:///weights/",
        "%00",
        "'; --",
    ]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([-1, 0, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, 1e308, -0.0])


def _nested(depth: int) -> Json:
    nested: Json = []
    for _ in range(depth):
        nested = [nested]
    return nested


VALUES: st.SearchStrategy[Json] = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    TEXTS,
    st.builds(_nested, st.integers(1, 150)),
    st.lists(NUMBERS | TEXTS, max_size=4),
    st.dictionaries(TEXTS, NUMBERS | TEXTS, max_size=4),
)


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """Up to four places of `valid` cut out or overwritten."""
    raw = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        end = min(len(raw), start + draw(st.integers(0, 8)))
        raw = raw[:start] + draw(PIECES) + raw[end:]
    return raw


@st.composite
def hostile_json(draw: st.DrawFn, valid: Json) -> bytes:
    """`valid`, with up to three values replaced, removed or added; sometimes with broken bytes on top."""
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        containers = [one for one in _containers(body) if one]
        if not containers:
            break
        container = draw(st.sampled_from(containers))
        key = draw(st.sampled_from(list(container) if isinstance(container, dict) else range(len(container))))
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                container[key] = draw(VALUES)
            case "remove":
                del container[key]
            case _ if isinstance(container, dict):
                container[draw(TEXTS)] = draw(VALUES)
            case _:
                container.insert(key, draw(VALUES))
    raw = json.dumps(body).encode()
    return draw(mutated(raw)) if draw(st.integers(0, 5)) == 0 else raw


def _containers(node: Json) -> Iterator[dict[str, Json] | list[Json]]:
    if isinstance(node, dict | list):
        yield node
        for child in node.values() if isinstance(node, dict) else node:
            yield from _containers(child)
