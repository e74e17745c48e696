"""Public names whose modules load when they are first asked for, so that importing a package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


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
