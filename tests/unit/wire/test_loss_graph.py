"""Reading a client's traced loss: what the SDK sends is understood, everything else refused with a reason."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from harness import traced_losses
from harness.hostile import hostile_json
from harness.traced_losses import encoded
from twinkle.core.errors import UserError
from twinkle.core.loss_graph import LossGraph, Ref
from twinkle.wire.loss_graph import MAX_NODES, parse_loss_graph

LIKELIHOOD = encoded(traced_losses.likelihood, {"logprobs": 1, "weights": 1})
RICH = encoded(traced_losses.ranked, {"logprobs": 1, "rewards": 1})


def read(body: dict[str, Any]) -> LossGraph:
    return parse_loss_graph(json.dumps(body).encode())


def changed(change: str, value: object, node: str | None = None) -> dict[str, Any]:
    body = copy.deepcopy(LIKELIHOOD)
    place = body if node is None else next(one for one in body["graph"]["nodes"] if one["name"] == node)
    place[change] = value
    return body


def test_a_graph_of_the_sdk_is_read_as_it_was_traced() -> None:
    graph = read(LIKELIHOOD)

    assert graph.name == "likelihood"
    assert [(one.name, one.rank) for one in graph.inputs] == [("logprobs", 1), ("weights", 1)]
    assert [(call.kind, call.target) for call in graph.calls] == [
        ("function", "operator.mul"),
        ("method", "sum"),
        ("function", "operator.neg"),
    ]
    assert graph.loss == Ref("neg") == dict(graph.metrics)["custom/likelihood:sum"]


BAD = {
    "an operation outside the list": (changed("target", "os.system", "mul"), "os.system.*not offered"),
    "a private path": (changed("target", "torch._C._jit_pass", "mul"), "not offered"),
    "a host method": (changed("target", "item", "sum_1"), "leaves torch"),
    "a method in place": (changed("target", "exp_", "sum_1"), "in place; use 'exp'"),
    "a dunder method": (changed("target", "__class__", "sum_1"), "not offered"),
    "a captured tensor": (changed("op", "get_attr", "mul"), "captures a tensor"),
    "a module": (changed("op", "call_module", "mul"), "calls a module"),
    "an unknown op": (changed("op", "exec", "mul"), "op"),
    "a keyword that writes": (changed("kwargs", {"out": {"ref": "logprobs"}}, "mul"), "'out'.*not offered"),
    "an attribute of the object": (
        changed("target", "getattr", "mul") | {},
        "uses",
    ),
    "a reference ahead": (changed("args", [{"ref": "neg"}, 1], "mul"), "no node before it"),
    "a reference to itself": (changed("args", [{"ref": "mul"}, 1], "mul"), "no node before it"),
    "a name twice": (changed("name", "mul", "sum_1"), "there twice"),
    "a name that is no name": (changed("name", "x.__class__", "mul"), "no name of letters"),
    "a large integer": (changed("args", [{"ref": "logprobs"}, 2**63], "mul"), "64 bits"),
    "a strange object": (changed("args", [{"eval": "1"}], "mul"), "'eval'.*means nothing"),
    "a callable": (changed("args", [{"ref": "logprobs", "tuple": []}], "mul"), "one key"),
    "a complex dtype": (changed("args", [{"dtype": "complex64"}], "mul"), "complex64.*not offered"),
    "nesting": (changed("args", [[[[[[[[[[1]]]]]]]]]], "mul"), "nested deeper"),
    "no output": (changed("op", "call_method", "output"), "must be the output"),
    "a loss that is a number": (changed("args", [{"tuple": [1.0, {"dict": {}}]}], "output"), "loss as a tensor"),
    "a metric of the service's own name": (
        changed("args", [{"tuple": [{"ref": "neg"}, {"dict": {"loss:sum": {"ref": "neg"}}}]}], "output"),
        "custom/<name>:sum",
    ),
    "an input with a default": (changed("args", [1.0], "weights"), "has a default"),
    "another input": (changed("target", "advantages", "weights"), "next of the declared inputs"),
    "logprobs not first": (changed("inputs", [{"name": "weights", "rank": 1}]), "begin with logprobs"),
    "too many inputs": (
        changed("inputs", [{"name": "logprobs", "rank": 1}] + [{"name": f"a{i}", "rank": 1} for i in range(16)]),
        "1 to 16",
    ),
    "a rank of 3": (changed("inputs", [{"name": "logprobs", "rank": 3}]), "rank"),
    "another format": (changed("graph", {"format": 2, "nodes": []}), "format"),
    "no nodes": (changed("graph", {"format": 1, "nodes": []}), "graph.nodes"),
    "too many nodes": (changed("graph", {"format": 1, "nodes": LIKELIHOOD["graph"]["nodes"] * MAX_NODES}), "512"),
    "a number beyond the last": (changed("custom_loss_seq_id", 1000), "custom_loss_seq_id"),
    "no name": (changed("name", ""), "name"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_allowed_is_refused_by_name(case: str) -> None:
    body, message = BAD[case]

    with pytest.raises(UserError, match=message):
        read(body)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(raw=hostile_json(RICH))  # type: ignore[arg-type]
def test_whatever_comes_is_a_graph_or_a_refusal(raw: bytes) -> None:
    try:
        graph = parse_loss_graph(raw)
    except UserError:
        return
    assert 1 <= len(graph.inputs) <= 16
