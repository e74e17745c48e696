"""How large the result of a call can be and how much it takes to compute it, known before the call is made.

A graph comes from somebody nobody trusts: ``expand``, ``outer`` or ``zeros`` could ask for any amount of memory. So a
call is judged by the shapes of its arguments, and where these do not bound the result by hand, torch is asked on the
meta device, which allocates nothing.

A dimension of size 0 counts as 1: the sum over it of a tensor without cells may have any number of cells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

MAX_PIECES = 256
SLOW_UNITS = 16
_EQUATION = re.compile(r"([a-zA-Z]*)(?:,([a-zA-Z]*))?(?:->([a-zA-Z]*))?", re.ASCII)
_MASKS = {torch.bool, torch.uint8}

Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
Bound: TypeAlias = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], "Bounded"]
"""From an operation and the arguments of a call to what it comes to; raises what the operation would."""


@dataclass(frozen=True)
class Bounded:
    """``cells`` of all results together at most, ``work`` in units of about one simple operation on one cell."""

    cells: int
    work: int


def count_cells(tensor: torch.Tensor) -> int:
    """The cells of a tensor, a dimension of size 0 taken as 1."""
    return math.prod(max(size, 1) for size in tensor.shape)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of an argument or a result, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def pointwise(_: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """At most one result for each cell of the arguments, broadcast together."""
    shapes = [tensor.shape for tensor in tensors_in([*args, *kwargs.values()])]
    rank = max((len(shape) for shape in shapes), default=0)
    cells = math.prod(
        max((shape[-place] for shape in shapes if place <= len(shape)), default=1) or 1 for place in range(1, rank + 1)
    )
    return Bounded(cells, cells)


def slow(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """Like ``pointwise``, with cells that take long."""
    bounded = pointwise(call, args, kwargs)
    return Bounded(bounded.cells, SLOW_UNITS * bounded.work)


def joining(_: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """As many cells as the arguments have together."""
    cells = sum(count_cells(tensor) for tensor in tensors_in([*args, *kwargs.values()]))
    return Bounded(cells, cells)


def sized(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """As many cells as torch says on the meta device."""
    with torch.no_grad():
        result = call(*(_on_meta(value) for value in args), **{key: _on_meta(value) for key, value in kwargs.items()})
    cells = sum(count_cells(tensor) for tensor in tensors_in(result))
    return Bounded(cells, cells + joining(call, args, kwargs).work)


def created(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """Like ``sized``, where no argument is a tensor that says on which device the result is to be."""
    return sized(call, args, {**kwargs, "device": "meta"})


def product(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """Like ``sized``; each cell is a sum over the first tensor's last dimension."""
    bounded = sized(call, args, kwargs)
    first = next(tensors_in([*args, *kwargs.values()]))
    return Bounded(bounded.cells, bounded.work + bounded.cells * (first.shape[-1] if first.ndim else 1))


def einsum(_: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """One or two tensors by an equation of plain letters."""
    equation, *operands = args
    found = _EQUATION.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    if found is None or kwargs:
        raise ValueError("takes an equation of letters and one or two tensors, like einsum('ij,j->i', a, b)")
    labels = [found[1]] if found[2] is None else [found[1], found[2]]
    if len(labels) != len(operands) or not all(isinstance(operand, torch.Tensor) for operand in operands):
        raise ValueError(f"its equation is for {len(labels)} tensors")
    size_of: dict[str, int] = {}
    for of_operand, operand in zip(labels, operands, strict=True):
        if len(of_operand) != operand.ndim:
            raise ValueError(f"{of_operand!r} names {len(of_operand)} dimensions of a tensor that has {operand.ndim}")
        for label, size in zip(of_operand, operand.shape, strict=True):
            size_of[label] = max(size, size_of.get(label, 1))
    every = math.prod(size_of.values())
    results = size_of if found[3] is None else found[3]
    cells = math.prod(size_of.get(label, 1) for label in results)
    return Bounded(cells, every + cells)


def pieces(_: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """``unbind(tensor, dim)``, ``split(tensor, size or sizes, dim)``, ``chunk(tensor, number, dim)``."""
    tensor = next(tensors_in([*args, *kwargs.values()]))
    cells = count_cells(tensor)
    return Bounded(cells, cells)


def number_of_pieces(tensor: torch.Tensor, dim: int, size: int) -> int:
    """Into how many pieces of ``size`` a dimension is cut.

    Raises:
        ValueError: They are too many.
    """
    number = -(-tensor.shape[dim] // max(size, 1))
    if number > MAX_PIECES:
        raise ValueError(f"would give {number} pieces, the limit is {MAX_PIECES}; keep them in one tensor")
    return number


def indexed(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """``operator.getitem``."""
    value, index = args
    if not isinstance(value, torch.Tensor):
        return Bounded(0, 0)
    parts = index if isinstance(index, tuple) else (index,)
    chosen = list(tensors_in(list(parts)))
    lists = any(isinstance(part, (list, tuple)) for part in parts)
    if not chosen and not lists:
        return Bounded(count_cells(value), count_cells(value))
    if any(tensor.dtype in _MASKS for tensor in chosen):
        if len(chosen) > 1 or lists:
            raise ValueError("a mask must be the only tensor of an index; combine masks with & first")
        # The places of its cells are listed in between, once for each of its dimensions.
        cells = count_cells(value) * max(chosen[0].ndim, 1)
        return Bounded(cells, cells)
    return sized(call, args, kwargs)


def free(_: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bounded:
    """No cells at all."""
    return Bounded(0, 0)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_on_meta(inner) for inner in value)
    return value
