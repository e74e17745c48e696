"""Faster products for a model, where a library that has them is installed."""

from __future__ import annotations

from typing import TypeVar

import torch

from twinkle.infra.platform import Platform
from twinkle.kernel.bundles import liger_builtin, npu_builtin
from twinkle.kernel.choice import DEFAULT_KERNEL_CONFIG, KernelChoice, KernelImpl, register_op
from twinkle.kernel.replacing import Bundle, HubRef, KernelMapping, hub, replace_all

__all__ = [
    "DEFAULT_KERNEL_CONFIG",
    "Bundle",
    "HubRef",
    "KernelChoice",
    "KernelImpl",
    "hub",
    "kernelize",
    "liger_builtin",
    "npu_builtin",
    "register_op",
]

Model = TypeVar("Model", bound=torch.nn.Module)


def kernelize(model: Model, mapping: KernelMapping | Bundle | None = None) -> Model:
    """Put faster parts into a model; the same model.

    Args:
        model: A model of transformers, or any module.
        mapping: Classes of modules (of exactly which instances change class), or paths of attributes, to what takes
            their place: a class or function, a layer of a :func:`hub`, a :class:`KernelChoice`, or a mapping of those
            by type of device, where a type that is missing changes nothing. Default: what is installed for this
            machine's device; where nothing is, the model stays as it is, and the log says so once.

    Raises:
        InvalidInput: A key or a value is of no such kind, or a choice names an operation that nobody registered.
        ConfigError: A layer of a hub is not trusted, or cannot be had.
    """
    device_type = Platform.current().device_type
    if mapping is None:
        mapping = npu_builtin(model) if device_type == "npu" else liger_builtin(model)
    if isinstance(mapping, Bundle):
        mapping.apply(model)
    else:
        replace_all(model, mapping, device_type)
    return model
