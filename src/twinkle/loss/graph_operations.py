"""What a traced loss's calls mean: our own table of torch's operations, by the names torch.fx writes.

No name of a client is ever looked up anywhere but in this table; ``core/loss_operations.py`` says what is in it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from twinkle.core import loss_operations as names
from twinkle.loss import graph_bounds as bounds
from twinkle.loss.graph_bounds import Bound

_MAX_SHIFT = 63
_MAX_JOINED = 16
_CREATORS = ("torch.arange", "torch.eye", "torch.full", "torch.linspace", "torch.ones", "torch.zeros")

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in names.DTYPES})


@dataclass(frozen=True)
class Operation:
    """Something a graph may call, and how to judge a call of it beforehand."""

    call: Callable[..., Any]
    bound: Bound


# -- operations that need more than torch's own function --------------------------------------------------------------


def _attribute(value: Any, name: Any) -> Any:
    if isinstance(value, torch.Tensor) and name in _TENSOR_ATTRIBUTES:
        return _TENSOR_ATTRIBUTES[name](value)
    if isinstance(value, tuple) and len(value) == 2 and name in {"values", "indices"}:
        return value[("values", "indices").index(name)]
    raise ValueError(f"has no attribute {str(name)[:100]!r} here; there are {', '.join(sorted(names.ATTRIBUTES))}")


_TENSOR_ATTRIBUTES: Mapping[str, Callable[[torch.Tensor], Any]] = MappingProxyType(
    {
        "T": lambda tensor: tensor.T,
        "data": lambda tensor: tensor.detach(),
        "device": lambda tensor: tensor.device,
        "dtype": lambda tensor: tensor.dtype,
        "mT": lambda tensor: tensor.mT,
        "ndim": lambda tensor: tensor.ndim,
        "shape": lambda tensor: tensor.shape,
    }
)


def _to(tensor: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, other: Any = None) -> torch.Tensor:
    """``Tensor.to``; there is one device, so only a dtype counts."""
    for value in (*args, other):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.Tensor):
            dtype = value.dtype
    return tensor if dtype is None else tensor.to(dtype)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _norm(tensor: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> torch.Tensor:
    if p not in (None, "fro") and not isinstance(p, (int, float)):
        raise ValueError("p must be a number or 'fro'; the nuclear norm is not offered")
    return torch.norm(tensor, p=p, dim=dim, keepdim=keepdim, dtype=dtype)


def _diff(tensor: torch.Tensor, n: int = 1, dim: int = -1) -> torch.Tensor:
    if n != 1:
        raise ValueError("n must be 1; call it again instead")
    return torch.diff(tensor, dim=dim)


def _einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.einsum(equation, *operands)
    return result


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    return functional.one_hot(tensor, num_classes)


def _bound_one_hot(_: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> bounds.Bounded:
    tensor = next(bounds.tensors_in([*args, *kwargs.values()]))
    num_classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    if not isinstance(num_classes, int) or num_classes < 1:
        raise ValueError("num_classes must be given, and be 1 or more")
    cells = bounds.count_cells(tensor) * num_classes
    return bounds.Bounded(cells, cells)


def _where(condition: torch.Tensor, values: Any, other: Any) -> torch.Tensor:
    """With both alternatives: without them it lists places, once for each of any number of dimensions."""
    return torch.where(condition, values, other)


def _where_of(values: torch.Tensor, condition: torch.Tensor, other: Any) -> torch.Tensor:
    return torch.where(condition, values, other)


def _unbind(tensor: torch.Tensor, dim: int = 0) -> Any:
    bounds.number_of_pieces(tensor, dim, 1)
    return torch.unbind(tensor, dim)


def _split(tensor: torch.Tensor, split_size_or_sections: Any = 1, dim: int = 0, split_size: Any = None) -> Any:
    size = split_size_or_sections if split_size is None else split_size
    if isinstance(size, int):
        bounds.number_of_pieces(tensor, dim, size)
    return torch.split(tensor, size, dim)


def _chunk(tensor: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    bounds.number_of_pieces(tensor, dim, -(-tensor.shape[dim] // max(chunks, 1)))
    return torch.chunk(tensor, chunks, dim)


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``math``, which would take a tensor's value out of torch."""

    def call(*values: Any) -> Any:
        if not all(isinstance(value, (int, float)) for value in values):
            raise TypeError("takes numbers; use torch's function of that name for tensors")
        return function(*values)

    return call


def _of_numbers_and_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Python operator, which on texts, lists and the like would do something else."""

    def call(*values: Any) -> Any:
        if not all(isinstance(value, (int, float, torch.Tensor)) for value in values):
            raise TypeError("takes tensors and numbers")
        return function(*values)

    return call


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) + len(right) <= _MAX_JOINED:
        return tuple(left) + tuple(right)
    return _of_numbers_and_tensors(operator.add)(left, right)


def _pow(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and exponent > _MAX_SHIFT:
        raise OverflowError("the whole number has more than 64 bits")
    return _of_numbers_and_tensors(operator.pow)(base, exponent)


def _shift(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(value: Any, places: Any) -> Any:
        if not isinstance(places, torch.Tensor) and not 0 <= places <= _MAX_SHIFT:
            raise OverflowError(f"shifts by 0 to {_MAX_SHIFT} places")
        return _of_numbers_and_tensors(function)(value, places)

    return call


def _item(value: Any, index: Any) -> Any:
    if not isinstance(value, (tuple, list, torch.Tensor)):
        raise TypeError("takes an item of a tensor or of a tuple")
    return value[index]


# -- the table --------------------------------------------------------------------------------------------------------

_OWN: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "chunk": _chunk,
        "diff": _diff,
        "norm": _norm,
        "split": _split,
        "unbind": _unbind,
    }
)
"""For a function and for a method of this name alike."""

_OWN_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "getattr": _attribute,
        "operator.add": _add,
        "operator.getitem": _item,
        "operator.lshift": _shift(operator.lshift),
        "operator.pow": _pow,
        "operator.rshift": _shift(operator.rshift),
        "torch._C._nn.one_hot": _one_hot,
        "torch.einsum": _einsum,
        "torch.functional.einsum": _einsum,
        "torch.functional.norm": _norm,
        "torch.functional.split": _split,
        "torch.where": _where,
    }
)
_OWN_METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType({"cpu": _same, "to": _to, "where": _where_of})

_OWN_BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "getattr": bounds.free,
        "operator.getitem": bounds.indexed,
        "operator.lshift": bounds.pointwise,
        "operator.rshift": bounds.pointwise,
        "torch._C._nn.one_hot": _bound_one_hot,
        "torch.einsum": bounds.einsum,
        "torch.functional.einsum": bounds.einsum,
        "torch.nn.functional.binary_cross_entropy": bounds.slow,
        **dict.fromkeys(_CREATORS, bounds.created),
    }
)


def _function_of(name: str) -> Callable[..., Any]:
    if name in _OWN_FUNCTIONS:
        return _OWN_FUNCTIONS[name]
    module, _, path = name.partition(".")
    if module == "torch":
        return _OWN[path] if path in _OWN else _found(torch, path)
    if module == "math":
        return _of_numbers(_found(math, path))
    return _of_numbers_and_tensors(_found(operator, path))


def _method_of(name: str) -> Callable[..., Any]:
    return _OWN_METHODS[name] if name in _OWN_METHODS else _OWN.get(name) or _found(torch.Tensor, name)


def _found(where: object, path: str) -> Callable[..., Any]:
    """A function of torch, of ``math`` or of ``operator`` by a name from this project's own lists."""
    function: Callable[..., Any] = operator.attrgetter(path)(where)
    return function


def _table(
    groups: Iterable[tuple[Iterable[str], Bound]], find: Callable[[str], Callable[..., Any]]
) -> Mapping[str, Operation]:
    return MappingProxyType(
        {name: Operation(find(name), _OWN_BOUNDS.get(name, bound)) for group, bound in groups for name in group}
    )


def _functions(group: Iterable[str]) -> frozenset[str]:
    return frozenset(f"torch.{name}" for name in group)


FUNCTIONS: Mapping[str, Operation] = _table(
    [
        (_functions(names.POINTWISE) | names.POINTWISE_FUNCTIONS, bounds.pointwise),
        (_functions(names.SLOW), bounds.slow),
        (_functions(names.JOINING) | names.JOINING_FUNCTIONS, bounds.joining),
        (_functions(names.SIZED) | names.SIZED_FUNCTIONS, bounds.sized),
        (_functions(names.PRODUCTS) | names.PRODUCT_FUNCTIONS, bounds.product),
        (_functions(names.PIECES) | names.PIECES_FUNCTIONS, bounds.pieces),
        (names.SPECIAL_FUNCTIONS | names.NUMBER_FUNCTIONS, bounds.free),
    ],
    _function_of,
)

METHODS: Mapping[str, Operation] = _table(
    [
        (names.POINTWISE | names.POINTWISE_METHODS, bounds.pointwise),
        (names.SLOW, bounds.slow),
        (names.JOINING | names.JOINING_METHODS, bounds.joining),
        (names.SIZED | names.SIZED_METHODS, bounds.sized),
        (names.PRODUCTS, bounds.product),
        (names.PIECES, bounds.pieces),
        (names.NUMBER_METHODS, bounds.free),
    ],
    _method_of,
)
