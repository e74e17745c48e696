"""A stand-in for CUDA graphs: what torch is asked for is written down once, and done again on the same memory.

As with a graph, whatever the host computed meanwhile stays as it was; so does a value that it read or sent. Nor does it
keep what it reads: that fails where nobody else has kept it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from twinkle.infra.recorded import Run


class Place:
    """A tensor in somebody else's memory, who may let go of it: what reads it then fails, which a graph would not."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self._lies = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self) -> torch.Tensor:
        """The tensor as long as its memory is there."""
        assert not self._memory.expired(), "a record reads memory that is gone"
        storage = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._lies)


class WrittenDown(TorchDispatchMode):
    """What is asked for within its context, and where its results lie: these alone it keeps."""

    now: WrittenDown | None = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self._own: set[int] = set()

    def __enter__(self) -> Any:
        WrittenDown.now = self
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        WrittenDown.now = None
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.did(func, args, kwargs or {}, func(*args, **(kwargs or {})))

    def did(self, func: Callable[..., Any], args: Any, options: Any, found: Any) -> Any:
        """Write down what was asked for, and return what it gave."""
        given = {_address(each) for each in tree_leaves((args, options)) if isinstance(each, torch.Tensor)}
        fresh = [
            each if isinstance(each, torch.Tensor) and _address(each) not in given else None
            for each in tree_leaves(found)
        ]
        self._own |= {_address(each) for each in fresh if each is not None}
        kept_args, kept_options = tree_map_only(torch.Tensor, self._kept, (tuple(args), dict(options)))

        def again() -> None:
            now_args, now_options = tree_map_only(Place, Place.tensor, (kept_args, kept_options))
            for place, value in zip(fresh, tree_leaves(func(*now_args, **now_options)), strict=True):
                if place is not None:
                    place.copy_(value)

        self.steps.append(again)
        return found

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor | Place:
        return tensor if _address(tensor) in self._own else Place(tensor)


def as_one(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What stands for a kernel of our own is one thing that is asked for, and reads its tables each time."""
    writing = WrittenDown.now
    if writing is None:
        return run(*args, **options)
    with _disable_current_modes():
        found = run(*args, **options)
        return writing.did(run, args, options, found)


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
