"""What keeps imports cheap: public names whose modules load when first asked for, no search for garbage meanwhile."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


def lazy_attributes(package: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """A package's ``__getattr__`` (PEP 562).

    Args:
        package: Its ``__name__``.
        places: The module of each public name.
    """

    def load(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(places[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


@contextmanager
def without_collector() -> Iterator[None]:
    """Around imports that make millions of objects: all of them stay, and looking for cycles is a fifth of the time.

    For imports alone: what loads a model makes cycles that hold tensors.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
