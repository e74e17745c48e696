"""Changes to a model that a script makes and can take back. The engine's half of the room ``twinkle.patch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.plugin.construct import construct_class
from twinkle.plugin.registry import Registry

PATCHES = Registry("twinkle.patches")
"""Patches by name, of whatever is installed."""

_MISSING = object()


class Patch:
    """A change to a model. A subclass has ``__call__``; what that changes by :meth:`replace` can be taken back."""

    _replaced: list[tuple[Any, str, Any]] | None = None

    def __call__(self, module: Any, *args: Any, **settings: Any) -> Any:
        """Change the model, or a list of them."""
        raise NotImplementedError

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Put ``value`` in the place of an attribute, and remember what was there."""
        if self._replaced is None:
            self._replaced = []
        own = vars(owner) if hasattr(owner, "__dict__") else {}
        self._replaced.append((owner, name, own.get(name, _MISSING)))
        setattr(owner, name, value)

    def unpatch(self, module: Any, *args: Any, **settings: Any) -> None:
        """Take the change back: all that :meth:`replace` has put, last first.

        Raises:
            InvalidInput: Nothing was put so, and the patch has no way of its own.
        """
        if self._replaced is None:
            raise InvalidInput(
                "patch_cls", f"{type(self).__name__} cannot be taken back: it has no unpatch and used no replace"
            )
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class _PlainPatch(Patch):
    """A function of a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, module: Any, *args: Any, **settings: Any) -> Any:
        return self._function(module, *args, **settings)


def apply_patch(module: Any, patch_cls: Any, *args: Any, **settings: Any) -> Patch:
    """Change a model by a patch; the patch, to take it back with.

    Args:
        module: The model, or a list of models.
        patch_cls: A :class:`Patch`, a class of it, a function of the model, a name that an installed package declares,
            or the id of a plugin, which the operator has to trust.
        args: For the patch's call.
        settings: Also.

    Raises:
        InvalidInput: It is none of these, or not trusted.
    """
    patch = construct_class("patch_cls", patch_cls, Patch, PATCHES, wrap=_PlainPatch)
    patch(module, *args, **settings)
    return patch


def unpatch(module: Any, patch: Patch, *args: Any, **settings: Any) -> None:
    """Take a patch back that :func:`apply_patch` has returned."""
    patch.unpatch(module, *args, **settings)


@contextmanager
def apply_context(module: Any, patch_cls: Any, *args: Any, **settings: Any) -> Iterator[Patch]:
    """Change a model by a patch while the block runs; see :func:`apply_patch`."""
    patch = apply_patch(module, patch_cls, *args, **settings)
    try:
        yield patch
    finally:
        unpatch(module, patch, *args, **settings)
