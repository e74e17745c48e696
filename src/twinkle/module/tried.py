"""Kernels are tried before they are trusted: what a compiler or a release of torch makes of them is held against right.

Where there could be one and none is right, a line in the log says why, and what is done instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import Any, TypeVar

import torch

from twinkle.core.process.events import event_log

COMPILER = "triton"
HALF = (torch.bfloat16, torch.float16)
TOLERANCE = 0.02
"""Of kernels of our own: relative, of products in half precision."""

KernelT = TypeVar("KernelT")

_log = event_log()


def is_quick(device_type: str, dtype: torch.dtype) -> bool:
    """Whether there are kernels for such numbers at all."""
    return device_type == "cuda" and dtype in HALF


def first_right(
    kernels: Iterable[KernelT],
    failure_of: Callable[[KernelT], Exception | None],
    *,
    device_type: str,
    dtype: torch.dtype,
    event: str,
    instead: str,
    none: str = "",
    **facts: Any,
) -> KernelT | None:
    """The first that does not fail.

    Args:
        kernels: Those there are.
        failure_of: Why one is not right.
        device_type: Where they are to run.
        dtype: On what.
        event: The name of the line in the log, where none is right though there could be one.
        instead: What is done without.
        none: The reason, where there are none.
        **facts: More for that line.
    """
    failures = []
    for kernel in kernels:
        failure = failure_of(kernel)
        if failure is None:
            return kernel
        failures.append(str(failure).partition("\n")[0])  # What torch says, without its stack.
    if is_quick(device_type, dtype):
        _log.warning(event, dtype=str(dtype), reasons=list(dict.fromkeys(failures)) or [none], next=instead, **facts)
    return None


def own_kernels(
    module: str,
    error_of: Callable[[Any], float],
    *,
    device_type: str,
    dtype: torch.dtype,
    event: str,
    instead: str,
    **facts: Any,
) -> Any | None:
    """A module of kernels of our own, if they compile and run there and ``error_of`` it is within the tolerance."""
    if not is_quick(device_type, dtype):
        return None
    if find_spec(COMPILER) is None:
        _tell_of_no_compiler()
        return None

    def failure(name: str) -> Exception | None:
        try:
            worst = error_of(import_module(name))
        except Exception as error:  # noqa: BLE001 - the border to a compiler, which raises what it likes
            return error
        return None if worst < TOLERANCE else ArithmeticError(f"its values are off by {worst:.2g}")

    found = first_right(
        [module],
        failure,
        device_type=device_type,
        dtype=dtype,
        event=event,
        instead=instead,
        **facts,
    )
    return None if found is None else import_module(found)


@cache
def _tell_of_no_compiler() -> None:
    """Once: it is one reason for all of them."""
    reason = f"{COMPILER} is not installed"
    _log.warning("device.no_kernels_of_our_own", reason=reason, next="torch's are used, in more launches and slower")


def replace_forwards(model: torch.nn.Module, forward_for: Callable[[torch.nn.Module, str, torch.dtype], Any]) -> int:
    """Give modules of a known form another ``forward``; how many there were.

    Args:
        model: With its weights. A module whose ``forward`` somebody has replaced keeps that.
        forward_for: Of a module, where its weights are and of which dtype: the function, which takes the module first;
            none if it keeps its own.
    """
    num_replaced = 0
    for module in model.modules():
        weight = next((each for each in module.parameters() if each.is_floating_point()), None)
        if weight is None or "forward" in vars(module):
            continue
        forward = forward_for(module, weight.device.type, weight.dtype)
        if forward is not None:
            module.forward = MethodType(forward, module)
            num_replaced += 1
    return num_replaced
