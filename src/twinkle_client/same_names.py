"""Names that a script has of this package instead of the library: the same objects, loaded when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Callable

# What is missing where only the queue's packages are installed.
_EXTRAS = {
    "torch": "worker",
    "transformers": "worker",
    "peft": "worker",
    "safetensors": "worker",
    "datasets": "scripts",
}


def attributes_of(module: str) -> Callable[[str], object]:
    """A module's ``__getattr__`` (PEP 562) that lends all names of another one.

    Args:
        module: Its full name. It is imported when the first of its names is asked for; an extra that it needs and that
            is not installed is said.
    """

    def load(name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        try:
            lender = importlib.import_module(module)
            return getattr(lender, name)
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            raise ModuleNotFoundError(
                f"{module}.{name} needs {error.name}, which is not installed; pip install 'twinkle-queue[{extra}]'",
                name=error.name,
            ) from None

    return load
