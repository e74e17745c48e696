"""Faster classes and functions in the place of a model's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.hub_settings import HubSettings
from twinkle.core.process.events import event_log
from twinkle.hub.trust import require_trust
from twinkle.kernel.choice import Installer, KernelChoice, Target, chosen_form, op_of

INSTALL = "pip install 'kernels>=0.17'"

_log = event_log()


@dataclass(frozen=True, kw_only=True)
class HubRef:
    """A layer of a repository of kernels, as :func:`hub` makes it."""

    repository: str
    layer: str
    revision: str | None
    version: int | None
    backend: str | None


@dataclass(frozen=True)
class Bundle:
    """Replacements that a library knows how to make for a whole model."""

    name: str
    apply: Callable[[torch.nn.Module], object]


KernelMapping = Mapping[Target, Any]


def hub(ref: str, *, revision: str | None = None, version: int | None = None, backend: str | None = None) -> HubRef:
    """A layer of a repository of kernels on Hugging Face, to map a class to.

    Args:
        ref: ``org/repository:LayerName``.
        revision: A commit or a tag; or
        version: the number of a version.
        backend: ``cuda``, ``rocm``, ...; default: this machine's.

    Raises:
        InvalidInput: Not exactly one of revision and version is given, or ``ref`` names no layer.
    """
    repository, colon, layer = ref.rpartition(":")
    if not colon or not repository or not layer:
        raise InvalidInput("ref", f"is {ref!r}; send org/repository:LayerName")
    if (revision is None) == (version is None):
        raise InvalidInput("revision", "or version must be given, and not both")
    return HubRef(repository=repository, layer=layer, revision=revision, version=version, backend=backend)


def replace_all(model: torch.nn.Module, mapping: KernelMapping, device_type: str) -> None:
    """Put what a mapping says in place.

    Raises:
        InvalidInput: A key is neither a class of modules nor the path of an attribute.
        ConfigError: A layer of a hub is not trusted, or cannot be had.
    """
    for key, value in mapping.items():
        chosen = value.get(device_type) if isinstance(value, Mapping) else value
        if chosen is None:
            continue
        if isinstance(chosen, KernelChoice):
            _install_choice(model, key, chosen)
            continue
        made = _layer(chosen) if isinstance(chosen, HubRef) else chosen
        count = _install(model, key, made)
        _log.info("kernel.replaced", what=str(key), by=str(made), modules=count)


def _install_choice(model: torch.nn.Module, key: Target, choice: KernelChoice) -> None:
    made, backend, reason = chosen_form(choice, key)
    if made is None:
        _log.info("kernel.kept", what=str(key), op=choice.op, reason=reason, next="the model computes with its own")
        return
    installer: Installer = choice.installer or op_of(choice).installer or _install
    installer(model, key, made)
    _log.info("kernel.replaced", what=str(key), op=choice.op, by=backend)


def _install(model: torch.nn.Module, key: Target, made: Any) -> int:
    """Put one thing in place; the number of modules that changed, 1 for what is no class of modules."""
    if isinstance(key, type) and issubclass(key, torch.nn.Module):
        return _replace_class(model, key, made)
    if not isinstance(key, str):
        raise InvalidInput("mapping", f"has the key {key!r}; send a class of modules, or package.module.name")
    owner, name = _owner_of(key)
    known = vars(owner)[name]
    if _is_module_class(known) and _is_module_class(made):
        return _replace_class(model, known, made)
    setattr(owner, name, made)
    return 1


def _replace_class(model: torch.nn.Module, target: type[torch.nn.Module], made: type[torch.nn.Module]) -> int:
    """Modules of exactly this class become ones of both: a user's own subclass was written to be what it is."""
    both = made if issubclass(made, target) else type(made.__name__, (made, target), {})
    modules = [module for module in model.modules() if type(module) is target]
    for module in modules:
        module.__class__ = both
    return len(modules)


def _owner_of(path: str) -> tuple[Any, str]:
    """What holds the attribute of ``package.module.name``, or of a class's ``package.module.Class.name``, and its name.

    Replacing it holds for the whole process, unless it is a class of modules.
    """
    *parts, name = path.split(".")
    for length in range(len(parts), 0, -1):
        if _is_module(".".join(parts[:length])):
            owner: Any = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                owner = vars(owner).get(part)
            if owner is None or name not in vars(owner):
                break
            return owner, name
    raise InvalidInput("mapping", f"has the key {path!r}, and there is no such name to replace")


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _layer(ref: HubRef) -> Any:
    revision = ref.revision or f"v{ref.version}"
    require_trust("kernel", f"hf://{ref.repository}", HubSettings.read(), revision=revision)
    try:
        # Code of others comes with it; only who maps to a hub's layer needs it.
        from kernels import get_kernel  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ConfigError(f"{ref.repository}:{ref.layer} needs the package kernels: {INSTALL}") from None
    # The package asks for trust as well, in publishers; the operator's word is of this revision.
    kernel = get_kernel(
        ref.repository, revision=ref.revision, version=ref.version, backend=ref.backend, trust_remote_code=True
    )
    layers = vars(vars(kernel).get("layers") or object)
    if ref.layer not in layers:
        raise ConfigError(f"{ref.repository} at {revision} has no layer {ref.layer}")
    return layers[ref.layer]
