"""The way past the framework, for routes that are asked by the thousand: one look-up from the path to the handler.

A route is declared once, like any other: that is where the document comes from, and the way of every request that is in
any respect unusual. Where a route has a fixed path and takes nothing but the request and what the server holds, there
is nothing left for the framework to find out, and its dispatch costs more than most handlers.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, TypeAlias, get_args, get_origin

from fastapi import APIRouter, Request, Response
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from twinkle.server.errors import answer_error

Take: TypeAlias = Callable[[Request], Awaitable[object]]
"""Gives one argument of a handler."""


class DirectRoute:
    """A handler with what gives its arguments, in their order."""

    def __init__(self, handler: Callable[..., Awaitable[Response]], takes: Mapping[str, Take | None]) -> None:
        """Take the parts.

        Args:
            handler: What answers.
            takes: How each of its parameters is had of the request; ``None``: it is the request.
        """
        self._handler = handler
        self._takes = tuple(takes.items())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        try:
            arguments = {name: request if take is None else await take(request) for name, take in self._takes}
            response = await self._handler(**arguments)
        except Exception as error:
            response, is_expected = await answer_error(request, error)
            await response(scope, receive, send)
            if not is_expected:
                raise
            return
        await response(scope, receive, send)


class DirectRoutes:
    """Direct ways by method and path."""

    def __init__(self, prefix: str, routers: Iterable[APIRouter]) -> None:
        """Find those of the routers' routes that have a direct way.

        Args:
            prefix: Of all their paths.
            routers: In the order in which they are asked.
        """
        self._routes: dict[tuple[str, str], DirectRoute] = {}
        for route in (route for router in routers for route in router.routes):
            takes = _takes_of(route) if isinstance(route, APIRoute) and "{" not in route.path else None
            if isinstance(route, APIRoute) and takes is not None:
                for method in route.methods or ():
                    self._routes.setdefault((method, prefix + route.path), DirectRoute(route.endpoint, takes))

    @property
    def paths(self) -> set[str]:
        """Where there is a direct way."""
        return {path for _, path in self._routes}

    def find(self, scope: Scope) -> DirectRoute | None:
        """The direct way of a request; ``None`` for what the framework is to judge: queries and all that is unusual."""
        if scope["type"] != "http" or scope["query_string"] or scope.get("root_path"):
            return None
        return self._routes.get((scope["method"], scope["path"]))


def _takes_of(route: APIRoute) -> dict[str, Take | None] | None:
    """How a handler's arguments are had of the request alone; ``None`` where that is not all they take."""
    takes: dict[str, Take | None] = {}
    for name, parameter in inspect.signature(route.endpoint, eval_str=True).parameters.items():
        if parameter.annotation is Request:
            takes[name] = None
            continue
        take = _dependency_of(parameter.annotation)
        if take is None:
            return None
        takes[name] = take
    return takes


def _dependency_of(annotation: object) -> Take | None:
    """What a parameter depends on, if that itself depends on the request only."""
    if get_origin(annotation) is not Annotated:
        return None
    depends = next((extra for extra in get_args(annotation)[1:] if isinstance(extra, Depends)), None)
    if depends is None or depends.dependency is None or not inspect.iscoroutinefunction(depends.dependency):
        return None
    parameters = inspect.signature(depends.dependency, eval_str=True).parameters.values()
    if [parameter.annotation for parameter in parameters] != [Request]:
        return None
    take: Take = depends.dependency
    return take
