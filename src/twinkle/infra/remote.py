"""Marks on components that may run on a group of devices elsewhere: which of their methods, and how a call spreads.

In one process and under torchrun the component runs where it is made, so the marks change nothing but what they say.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from twinkle.core.errors import ConfigError

Execute = Literal["first", "peer", "all"]
Dispatch = Literal["slice", "all", "slice_dp"]
Collect = Literal["none", "flatten", "mean", "sum", "first", "last_pp", "last_pp_first"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Component = TypeVar("Component")


class RemoteObject:
    """What a script holds of a component that runs on a group of devices elsewhere."""


def is_remote(component: object) -> bool:
    """Whether a component runs on a group of devices, and not in this process."""
    return isinstance(component, RemoteObject)


@dataclass(frozen=True, kw_only=True)
class RemoteCall:
    """How a call of a marked method would spread over a group, and come back as one result."""

    dispatch: Dispatch | Callable[..., Any] = "slice"
    execute: Execute = "all"
    collect: Collect | Callable[..., Any] = "none"
    sync: bool = False
    lazy_collect: bool | None = None
    timeout: float | None = None


def remote_class(execute: Execute = "all") -> Callable[[type[Component]], type[Component]]:
    """Mark a class whose objects may run on a group of devices: it takes ``remote_group`` and ``instance_id`` too.

    Raises:
        ConfigError: (when an object is made) ``remote_group`` names a group, which only Ray could reach.
    """
    _check_choice("execute", execute, Execute)

    def decorate(cls: type[Component]) -> type[Component]:
        make = cls.__init__
        own = inspect.signature(make).parameters

        @functools.wraps(make)
        def __init__(self: Component, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes the class's own
            group = kwargs.get("remote_group") if "remote_group" in own else kwargs.pop("remote_group", None)
            if "instance_id" not in own:
                kwargs.pop("instance_id", None)
            if group is not None:
                raise ConfigError(
                    f"remote_group: {cls.__name__} cannot run on group {group!r}: that takes Ray, which is not offered"
                    " yet (it will come as the extra twinkle-queue[ray]); leave it out and use torchrun"
                )
            make(self, *args, **kwargs)

        setattr(cls, "__init__", __init__)  # noqa: B010 - of a class that is any
        return cls

    return decorate


def remote_function(
    dispatch: Dispatch | Callable[..., Any] = "slice",
    execute: Execute = "all",
    collect: Collect | Callable[..., Any] = "none",
    sync: bool = False,
    lazy_collect: bool | None = None,
    timeout: float | None = None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Mark a method of a ``remote_class``; the method itself stays as it is, with the mark in ``remote_call``.

    Args:
        dispatch: How arguments reach the ranks: cut evenly, whole, cut over data ranks, or as a function says.
        execute: Which ranks run.
        collect: How the ranks' results become one.
        sync: Whether the call waits for the ranks.
        lazy_collect: Whether it gives back a function that waits instead.
        timeout: Seconds to wait.

    Raises:
        ConfigError: A choice is unknown.
    """
    if not callable(dispatch):
        _check_choice("dispatch", dispatch, Dispatch)
    _check_choice("execute", execute, Execute)
    if not callable(collect):
        _check_choice("collect", collect, Collect)
    call = RemoteCall(
        dispatch=dispatch, execute=execute, collect=collect, sync=sync, lazy_collect=lazy_collect, timeout=timeout
    )

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        function.remote_call = call  # type: ignore[attr-defined]
        return function

    return decorate


def _check_choice(field: str, value: str, choices: Any) -> None:
    if value not in choices.__args__:
        raise ConfigError(f"{field}: {value!r} is unknown; use one of {', '.join(choices.__args__)}")
