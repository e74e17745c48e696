"""Marks on components that may run on a group of devices elsewhere: which of their methods, and how a call spreads.

In one process and under torchrun the component runs where it is made, so the marks change nothing. After
``initialize(mode='ray')`` a component that names its ``remote_group`` is made on the workers of that group, and the
script holds an object of the same class whose marked methods run there.
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

GROUP = "remote_group"
INSTANCE = "instance_id"
PLACES_ON = "_places_on"
"""The attribute of a marked class that says on which workers its objects are made."""

END = "_remote_end"
"""The attribute of a script's end that leads to the workers."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Component = TypeVar("Component")


@dataclass(frozen=True, kw_only=True)
class RemoteCall:
    """How a call of a marked method spreads over a group, and comes back as one result."""

    dispatch: Dispatch | Callable[..., Any] = "slice"
    execute: Execute = "all"
    collect: Collect | Callable[..., Any] = "none"
    sync: bool = False
    lazy_collect: bool | None = None
    timeout: float | None = None


def remote_class(execute: Execute = "all") -> Callable[[type[Component]], type[Component]]:
    """Mark a class, and those that derive from it: their objects also take ``remote_group`` and ``instance_id``.

    ``remote_group`` is the group of devices on which an object lives. Objects of one group with the same
    ``instance_id`` share its processes; another ``instance_id`` gets processes of its own on the same devices.

    Args:
        execute: Which workers of a group hold the object: every one, or the first alone. ``peer`` is for calls between
            workers, and holds as ``all``.

    Raises:
        ConfigError: (when an object is made) ``remote_group`` names no group of ``initialize``.
    """
    _check_choice("execute", execute, Execute)

    def decorate(cls: type[Component]) -> type[Component]:
        make = cls.__new__

        def __new__(kind: type[Component], *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it becomes the class's own
            group = kwargs.get(GROUP)
            if group is not None:
                found = _placed(kind, args, kwargs, group)
                if found is not None:
                    return found
            return object.__new__(kind) if make is object.__new__ else make(kind, *args, **kwargs)

        own_hook = vars(cls).get("__init_subclass__")

        def __init_subclass__(kind: type[Any], /, **kwargs: Any) -> None:  # noqa: N807 - as above
            if own_hook is None:
                super(cls, kind).__init_subclass__(**kwargs)
            else:
                own_hook.__func__(kind, **kwargs)
            _take_place(kind)

        setattr(cls, "__new__", staticmethod(__new__))  # noqa: B010 - of a class that is any
        setattr(cls, "__init_subclass__", classmethod(__init_subclass__))  # noqa: B010
        setattr(cls, PLACES_ON, execute)
        _take_place(cls, is_root=True)
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

    A method that overrides a marked one has its mark, unless it is marked itself.

    Args:
        dispatch: How arguments reach the ranks. ``slice`` cuts every list evenly; ``slice_dp`` cuts ``inputs``, and
            whatever is as long, over the ranks that train on different data; ``all`` gives each the whole; a function
            of (number of ranks, args, kwargs) gives for each rank its args and kwargs.
        execute: Which ranks run: all, the first, or (between workers of two groups) those that face the caller.
        collect: How the ranks' results become one: a list of all, the lists joined, their mean or sum, the first
            rank's, those of the last stage of a pipeline, the first of these; or a function of their list.
        sync: Whether the call waits for the ranks.
        lazy_collect: Whether it gives back a function that waits for the result; as ``initialize`` says if omitted.
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


def is_remote(component: object) -> bool:
    """Whether a component is the script's end of one that lives on a group."""
    return getattr(type(component), "is_remote_end", False) is True


def share_workers(one: object, other: object) -> bool:
    """Whether two components live in the same processes of a group."""
    return is_remote(one) and is_remote(other) and vars(one)[END].workers is vars(other)[END].workers


def marks_of(kind: type) -> dict[str, RemoteCall]:
    """The marked methods of a class by name, those that override marked ones among them."""
    found: dict[str, RemoteCall] = {}
    for base in kind.__mro__:
        for name, value in vars(base).items():
            mark = getattr(value, "remote_call", None)
            if isinstance(mark, RemoteCall):
                found.setdefault(name, mark)
    return found


def _placed(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any], group: str) -> object | None:
    """The script's end of an object that is made on a group; None where it is made here."""
    from twinkle.infra.runtime import runtime  # noqa: PLC0415 - marks are set without torch

    current = runtime()
    if current.own_group is not None:
        if group != current.own_group:
            raise ConfigError(
                f"{GROUP}: {kind.__name__} is made on a worker of group {current.own_group!r} and names {group!r};"
                " make it in the script, and pass it on"
            )
        return None
    names = [each.name for each in current.groups]
    if group not in names and (names or current.cluster is not None):
        raise ConfigError(f"{GROUP}: {group!r} is no group of initialize(groups=...); they are {', '.join(names)}")
    if current.cluster is None:
        return None
    left = {name: value for name, value in kwargs.items() if name not in (GROUP, INSTANCE)}
    return current.cluster.place(
        kind, args, left, group=group, execute=getattr(kind, PLACES_ON), instance_id=kwargs.get(INSTANCE) or ""
    )


def _take_place(cls: type, *, is_root: bool = False) -> None:
    """Let the constructor be called with a group and an instance, which it need not know."""
    if "__init__" not in vars(cls) and not is_root:
        return
    make = cls.__init__  # type: ignore[misc]
    own = inspect.signature(make).parameters

    @functools.wraps(make)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes the class's own
        for name in (GROUP, INSTANCE):
            if name not in own:
                kwargs.pop(name, None)
        make(self, *args, **kwargs)

    setattr(cls, "__init__", __init__)  # noqa: B010 - of a class that is any


def _check_choice(field: str, value: str, choices: Any) -> None:
    if value not in choices.__args__:
        raise ConfigError(f"{field}: {value!r} is unknown; use one of {', '.join(choices.__args__)}")
