"""A traced loss, from the client's JSON to :class:`twinkle.core.loss_graph.LossGraph`: judged, never executed.

Nothing is taken on trust: what a graph may call is a list of ours, references point backwards only (so there are no
loops), and everything is counted. What depends on the sizes of tensors is judged where the graph is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from twinkle.core import loss_operations as operations
from twinkle.core.errors import InvalidInput
from twinkle.core.loss_graph import AllDimensions, Call, Constant, Input, Items, LossGraph, Ref, Slice, Value
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.losses import CreateCustomLossRequest, CustomLossNode

MAX_GRAPH_BYTES = 1 << 18
MAX_NODES = 512
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_VALUES = 1 << 14
MAX_DEPTH = 8
MAX_TEXT = 128

_MAX_INT = 2**63 - 1
_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}", re.ASCII)
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)", re.ASCII)
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_CONSTANTS: Mapping[str, frozenset[str] | None] = {
    "dtype": operations.DTYPES,
    "device": None,
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format"}),
}
_HOST_METHODS = frozenset({"item", "numpy", "tolist", "backward"})


def parse_loss_graph(raw: bytes) -> LossGraph:
    """Reads the body of a ``create_custom_loss``; raises ``InvalidInput`` that names the node and what to do."""
    return read_loss_graph(parse_body(CreateCustomLossRequest, raw))


def check_graph_size(raw: bytes) -> None:
    """Refuses the body of a ``create_custom_loss`` that is too long to be read."""
    if len(raw) > MAX_GRAPH_BYTES:
        raise InvalidInput("graph", f"is {len(raw)} bytes long, the limit is {MAX_GRAPH_BYTES}; make the loss smaller")


def read_loss_graph(body: CreateCustomLossRequest) -> LossGraph:
    """The graph of a body whose form is right."""
    _check_inputs(body)
    nodes = body.graph.nodes
    if not 1 <= len(nodes) <= MAX_NODES:
        raise InvalidInput("graph.nodes", f"are {len(nodes)}, the limit is {MAX_NODES}; make the loss smaller")
    reader = _Reader()
    inputs: list[Input] = []
    calls: list[Call] = []
    for node in nodes[:-1]:
        if node.op == "placeholder":
            inputs.append(_read_input(body, node, len(inputs), after_calls=bool(calls)))
        else:
            calls.append(reader.call(node))
        reader.add(node)
    if len(inputs) != len(body.inputs):
        raise InvalidInput("graph.nodes", f"take {len(inputs)} inputs, but {len(body.inputs)} are declared")
    loss, metrics = reader.output(nodes[-1])
    return LossGraph(name=body.name, inputs=tuple(inputs), calls=tuple(calls), loss=loss, metrics=metrics)


def _check_inputs(body: CreateCustomLossRequest) -> None:
    if not 1 <= len(body.name) <= MAX_TEXT:
        raise InvalidInput("name", f"must have 1 to {MAX_TEXT} characters")
    if not 1 <= len(body.inputs) <= MAX_INPUTS:
        raise InvalidInput("inputs", f"are {len(body.inputs)}, must be 1 to {MAX_INPUTS}, logprobs included")
    names = [loss_input.name for loss_input in body.inputs]
    for name in names:
        if not _INPUT_NAME.fullmatch(name):
            raise InvalidInput("inputs", f"{_shown(name)} must be a lowercase name of letters, digits and underscores")
    if names[0] != "logprobs" or body.inputs[0].rank == 0:
        raise InvalidInput("inputs", "must begin with logprobs, of rank 1 ([T]) or 2 ([T, K])")
    if len(set(names)) < len(names):
        raise InvalidInput("inputs", "must have different names")


def _read_input(body: CreateCustomLossRequest, node: CustomLossNode, position: int, *, after_calls: bool) -> Input:
    declared = body.inputs[position] if position < len(body.inputs) else None
    if after_calls or declared is None or declared.name != node.target:
        raise InvalidInput(_field(node), "is not the next of the declared inputs; placeholders come first, in order")
    if node.args or node.kwargs:
        raise InvalidInput(_field(node), "has a default; every input after logprobs must be in the datum")
    return Input(node=node.name, name=declared.name, rank=declared.rank)


class _Reader:
    """Reads nodes one after another and knows those before."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._num_values = 0

    def add(self, node: CustomLossNode) -> None:
        """Let later nodes refer to this one."""
        if not _NODE_NAME.fullmatch(node.name):
            raise InvalidInput("graph.nodes", f"{_shown(node.name)} is no name of letters, digits and underscores")
        if node.name in self._known:
            raise InvalidInput(_field(node), "is there twice")
        self._known.add(node.name)

    def call(self, node: CustomLossNode) -> Call:
        """A call of something allowed."""
        if node.op == "call_function":
            if node.target not in operations.FUNCTIONS:
                raise InvalidInput(_field(node), _not_offered(f"the function {_shown(node.target)}"))
            _check_attribute(node)
        elif node.op == "call_method":
            _check_method(node)
        else:
            _refuse_op(node)
        for key, value in node.kwargs.items():
            is_default = value is None or value is False
            if key not in operations.KEYWORDS or (key in operations.DEFAULT_KEYWORDS and not is_default):
                raise InvalidInput(
                    _field(node), f"has the argument {_shown(key)}, which is not offered here; leave it out"
                )
        return Call(
            node=node.name,
            kind="function" if node.op == "call_function" else "method",
            target=node.target,
            args=tuple(self._value(node, value) for value in node.args),
            kwargs=tuple((key, self._value(node, value)) for key, value in node.kwargs.items()),
        )

    def output(self, node: CustomLossNode) -> tuple[Ref, tuple[tuple[str, Ref], ...]]:
        """The loss and the metrics."""
        if node.op != "output":
            raise InvalidInput(_field(node), "is the last node and must be the output")
        returned = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if isinstance(returned, dict):
            returned = returned.get("tuple")
        if not isinstance(returned, list) or len(returned) != 2:
            raise InvalidInput(_field(node), "must return (loss, metrics)")
        loss = self._value(node, returned[0])
        if not isinstance(loss, Ref):
            raise InvalidInput(_field(node), "must return its loss as a tensor")
        return loss, self._metrics(node, returned[1])

    def _metrics(self, node: CustomLossNode, returned: object) -> tuple[tuple[str, Ref], ...]:
        named = returned.get("dict") if isinstance(returned, dict) and len(returned) == 1 else None
        if not isinstance(named, dict) or len(named) > MAX_METRICS:
            raise InvalidInput(_field(node), f"must return its metrics as a dict of at most {MAX_METRICS}")
        metrics = []
        for key, encoded in named.items():
            if not _METRIC.fullmatch(key):
                raise InvalidInput(
                    _field(node), f"metric {_shown(key)} must be named custom/<name>:sum or custom/<name>:mean"
                )
            value = self._value(node, encoded)
            if not isinstance(value, Ref):
                raise InvalidInput(_field(node), f"metric {_shown(key)} must be a tensor")
            metrics.append((key, value))
        return tuple(metrics)

    def _value(self, node: CustomLossNode, encoded: Any, depth: int = 0) -> Value:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise InvalidInput("graph", f"has more than {MAX_VALUES} arguments; make the loss smaller")
        if depth > MAX_DEPTH:
            raise InvalidInput(_field(node), f"has arguments nested deeper than {MAX_DEPTH}")
        if encoded is None or isinstance(encoded, bool):
            return encoded
        if isinstance(encoded, (int, float)):
            return _number(node, encoded)
        if isinstance(encoded, str):
            return _text(node, encoded)
        if isinstance(encoded, list):
            return Items("list", tuple(self._value(node, value, depth + 1) for value in encoded))
        if not isinstance(encoded, dict) or len(encoded) != 1:
            raise InvalidInput(
                _field(node), "has an argument that is neither a scalar, a list nor an object of one key"
            )
        ((key, inner),) = encoded.items()
        return self._tagged(node, key, inner, depth)

    def _tagged(self, node: CustomLossNode, key: str, inner: Any, depth: int) -> Value:
        match key, inner:
            case "ref", str() if inner in self._known:
                return Ref(inner)
            case "ref", _:
                raise InvalidInput(_field(node), f"refers to {_shown(inner)}, which is no node before it")
            case "tuple", list():
                return Items("tuple", tuple(self._value(node, value, depth + 1) for value in inner))
            case "slice", [start, stop, step]:
                return Slice(*(self._value(node, value, depth + 1) for value in (start, stop, step)))
            case "ellipsis", True:
                return AllDimensions()
            case "float", str() if inner in _FLOATS:
                return _FLOATS[inner]
            case "dtype" | "device" | "layout" | "memory_format", str():
                return _constant(node, key, inner)
            case _:
                raise InvalidInput(_field(node), f"has an argument of kind {_shown(key)} that means nothing here")


def _constant(node: CustomLossNode, kind: str, name: str) -> Constant:
    allowed = _CONSTANTS[kind]
    if len(name) > MAX_TEXT or (allowed is not None and name not in allowed):
        offered = "" if allowed is None else f"; use one of {', '.join(sorted(allowed))}"
        raise InvalidInput(_field(node), f"has the {kind} {_shown(name)}, which is not offered here{offered}")
    return Constant(cast(Any, kind), name)


def _number(node: CustomLossNode, value: float) -> int | float:
    if isinstance(value, int) and abs(value) > _MAX_INT:
        raise InvalidInput(_field(node), "has a whole number of more than 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(_field(node), 'has a number that is not finite; it is written {"float": "inf"}')
    return value


def _text(node: CustomLossNode, value: str) -> str:
    if len(value) > MAX_TEXT:
        raise InvalidInput(_field(node), f"has a text of {len(value)} characters, the limit is {MAX_TEXT}")
    return value


def _check_attribute(node: CustomLossNode) -> None:
    name = node.args[1] if len(node.args) == 2 else None
    if node.target == "getattr" and not (isinstance(name, str) and name in operations.ATTRIBUTES):
        raise InvalidInput(_field(node), _not_offered(f"the attribute {_shown(name)}"))


def _check_method(node: CustomLossNode) -> None:
    if node.target in operations.METHODS:
        return
    shown = f"the method {_shown(node.target)}"
    if node.target in _HOST_METHODS:
        raise InvalidInput(_field(node), f"calls {shown}, which leaves torch; keep every value as a tensor")
    if node.target.endswith("_") and node.target[:-1] in operations.METHODS:
        raise InvalidInput(_field(node), f"calls {shown}, which changes a value in place; use {node.target[:-1]!r}")
    raise InvalidInput(_field(node), _not_offered(shown))


def _refuse_op(node: CustomLossNode) -> NoReturn:
    reason = {
        "placeholder": "is an input behind a call",
        "output": "is an output, but not the last node",
        "get_attr": "captures a tensor; a loss reads only logprobs and the datum's inputs it names",
        "call_module": "calls a module; use functions such as torch.nn.functional",
    }[node.op]
    raise InvalidInput(_field(node), reason)


def _not_offered(what: str) -> str:
    return (
        f"uses {what}, which is not offered in a loss that runs on the server; write it with other operations, or pass"
        " the function itself to forward_backward_custom, which then runs it on the client"
    )


def _field(node: CustomLossNode) -> str:
    return f"graph.nodes[{_shown(node.name)}]"


def _shown(text: object) -> str:
    return repr(str(text)[:MAX_TEXT])
