"""Free memory goes back to the system: glibc keeps what lies between objects that live longer."""

from __future__ import annotations

import ctypes
import sys


def give_back_free_memory() -> bool:
    """Have the allocator give back the pages that hold nothing; false where it has no such call. Takes milliseconds."""
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
