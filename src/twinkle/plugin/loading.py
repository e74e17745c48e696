"""Components of others' repositories and folders. Their code runs only when the operator has named it."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.hub.reference import SEPARATOR
from twinkle.hub.trust import is_trusted, locate_trusted

Component = TypeVar("Component")

ENTRY = "__init__.py"
CLASS_MARK = "#"


def is_plugin_id(text: str) -> bool:
    """Whether a name is an id or a path of a plugin rather than the name of a component."""
    return SEPARATOR in text


def require_approved(field: str, name: str) -> None:
    """Refuse code that a client of the service names, unless the operator has approved it.

    Raises:
        InvalidInput: It has not; the words name no variable and no path of the server's.
    """
    if is_plugin_id(name) and not is_trusted(name.partition(CLASS_MARK)[0]):
        raise InvalidInput(
            field,
            f"{name[:200]!r} is code, and no code of a client's making runs here: take a class of the library, or a"
            " plugin that the operator of this server has approved by id and revision",
        )


class Plugin:
    """Loads components by the ids of the repositories that hold them."""

    @staticmethod
    def load_plugin(plugin_id: str, plugin_base: type[Component], *, revision: str | None = None) -> type[Component]:
        """The class of a plugin: the subclass of ``plugin_base`` that its ``__init__.py`` defines.

        Args:
            plugin_id: ``ms://org/name@revision`` or ``hf://org/name@revision``, or a folder after a scheme; with
                ``#ClassName`` at its end where it defines several.
            plugin_base: What the class must be.
            revision: A commit or a tag, if the id names none. Branches move, and are refused.

        Raises:
            ConfigError: The operator does not trust it, it is nowhere, or it has no such class.
        """
        text, _, class_name = plugin_id.partition(CLASS_MARK)
        folder = locate_trusted("plugin", text, revision=revision).path
        module = _import(folder, plugin_id)
        return _pick(module, plugin_base, plugin_id, class_name)


def _import(folder: Path, plugin_id: str) -> ModuleType:
    """The package of a folder, under a name that no other has; imported once."""
    file = folder / ENTRY if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigError(f"plugin: {plugin_id}: {folder} has no {ENTRY}")
    name = f"twinkle_plugin_{hashlib.sha256(str(file.absolute()).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[name]
        raise ConfigError(f"plugin: {plugin_id} cannot be imported: {error}") from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _pick(module: ModuleType, base: type[Component], plugin_id: str, class_name: str) -> type[Component]:
    found = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }
    own = {name: value for name, value in found.items() if value.__module__.startswith(module.__name__)}
    if class_name:
        if class_name not in found:
            raise ConfigError(f"plugin: {plugin_id} defines no {base.__name__} called {class_name}")
        return found[class_name]
    if len(own) != 1:
        names = ", ".join(sorted(own)) or "none"
        raise ConfigError(
            f"plugin: {plugin_id} must define one {base.__name__}; it has {names}"
            + (f"; name one, like {plugin_id}{CLASS_MARK}{min(own)}" if own else "")
        )
    return next(iter(own.values()))
