"""A stand-in for CUDA graphs: what torch is asked for is written down once, and done again on the same memory.

As with a graph, whatever the host computed meanwhile stays as it was; so does a value that it read or sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from twinkle.infra.recorded import Run


class WrittenDown(TorchDispatchMode):
    """What is asked for within its context, and where its results lie."""

    now: WrittenDown | None = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __enter__(self) -> Any:
        WrittenDown.now = self
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        WrittenDown.now = None
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        fresh = [
            None if not isinstance(each, torch.Tensor) or _address(each) in given else each
            for each in tree_leaves(found)
        ]

        def again() -> None:
            for place, value in zip(fresh, tree_leaves(func(*args, **kwargs)), strict=True):
                if place is not None:
                    place.copy_(value)

        self.steps.append(again)
        return found


def as_one(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What stands for a kernel of our own is one thing that is asked for, and reads its tables each time."""
    writing = WrittenDown.now
    if writing is None:
        return run(*args, **options)
    with _disable_current_modes():
        found = run(*args, **options)
    places = tree_leaves(found)

    def again() -> None:
        for place, value in zip(places, tree_leaves(run(*args, **options)), strict=True):
            if place is not None:
                place.copy_(value)

    writing.steps.append(again)
    return found


class CountedRecorder:
    """Counts records, and how often one of them was run."""

    size_bytes = 0

    def __init__(self) -> None:
        self.num_records = 0
        self.num_runs = 0
        self.num_cleared = 0

    def record(self, run: Run) -> Run:
        """See :class:`Recorder`."""
        self.num_records += 1
        run()
        with WrittenDown() as written:
            found = run()

        def again() -> torch.Tensor:
            self.num_runs += 1
            for step in written.steps:
                step()
            return found

        return again

    def clear(self) -> None:
        """See :class:`Recorder`."""
        self.num_cleared += 1


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
