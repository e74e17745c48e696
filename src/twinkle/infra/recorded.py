"""Work of a device that is recorded once and run again with one launch: the same kernels on the same addresses.

What the host computed while it was recorded stays as it was; so whatever changes between two runs must lie in tensors
that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

WARM_UPS = 2
"""Runs before the record: kernels are compiled and libraries take their memory in these."""

Run = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Records what a device is asked for."""

    @property
    def size_bytes(self) -> int:
        """What all records hold of the device's memory for what lies between their kernels."""
        ...

    def record(self, run: Run) -> Run:
        """Run some work and record it. What comes back runs the record; its tensor is the same each time, and holds
        its values until any record of this recorder runs.
        """
        ...

    def clear(self) -> None:
        """All records are gone; none is run again."""
        ...


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory as they never run at once.

    They end together: one that ends gives up the work spaces of the stream that all were recorded on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.size_bytes = 0

    def record(self, run: Run) -> Run:
        """See :class:`Recorder`."""
        with torch.cuda.device(self._device):
            free_bytes, _ = torch.cuda.mem_get_info()
            try:
                again = self._record(run)
            except torch.OutOfMemoryError:
                # What torch keeps for other passes is out of a record's reach, but not out of ours.
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                if not self._graphs:
                    self._pool = None
                again = self._record(run)
            self.size_bytes += max(0, free_bytes - torch.cuda.mem_get_info()[0])
        return again

    def _record(self, run: Run) -> Run:
        if self._stream is None:
            # One for all: libraries keep a work space for every stream that they are called on.
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream, now = self._stream, torch.cuda.current_stream()
        stream.wait_stream(now)
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run()
                graph, found = self._captured(run)
        except BaseException:
            # What was launched before it failed reads memory that is about to be given on.
            stream.synchronize()
            raise
        now.wait_stream(stream)
        self._graphs.append(graph)

        def again() -> torch.Tensor:
            graph.replay()
            return found

        return again

    def _captured(self, run: Run) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, which copy snapshots, may go on asking for memory.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            found = run()
            graph.capture_end()
        except BaseException:
            # A capture that CUDA has given up does not end by itself, and torch would go on as if it were under way.
            with suppress(RuntimeError):
                graph.capture_end()
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise
        return graph, found

    def clear(self) -> None:
        """See :class:`Recorder`."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        # A pool without graphs is not to be used again.
        self._pool = None
        self.size_bytes = 0


def recorder_for(device: torch.device) -> Recorder | None:
    """What records a device's work; none for one that has no such thing."""
    return CudaRecorder(device) if device.type == "cuda" else None
