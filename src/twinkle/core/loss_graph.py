"""A client's own loss as plain data: the calls it was traced to, in order. Nothing in it can be executed by itself.

``wire`` reads and judges it, the journal keeps it, ``loss`` runs it from its own table of operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Scalar: TypeAlias = bool | int | float | str | None


@dataclass(frozen=True)
class Ref:
    """The value of an input or of an earlier call."""

    name: str


@dataclass(frozen=True)
class Items:
    """Several values."""

    kind: Literal["list", "tuple"]
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Slice:
    """A slice of a dimension."""

    start: Value
    stop: Value
    step: Value


@dataclass(frozen=True)
class AllDimensions:
    """All the dimensions that an index does not name."""


@dataclass(frozen=True)
class Constant:
    """One of torch's constants, by its name there."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


Value: TypeAlias = Scalar | Ref | Items | Slice | AllDimensions | Constant


@dataclass(frozen=True, kw_only=True)
class Input:
    """What a graph takes of each datum: its rank is 0 for a scalar, 1 for (N,) and 2 for (N, K).

    ``node`` is what the graph's calls refer to it by, ``name`` the key among the datum's inputs.
    """

    node: str
    name: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operation: ``kind`` and ``target`` name it in the table, the first argument of a method is its object."""

    node: str
    kind: Literal["function", "method"]
    target: str
    args: tuple[Value, ...]
    kwargs: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, kw_only=True)
class LossGraph:
    """A loss of one datum. Its first input are the logprobs of the datum's targets."""

    name: str
    inputs: tuple[Input, ...]
    calls: tuple[Call, ...]
    loss: Ref
    metrics: tuple[tuple[str, Ref], ...]
    """Scalars of a datum by ``custom/<name>:sum`` or ``custom/<name>:mean``, after which they add up over datums."""
