"""How the service itself calls the API on behalf of a tenant: in process, for a job whose owner may be away.

No secret stands for it, so none can leak or be guessed. Whom a call acts for is an object in the request's ASGI scope,
where a server puts nothing that came over a connection; and only an app that was made for jobs looks there, which is
never one that listens.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

_SCOPE_KEY = "twinkle.acting"


@dataclass(frozen=True)
class Acting:
    """The job that calls, and the tenant whose job it is."""

    tenant: str
    job: str


def allow_acting(app: FastAPI) -> None:
    """Make this an app for jobs. It must not listen: whoever calls it decides whom it serves."""
    app.state.allows_acting = True


def acting_in(request: Request) -> Acting | None:
    """The job that calls, if this app takes calls of jobs and this is one."""
    acting = request.scope.get(_SCOPE_KEY)
    if not isinstance(acting, Acting) or not request.app.state.allows_acting:
        return None
    return acting


def acting_for(app: ASGIApp, acting: Acting) -> ASGIApp:
    """The app as one job calls it."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, _SCOPE_KEY: acting}, receive, send)

    return call
