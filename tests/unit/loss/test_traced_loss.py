"""A client's traced loss on the server: torch's own numbers, operation by operation, and limits that hold."""

from __future__ import annotations

import math
import operator
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker.lib.public_interfaces.custom_loss import trace_loss

from harness import traced_losses
from harness.traced_losses import graph_of
from twinkle.core import loss_operations as names
from twinkle.core.errors import UserError
from twinkle.core.loss_graph import AllDimensions, Call, Constant, Input, Items, LossGraph, Ref, Slice, Value
from twinkle.loss import TracedLoss
from twinkle.loss.graph_run import MAX_CELLS, run_graph

X = torch.tensor([[0.3, 0.6, 0.2], [0.9, 0.1, 0.5], [0.7, 0.4, 0.8]])
Y = torch.tensor([[0.5, 0.2, 0.7], [0.3, 0.8, 0.6], [0.1, 0.9, 0.4]])
TENSORS = {
    "x": X,
    "y": Y,
    "v": X[0].clone(),
    "w": Y[1].clone(),
    "b": X > 0.5,
    "c": Y > 0.5,
    "i": torch.tensor([[0, 2, 1], [1, 0, 2], [2, 1, 0]]),
    "j": torch.tensor([2, 0]),
    "j3": torch.tensor([0, 2, 1]),
    "z": torch.stack([X, Y]),
}
x, y, v, w, b, c, i, j, _, z = (Ref(name) for name in TENSORS)


def words(text: str) -> list[str]:
    return text.split()


UNARY = words(
    """
    abs absolute acos acosh all amax amin aminmax any argmax argmin asin asinh atan atanh ceil clone cos cosh
    count_nonzero detach diff erf erfc exp exp2 expm1 fix floor frac isfinite isinf isnan isneginf isposinf log log10
    log1p log2 logit max mean median min nan_to_num nanmean nanmedian nansum neg negative norm positive prod reciprocal
    relu round rsqrt sgn sigmoid sign sin sinc sinh sqrt square std sum tan tanh tril triu trunc var argsort digamma
    erfinv lgamma sort diag diag_embed flatten ravel squeeze t unbind diagonal
"""
)
BINARY = words(
    """
    add atan2 copysign dist div divide eq float_power floor_divide fmax fmin fmod ge greater greater_equal gt
    heaviside hypot isclose le less less_equal logaddexp logaddexp2 lt maximum minimum mul multiply ne not_equal pow
    remainder sub subtract true_divide xlogy mm matmul kron
"""
)
SAMPLES: dict[str, tuple[Value, ...]] = {
    **{name: (x,) for name in UNARY},
    **{name: (x, y) for name in BINARY},
    **{
        name: (b, c)
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor")
    },
    **{name: (b,) for name in ("bitwise_not", "logical_not")},
    **{name: (v, w) for name in ("dot", "inner", "vdot", "outer")},
    **{name: (x, 0) for name in ("cummax", "cummin", "cumprod", "cumsum", "logcumsumexp", "log_softmax", "logsumexp")},
    "softmax": (x, 1),
    "addcdiv": (x, x, y),
    "addcmul": (x, x, y),
    "clamp": (x, 0.3, 0.6),
    "clip": (x, 0.3, 0.6),
    "clamp_max": (x, 0.5),
    "clamp_min": (x, 0.5),
    "lerp": (x, y, 0.25),
    "masked_fill": (x, b, 0.0),
    "masked_select": (x, b),
    "kthvalue": (x, 2),
    "topk": (x, 2),
    "flip": (x, Items("tuple", (0,))),
    "moveaxis": (x, 0, 1),
    "movedim": (x, 0, 1),
    "narrow": (x, 0, 1, 2),
    "permute": (x, Items("tuple", (1, 0))),
    "reshape": (x, Items("tuple", (9,))),
    "roll": (x, 1, 0),
    "select": (x, 0, 1),
    "swapaxes": (x, 0, 1),
    "swapdims": (x, 0, 1),
    "transpose": (x, 0, 1),
    "unflatten": (v, 0, Items("tuple", (3, 1))),
    "unsqueeze": (x, 1),
    "gather": (x, 0, i),
    "index_add": (x, 0, Ref("j3"), y),
    "index_fill": (x, 0, j, 1.0),
    "index_select": (x, 0, j),
    "repeat_interleave": (x, 2),
    "scatter": (x, 0, i, y),
    "scatter_add": (x, 0, i, y),
    "take": (x, j),
    "take_along_dim": (x, i, 1),
    "tile": (x, Items("tuple", (2, 1))),
    "bmm": (z, z),
    "mv": (x, v),
    "chunk": (x, 2),
    "split": (x, 2),
}
FUNCTION_SAMPLES: dict[str, tuple[Value, ...]] = {
    **{name: (x, y) for name in names.POINTWISE_FUNCTIONS if name.endswith(("_loss", "kl_div", "cosine_similarity"))},
    **{
        name: (x,)
        for name in names.POINTWISE_FUNCTIONS
        if name.startswith(("torch._C._nn", "torch.nn.functional"))
        and not name.endswith(("_loss", "kl_div", "entropy", "logits"))
    },
    **{name: (x,) for name in names.POINTWISE_FUNCTIONS if "_special" in name},
    **{name: (x, y) for name in names.POINTWISE_FUNCTIONS if name.startswith("operator.")},
    **{f"operator.{name}": (b, c) for name in ("and_", "or_", "xor")},
    **{f"operator.{name}": (i, 1) for name in ("lshift", "rshift")},
    **{name: (0.5,) for name in names.NUMBER_FUNCTIONS},
    **{f"math.{name}": (0.5, 2.0) for name in ("atan2", "copysign", "hypot", "pow")},
    **{name: (Items("list", (x, y)),) for name in names.JOINING_FUNCTIONS},
    "operator.invert": (b,),
    "operator.abs": (x,),
    "torch.nn.functional.kl_div": (x, y, None, None, "sum"),
    "operator.neg": (x,),
    "operator.pos": (x,),
    "operator.matmul": (x, y),
    "operator.getitem": (x, Items("tuple", (Slice(1, None, None), AllDimensions(), None, j))),
    "getattr": (x, "T"),
    "torch.full_like": (x, 2.0),
    "torch.ones_like": (x,),
    "torch.zeros_like": (x,),
    "torch.std_mean": (x,),
    "torch.var_mean": (x,),
    "torch.where": (b, x, y),
    "torch.functional.norm": (x,),
    "torch.cosine_similarity": (x, y),
    "torch.nn.functional.binary_cross_entropy": (x, y),
    "torch.nn.functional.binary_cross_entropy_with_logits": (x, y),
    "torch.nn.functional.margin_ranking_loss": (x, y, y),
    "torch.nn.functional.softmax": (x, 0),
    "torch.nn.functional.log_softmax": (x, 0),
    "torch.nn.functional.softmin": (x, 0),
    "torch._C._special.special_xlogy": (x, y),
    "torch._C._special.special_softmax": (x, 0),
    "torch._C._special.special_log_softmax": (x, 0),
    "torch._C._special.special_logsumexp": (x, 0),
    "torch.arange": (5,),
    "torch.eye": (3,),
    "torch.full": (Items("tuple", (2, 3)), 1.5),
    "torch.linspace": (0.0, 1.0, 5),
    "torch.ones": (2, 3),
    "torch.zeros": (2, 3),
    "torch.broadcast_to": (v, Items("tuple", (4, 3))),
    "torch._C._nn.one_hot": (j, 4),
    "torch._C._nn.pad": (x, Items("tuple", (1, 1))),
    "torch.nn.functional.pad": (x, Items("tuple", (1, 1))),
    "torch._C._nn.linear": (x, y),
    "torch.functional.split": (x, 2),
    "torch.einsum": ("ij,kj->ik", x, y),
    "torch.functional.einsum": ("ij,kj->ik", x, y),
}
METHOD_SAMPLES: dict[str, tuple[Value, ...]] = {
    **{name: (x,) for name in names.POINTWISE_METHODS | names.NUMBER_METHODS},
    "new_tensor": (x, Items("list", (1.0, 2.0))),
    "to": (x, Constant("dtype", "float64")),
    "type_as": (x, i),
    "where": (x, b, y),
    "reshape_as": (x, y),
    "view": (x, 9),
    "view_as": (x, y),
    "expand": (v, 4, 3),
    "expand_as": (v, y),
    "new_full": (x, Items("tuple", (2, 2)), 3.0),
    "new_ones": (x, 2, 2),
    "new_zeros": (x, 2, 2),
    "repeat": (x, 2, 1),
    "unfold": (v, 0, 2, 1),
}


def plain(value: Value) -> Any:
    """An argument as torch takes it."""
    match value:
        case Ref(name):
            return TENSORS[name]
        case Items("list", values):
            return [plain(inner) for inner in values]
        case Items(_, values):
            return tuple(plain(inner) for inner in values)
        case Slice(start, stop, step):
            return slice(start, stop, step)
        case AllDimensions():
            return ...
        case Constant("dtype", name):
            return getattr(torch, name)
        case _:
            return value


def graph_of_calls(*calls: Call) -> LossGraph:
    inputs = tuple(Input(node=name, name=name, rank=tensor.ndim) for name, tensor in TENSORS.items())
    return LossGraph(name="test", inputs=inputs, calls=calls, loss=Ref(calls[-1].node), metrics=())


def call(kind: str, target: str, args: tuple[Value, ...], node: str = "result", **kwargs: Value) -> Call:
    return Call(node=node, kind=kind, target=target, args=args, kwargs=tuple(kwargs.items()))  # type: ignore[arg-type]


def run(*calls: Call, **tensors: torch.Tensor) -> Any:
    return run_graph(graph_of_calls(*calls), list((TENSORS | tensors).values())).loss


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def torch_of(kind: str, name: str) -> Any:
    if kind == "method":
        return getattr(torch.Tensor, name)
    if name == "getattr":
        return getattr
    where = {"torch": torch, "math": math, "operator": operator}[name.partition(".")[0]]
    return operator.attrgetter(name.partition(".")[2])(where)


@pytest.mark.parametrize("name", sorted(names.FUNCTIONS))
def test_every_function_is_torchs_own(name: str) -> None:
    short = name.removeprefix("torch.")
    args = FUNCTION_SAMPLES.get(name) or SAMPLES[short]

    assert_same(run(call("function", name, args)), torch_of("function", name)(*(plain(value) for value in args)))


@pytest.mark.parametrize("name", sorted(names.METHODS))
def test_every_method_is_torchs_own(name: str) -> None:
    args = METHOD_SAMPLES.get(name) or SAMPLES[name]

    assert_same(run(call("method", name, args)), torch_of("method", name)(*(plain(value) for value in args)))


LOSSES = {
    "likelihood": (traced_losses.likelihood, {"logprobs": 1, "weights": 1}),
    "clipped_policy": (
        traced_losses.clipped_policy,
        {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "mask": 1},
    ),
    "preference": (traced_losses.preference, {"logprobs": 2, "reference_logprobs": 2, "beta": 0}),
    "distribution": (traced_losses.distribution, {"logprobs": 2, "target_distribution": 2}),
    "ranked": (traced_losses.ranked, {"logprobs": 1, "rewards": 1}),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_whole_loss_gives_what_the_traced_function_gives_on_the_client(case: str) -> None:
    loss, ranks = LOSSES[case]
    rng = np.random.default_rng(3)
    shapes = {0: (), 1: (7,), 2: (7, 2)}
    inputs = {name: rng.random(shapes[rank], dtype=np.float32) for name, rank in ranks.items()}
    logprobs = -torch.from_numpy(inputs.pop("logprobs"))

    traced = TracedLoss(graph=graph_of(loss, ranks))
    evaluation = traced.evaluate(logprobs, traced.tensors(inputs, torch.from_numpy))

    leaf = logprobs.clone().requires_grad_(True)
    handle = trace_loss(loss, ranks, "s")  # type: ignore[arg-type]
    expected, metrics = handle.graph(leaf, *(torch.as_tensor(inputs[name]) for name in handle.input_names))
    expected.backward()
    assert leaf.grad is not None
    assert torch.equal(evaluation.loss, expected.detach())
    assert torch.equal(evaluation.d_logprobs, leaf.grad)
    surrogate = float((leaf.grad * logprobs).sum())
    assert evaluation.metrics == {key: value.item() for key, value in metrics.items()} | {
        "surrogate_loss:sum": surrogate
    }


BILLION = 10**9
TOO_LARGE = {
    "expand": (call("method", "expand", (v, BILLION, 3)),),
    "expand to no cells": (call("method", "expand", (Ref("v"), 0, BILLION, 3)),),
    "no cells, then a sum": (
        call("method", "new_zeros", (x, 0, BILLION), "none"),
        call("method", "sum", (Ref("none"), 0)),
    ),
    "repeat": (call("method", "repeat", (x, BILLION, 1)),),
    "tile": (call("function", "torch.tile", (x, Items("tuple", (BILLION,)))),),
    "repeat_interleave": (call("function", "torch.repeat_interleave", (x, BILLION)),),
    "zeros": (call("function", "torch.zeros", (BILLION,)),),
    "zeros of overflowing size": (call("function", "torch.zeros", (2**40, 2**40)),),
    "full": (call("function", "torch.full", (Items("tuple", (BILLION, 4)), 1.0)),),
    "arange": (call("function", "torch.arange", (2**62,)),),
    "linspace": (call("function", "torch.linspace", (0.0, 1.0, 2**50)),),
    "eye": (call("function", "torch.eye", (BILLION,)),),
    "pad": (call("function", "torch._C._nn.pad", (v, Items("tuple", (0, BILLION)))),),
    "one_hot": (call("function", "torch._C._nn.one_hot", (j, BILLION)),),
    "new_full": (call("method", "new_full", (x, Items("tuple", (BILLION,)), 0.0)),),
    "broadcast_to": (call("function", "torch.broadcast_to", (v, Items("tuple", (BILLION, 3)))),),
    "outer": (
        call("function", "torch.zeros", (5000,), "long"),
        call("function", "torch.outer", (Ref("long"), Ref("long"))),
    ),
    "broadcasting": (
        call("function", "torch.zeros", (5000, 1), "tall"),
        call("function", "torch.zeros", (1, 5000), "wide"),
        call("function", "operator.add", (Ref("tall"), Ref("wide"))),
    ),
    "kron": (
        call("function", "torch.zeros", (100, 100), "one"),
        call("function", "torch.kron", (Ref("one"), Ref("one"))),
    ),
    "einsum": (
        call("function", "torch.zeros", (1000,), "one"),
        call("function", "torch.functional.einsum", ("i,j->ij", Ref("one"), Ref("one")), "two"),
        call("function", "torch.functional.einsum", ("ij,k->ijk", Ref("two"), Ref("one"))),
    ),
    "a long product": (
        call("function", "torch.zeros", (2000, 2000), "one"),
        call("function", "operator.matmul", (Ref("one"), Ref("one"))),
    ),
    "an index": (
        call("function", "torch.zeros", (4, 5000), "table"),
        call("function", "torch.zeros", (5000,), "zero"),
        call("method", "long", (Ref("zero"),), "places"),
        call("function", "operator.getitem", (Ref("table"), Ref("places"))),
    ),
    "gathering": (
        call("function", "torch.zeros", (1,), "zero"),
        call("method", "long", (Ref("zero"),), "place"),
        call("method", "expand", (Ref("place"), 2**24), "places"),
        call("function", "torch.index_select", (z, 0, Ref("places"))),
    ),
    "a mask of many dimensions": (
        call("function", "torch.zeros", (2**20,), "long"),
        call("method", "view", (Ref("long"), Items("tuple", (1,) * 40 + (-1,))), "deep"),
        call("function", "operator.eq", (Ref("deep"), 0), "mask"),
        call("function", "operator.getitem", (Ref("deep"), Ref("mask"))),
    ),
    "the places of a condition": (call("function", "torch.where", (b,)),),
    "pieces": (
        call("function", "torch.zeros", (5000,), "long"),
        call("method", "unbind", (Ref("long"),)),
    ),
    "doubling": tuple(
        call("function", "torch.cat", (Items("list", (Ref(f"n{n - 1}") if n else v,) * 2),), f"n{n}") for n in range(60)
    ),
    "a power of integers": (call("function", "operator.pow", (10, BILLION)),),
    "a tower of integers": tuple(
        call("function", "operator.pow", (Ref(f"n{n - 1}") if n else 9, 9), f"n{n}") for n in range(20)
    ),
    "a shift of integers": (call("function", "operator.lshift", (1, BILLION)),),
    "a long text": (call("function", "operator.mul", ("a", BILLION)),),
    "a long list": (call("function", "operator.mul", (Items("list", (1,)), BILLION)),),
    "slow work": (
        call("function", "torch.zeros", (2**20,), "long"),
        call("function", "torch.sort", (Ref("long"),)),
    ),
    "many calls on little": tuple(call("function", "torch.exp", (x,), f"n{n}") for n in range(2000)),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_what_would_take_much_memory_or_time_is_refused_before_it_does(case: str) -> None:
    started = time.thread_time()

    with pytest.raises(UserError, match=r"custom loss 'test': node '\w+' \([\w.]+\): "):
        run(*TOO_LARGE[case])

    assert time.thread_time() - started < 5


OUTSIDE = {
    "a tensor's value through math": (call("function", "math.exp", (v,)),),
    "an attribute that is no attribute here": (call("function", "getattr", (x, "__class__")),),
    "a tensor's storage": (call("function", "getattr", (x, "data_ptr")),),
    "a buffer that needs gradients": (call("method", "new_zeros", (x, 3), "result", requires_grad=True),),
    "a relu in place": (call("function", "torch.nn.functional.relu", (x,), "result", inplace=True),),
    "a nuclear norm": (call("method", "norm", (x, "nuc")),),
    "an einsum of three": (call("function", "torch.einsum", ("i,i,i->", v, v, v)),),
    "two masks": (call("function", "operator.getitem", (x, Items("tuple", (b, b)))),),
    "an index out of range": (call("function", "operator.getitem", (v, 3)),),
    "a place out of range": (call("method", "index_select", (v, 0, Ref("far"))),),
    "shapes that do not fit": (call("function", "operator.add", (v, j)),),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_goes_wrong_in_a_call_is_told_by_node(case: str) -> None:
    with pytest.raises(UserError, match=r"node 'result'"):
        run(*OUTSIDE[case], **({"j": torch.tensor([7])} if "far" in case else {}))


def test_a_mask_chooses_cells_and_a_size_is_a_number() -> None:
    chosen = run(call("function", "operator.getitem", (x, b)))
    size = run(
        call("function", "getattr", (x, "shape"), "shape"),
        call("function", "operator.getitem", (Ref("shape"), 0), "rows"),
        call("function", "operator.mul", (Ref("rows"), 2)),
    )

    assert torch.equal(chosen, X[X > 0.5])
    assert size == 6


def test_devices_and_layouts_of_the_client_mean_nothing_here() -> None:
    result = run(
        call("method", "to", (x, Constant("device", "cuda:3")), "there"),
        call("function", "torch.zeros_like", (Ref("there"),), "result", device=Constant("device", "mps")),
    )

    assert torch.equal(result, torch.zeros_like(X))


def evaluate(loss: Any, ranks: dict[str, int], logprobs: torch.Tensor, **inputs: np.ndarray) -> Any:
    traced = TracedLoss(graph=graph_of(loss, ranks))
    return traced.evaluate(logprobs, traced.tensors(inputs, torch.from_numpy))


BAD_RETURNS = {
    "not a scalar": (lambda logprobs: (logprobs * 2, {}), "scalar loss of floats"),
    "no gradient": (lambda logprobs: (logprobs.detach().sum(), {}), "does not depend on logprobs"),
    "not logprobs": (lambda logprobs: (logprobs.new_tensor([1.0]).sum(), {}), "does not depend on logprobs"),
    "an integer": (lambda logprobs: (logprobs.long().sum(), {}), "scalar loss of floats"),
    "not finite": (lambda logprobs: ((logprobs * 0).log().sum(), {}), "finite"),
    "a gradient that is not finite": (
        lambda logprobs: (torch.where(logprobs < 0, logprobs, (logprobs * 0).sqrt()).sum(), {}),
        "discarded branch",
    ),
    "a metric that is a row": (lambda logprobs: (logprobs.sum(), {"custom/a:sum": logprobs}), "'custom/a:sum' must be"),
}


@pytest.mark.parametrize("case", BAD_RETURNS)
def test_what_is_no_loss_is_refused(case: str) -> None:
    loss, message = BAD_RETURNS[case]

    with pytest.raises(UserError, match=message):
        evaluate(loss, {"logprobs": 1}, torch.tensor([-1.0, -2.0]))


VALUES = st.one_of(
    st.sampled_from([Ref(name) for name in TENSORS]),
    st.sampled_from(
        [Constant("dtype", "float64"), Constant("dtype", "bool"), AllDimensions(), None, True, "sum", "i,j->ij"]
    ),
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**62, -(2**62), 10**7]),
    st.floats(allow_nan=True),
    st.builds(lambda values: Items("tuple", tuple(values)), st.lists(st.integers(-2, 2**33), max_size=4)),
    st.builds(lambda start, stop: Slice(start, stop, None), st.integers(-5, 5), st.integers(-5, 5)),
)
CALLS = st.one_of(
    st.tuples(st.just("function"), st.sampled_from(sorted(names.FUNCTIONS))),
    st.tuples(st.just("method"), st.sampled_from(sorted(names.METHODS))),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_calls_of_anything_with_anything_end_in_small_values_or_a_refusal(data: st.DataObject) -> None:
    chain: list[Call] = []
    for number in range(data.draw(st.integers(1, 4))):
        kind, target = data.draw(CALLS)
        earlier = st.sampled_from([Ref(one.node) for one in chain]) if chain else st.nothing()
        args = tuple(data.draw(st.lists(earlier | VALUES, min_size=1, max_size=3)))
        chain.append(call(kind, target, args, f"n{number}"))
    try:
        result = run(*chain)
    except UserError:
        return
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        assert not isinstance(tensor, torch.Tensor) or tensor.numel() <= MAX_CELLS
