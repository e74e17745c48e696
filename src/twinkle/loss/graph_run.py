"""Running a traced loss on one datum: call by call, each judged before it is made.

Everything is on the CPU, whatever the device of the model: an index out of range would end the context of a GPU, and
with it everybody's work; and there the numbers are those of the client's own machine.

All limits are functions of the graph and the datum alone, never of time: a replay must come to the same verdict. For
the same reason they may be raised, but not lowered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.core.errors import UserError
from twinkle.core.loss_graph import AllDimensions, Call, Constant, Items, LossGraph, Ref, Slice, Value
from twinkle.core.loss_operations import DEFAULT_KEYWORDS
from twinkle.loss.graph_bounds import MAX_PIECES, count_cells
from twinkle.loss.graph_operations import DTYPES, FUNCTIONS, METHODS

MAX_CELLS = 1 << 24
"""Of one result."""
MAX_ALL_CELLS = 1 << 26
"""Of all results for one datum."""
WORK_PER_DATUM = 1 << 22
WORK_PER_TOKEN = 1 << 16
"""In units of about one simple operation on one cell: about what a model of a few billion parameters takes."""
_WORK_PER_CALL = 1 << 12

_MAX_INT = 2**63 - 1
_MAX_REASON = 300
_DTYPES = frozenset(DTYPES.values())
# One device, one layout: whatever a client says of these is taken as said of its own machine.
_UNUSED = frozenset({"device", "layout", "memory_format", "_stacklevel", "copy", "non_blocking"})


@dataclass(frozen=True, eq=False)
class Returned:
    """What a graph returned for one datum; nothing of it is judged yet."""

    loss: Any
    metrics: Mapping[str, Any]
    work: int
    """What it took, in units of about one simple operation on one cell."""


def run_graph(graph: LossGraph, inputs: Sequence[torch.Tensor]) -> Returned:
    """Run a graph on one datum's inputs, logprobs first, which gradients are recorded for if they require any.

    Raises:
        UserError: A call fails or is too large; it names the node, the limit and what to do.
    """
    run = _Run(graph, inputs)
    for call in graph.calls:
        run.call(call)
    metrics = {key: run.values[ref.name] for key, ref in graph.metrics}
    return Returned(loss=run.values[graph.loss.name], metrics=metrics, work=run.work)


class _Run:
    def __init__(self, graph: LossGraph, inputs: Sequence[torch.Tensor]) -> None:
        self._name = graph.name
        self.values: dict[str, Any] = {node.node: tensor for node, tensor in zip(graph.inputs, inputs, strict=True)}
        self._cells_left = MAX_ALL_CELLS
        self.work = 0
        self._max_work = WORK_PER_DATUM + WORK_PER_TOKEN * inputs[0].shape[0]

    def call(self, call: Call) -> None:
        """Make one call, if it is small enough, and keep its result."""
        try:
            operation = (FUNCTIONS if call.kind == "function" else METHODS)[call.target]
            args = [self._argument(value) for value in call.args]
            kwargs = _keywords({key: self._argument(value) for key, value in call.kwargs})
            bounded = operation.bound(operation.call, args, kwargs)
            self._spend(call, bounded.cells, bounded.work)
            self.values[call.node] = _checked(operation.call(*args, **kwargs))
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - torch raises anything, and it is this graph's own
            raise self._failure(call, _reason_of(error)) from None

    def _spend(self, call: Call, cells: int, work: int) -> None:
        if cells > MAX_CELLS:
            raise self._failure(call, f"its result may have {cells} cells, the limit is {MAX_CELLS}; make it smaller")
        self._cells_left -= cells
        if self._cells_left < 0:
            raise self._failure(call, f"all results up to here have over {MAX_ALL_CELLS} cells; make the loss smaller")
        self.work += _WORK_PER_CALL + work
        if self.work > self._max_work:
            raise self._failure(
                call,
                f"the loss takes {self.work} operations on cells up to here, the limit for this datum is"
                f" {self._max_work}; make it smaller, or run it on the client",
            )

    def _argument(self, value: Value) -> Any:
        match value:
            case Ref(name):
                return self.values[name]
            case Items(kind, values):
                items = (self._argument(inner) for inner in values)
                return list(items) if kind == "list" else tuple(items)
            case Slice(start, stop, step):
                return slice(self._argument(start), self._argument(stop), self._argument(step))
            case AllDimensions():
                return ...
            case Constant("dtype", name):
                return DTYPES[name]
            case Constant():
                return None
            case _:
                return value

    def _failure(self, call: Call, reason: str) -> UserError:
        return UserError(f"custom loss {self._name!r}: node {call.node!r} ({call.target}): {reason}")


def _keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    for key in DEFAULT_KEYWORDS & given.keys():
        if given[key] is not None and given[key] is not False:
            raise ValueError(f"{key} must be left out")
    return {key: value for key, value in given.items() if key not in _UNUSED and key not in DEFAULT_KEYWORDS}


def _checked(result: Any) -> Any:
    """A result that later calls may take.

    Raises:
        ValueError: It is of a kind, or of a size, that no loss needs.
    """
    if isinstance(result, torch.Tensor):
        if result.dtype not in _DTYPES or result.device.type != "cpu" or result.layout is not torch.strided:
            raise ValueError(f"gives a tensor of dtype {result.dtype}, which is not offered here")
        if count_cells(result) > MAX_CELLS:
            raise ValueError(f"gives {count_cells(result)} cells, the limit is {MAX_CELLS}; make it smaller")
    elif isinstance(result, int):
        if abs(result) > _MAX_INT:
            raise OverflowError("the whole number has more than 64 bits")
    elif isinstance(result, (tuple, list)):
        if len(result) > MAX_PIECES:
            raise ValueError(f"gives {len(result)} values, the limit is {MAX_PIECES}")
        for inner in result:
            _checked(inner)
    elif result is not None and not isinstance(result, (float, torch.dtype, torch.device)):
        raise ValueError(f"gives a {type(result).__name__}, which is not offered here")
    return result


def _reason_of(error: Exception) -> str:
    """The first line of what torch says; the rest are places in its source."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:_MAX_REASON]
