"""How the arguments of one call become those of many ranks, and many results one. Knows no transport."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.remote import RemoteCall

INPUTS = "inputs"

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and those by name."""


@dataclass(frozen=True)
class Layout:
    """The ranks that hold a component: how many, and where they stand if they have a mesh."""

    size: int
    mesh: DeviceMesh | None = None

    @property
    def data_parts(self) -> int:
        """Into how many parts a batch is cut."""
        return 1 if self.mesh is None else self.mesh.data_world_size

    def data_part(self, rank: int) -> int:
        """Which part of a batch a rank gets."""
        return 0 if self.mesh is None else self.mesh.data_part(rank)

    def heads(self) -> list[int]:
        """One rank of each data part, in the order of the parts: the one that has its results."""
        if self.mesh is None:
            return [0]
        found: dict[int, int] = {}
        for rank in range(self.size):
            if rank in self.last_stage() and not any(self.mesh.coordinates(rank).get(axis, 0) for axis in ("cp", "tp")):
                found.setdefault(self.mesh.data_part(rank), rank)
        return [found[part] for part in sorted(found)]

    def last_stage(self) -> list[int]:
        """The ranks of the last stage of the pipeline; all of them where there is none."""
        if self.mesh is None or self.mesh.size("pp") == 1:
            return list(range(self.size))
        last = self.mesh.size("pp") - 1
        return [rank for rank in range(self.size) if self.mesh.coordinates(rank)["pp"] == last]


def peers(size: int, *, caller_rank: int, caller_size: int) -> list[int]:
    """The ranks of a group that face one rank of another; for a script alone these are all."""
    if size >= caller_size:
        return list(range(size * caller_rank // caller_size, size * (caller_rank + 1) // caller_size))
    return [caller_rank * size // caller_size]


def spread(mark: RemoteCall, layout: Layout, targets: Sequence[int], args: Sequence[Any], kwargs: Any) -> list[Call]:
    """The arguments for each of the ranks ``targets``.

    Raises:
        InvalidInput: There are fewer rows than data ranks, or ``inputs`` cannot be cut.
    """
    whole: Call = (tuple(args), dict(kwargs))
    if callable(mark.dispatch):
        return _checked(mark.dispatch(len(targets), whole[0], whole[1]), len(targets))
    if mark.dispatch == "all" or mark.execute == "first":
        return [whole for _ in targets]
    if mark.dispatch == "slice":
        return [_each(whole, partial(_even, part=part, parts=len(targets))) for part in range(len(targets))]
    if layout.data_parts == 1:
        return [whole for _ in targets]
    return _over_data_ranks(layout, targets, whole)


def wanted(mark: RemoteCall, layout: Layout, targets: Sequence[int]) -> list[int]:
    """Of ``targets`` those whose results are asked for, in the order in which they are put together."""
    if mark.collect == "first" or mark.execute == "first":
        return list(targets[:1])
    if mark.collect == "none":
        return list(targets)
    if mark.collect in ("last_pp", "last_pp_first"):
        last = [rank for rank in targets if rank in layout.last_stage()]
        return last[:1] if mark.collect == "last_pp_first" else last
    if mark.dispatch == "slice_dp":
        heads = [rank for rank in layout.heads() if rank in targets]
        return heads or list(targets)
    return list(targets)


def collected(mark: RemoteCall, layout: Layout, results: list[Any]) -> Any:
    """One result of those that were wanted."""
    if callable(mark.collect):
        return _call_collect(mark.collect, results, layout.mesh)
    if mark.collect == "flatten":
        return list(chain.from_iterable(value if isinstance(value, (list, tuple)) else [value] for value in results))
    if mark.collect in ("mean", "sum"):
        total = _sum(results)
        return total if mark.collect == "sum" or total is None else total / len(results)
    if mark.execute == "first" or mark.collect in ("first", "last_pp_first"):
        return results[0]
    return results


def _call_collect(collect: Callable[..., Any], results: list[Any], mesh: DeviceMesh | None) -> Any:
    taken = inspect.signature(collect).parameters
    takes_mesh = "device_mesh" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return collect(results, device_mesh=mesh) if takes_mesh else collect(results)


def _sum(results: list[Any]) -> Any:
    present = [value for value in results if value is not None]
    if not present:
        return None
    total = present[0]
    for value in present[1:]:
        total = total + value
    return total


def _checked(calls: Any, count: int) -> list[Call]:
    found = [(tuple(args), dict(kwargs)) for args, kwargs in calls]
    if len(found) != count:
        raise InvalidInput("dispatch", f"gave the arguments of {len(found)} ranks; give those of {count}")
    return found


def _each(call: Call, cut: Callable[[Any], Any]) -> Call:
    args, kwargs = call
    return tuple(cut(value) for value in args), {name: cut(value) for name, value in kwargs.items()}


def _even(value: Any, part: int, parts: int) -> Any:
    if not isinstance(value, list):
        return value
    return value[len(value) * part // parts : len(value) * (part + 1) // parts]


def _over_data_ranks(layout: Layout, targets: Sequence[int], whole: Call) -> list[Call]:
    args, kwargs = whole
    rows = kwargs[INPUTS] if INPUTS in kwargs else next(iter(args), None)
    if isinstance(rows, Mapping) or not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
        raise InvalidInput(
            INPUTS,
            f"is one {type(rows).__name__} for {layout.data_parts} data ranks; send a list of rows, at least one for"
            " each of them",
        )
    assert layout.mesh is not None
    calls = []
    for rank in targets:
        part = layout.mesh.data_slice(len(rows), rank)
        calls.append(_each(whole, partial(_cut, part=part, num_rows=len(rows))))
    return calls


def _cut(value: Any, part: slice, num_rows: int) -> Any:
    """A rank's part of what is as long as the batch: a list, a tensor, or such things by name."""
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, Mapping):
        return {name: _cut(each, part, num_rows) for name, each in value.items()}
    shape = getattr(value, "shape", None)
    if shape is not None:
        return value[part] if len(shape) and shape[0] == num_rows else value
    if isinstance(value, (list, tuple)) and len(value) == num_rows:
        return value[part]
    return value
