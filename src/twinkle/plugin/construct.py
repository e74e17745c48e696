"""What scripts pass where a component is wanted: the object itself, its class, a callable, or a name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.plugin.loading import Plugin, is_plugin_id

Component = TypeVar("Component")


def construct_class(
    field: str,
    value: object,
    kind: type[Component],
    known: Mapping[str, Callable[..., Component]],
    *args: object,
    wrap: Callable[[Callable[..., Any]], Component] | None = None,
    **settings: Any,
) -> Component:
    """The component that ``value`` stands for.

    Args:
        field: The name of the argument, for errors.
        value: An instance of ``kind``, taken as it is; a class or factory of it, called with ``args`` and ``settings``;
            a key of ``known``; the id of a plugin; or, where ``wrap`` is given, any other callable.
        kind: What the component must be.
        known: The named components.
        args: First arguments of the constructor.
        wrap: Makes a component of a plain function.
        settings: Keyword arguments of the constructor.

    Raises:
        InvalidInput: The name is unknown, the plugin is not trusted, the settings do not fit, or ``value`` is something
            else.
    """
    # Texts and classes first: to a protocol of methods they look like objects of its kind.
    if isinstance(value, kind) and not isinstance(value, (str, type)):
        if settings:
            raise InvalidInput(field, f"is an object already; settings like {next(iter(settings))} come too late")
        return value
    if isinstance(value, str):
        return _call(field, value, _named(field, value, kind, known), args, settings)
    if isinstance(value, type) and issubclass(value, kind):
        return _call(field, value.__name__, value, args, settings)
    if callable(value) and not isinstance(value, type) and wrap is not None:
        return wrap(value)
    names = ", ".join(sorted(known))
    raise InvalidInput(field, f"is {value!r}; send a {kind.__name__}, a class of it or one of {names}")


def _named(
    field: str, name: str, kind: type[Component], known: Mapping[str, Callable[..., Component]]
) -> Callable[..., Component]:
    if is_plugin_id(name):
        try:
            return Plugin.load_plugin(name, kind)
        except ConfigError as error:
            raise InvalidInput(field, error.message) from error
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"use one of {', '.join(sorted(known)) or 'its classes: none is declared by name'}"
    )
    raise InvalidInput(field, f"{name!r} is not known; {hint}")


def _call(
    field: str,
    name: str,
    factory: Callable[..., Component],
    args: tuple[object, ...],
    settings: Mapping[str, Any],
) -> Component:
    try:
        return factory(*args, **settings)
    except TypeError as error:
        raise InvalidInput(field, f"{name} cannot be built with these settings: {error}") from error
