"""Free memory goes back to the system: glibc keeps what lies between objects that live longer."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys

_MUCH_BYTES = 16 * 2**20
_SOME_BYTES = 2**20
_PAUSE_S = 2.0
"""So long after something was: what is let go of together is given back together, and seldom."""


def give_back_free_memory() -> bool:
    """Have the allocator give back the pages that hold nothing; false where it has no such call. Takes milliseconds."""
    # Requests that were broken off leave cycles: exceptions with frames that hold what was to be sent.
    gc.collect()
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def keep_out_of_collections() -> None:
    """Look at what lives now never again when garbage is collected: for a process that has what it runs on for ever."""
    gc.collect()
    gc.freeze()


class FreedMemory:
    """Counts what requests and connections let go of, and has it given back. Lives on one event loop.

    Much goes while more is let go of; the rest, from a megabyte on, once nothing more was for the pause: a body of
    one megabyte may have been several of them by the end.
    """

    def __init__(self, *, pause_s: float = _PAUSE_S) -> None:
        self._pause_s = pause_s
        self._num_bytes = 0
        self._last_at = 0.0
        self._due: asyncio.TimerHandle | None = None
        self.num_given_back = 0
        """How often that was done."""

    def note(self, num_bytes: int) -> None:
        """So much more was let go of."""
        loop = asyncio.get_running_loop()
        self._num_bytes += num_bytes
        self._last_at = loop.time()
        if self._num_bytes >= _SOME_BYTES and self._due is None:
            self._due = loop.call_later(self._pause_s, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if self._num_bytes < _MUCH_BYTES and loop.time() < self._last_at + self._pause_s:
            self._due = loop.call_at(self._last_at + self._pause_s, self._look)
            return
        self._num_bytes, self._due = 0, None
        self.num_given_back += 1
        # Not on the event loop: what was freed may be scattered over many megabytes.
        loop.run_in_executor(None, give_back_free_memory)
