"""Requests in progress, held polls and streams among them: so many of one tenant, and of one key."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from fastapi import Request
from starlette.types import Scope

from twinkle.core.errors import Overloaded

_SCOPE_KEY = "twinkle.in_progress"

Begun: TypeAlias = list[tuple[str, str]]
"""The tenant and the key of a request, once they are known."""


class RequestsInProgress:
    """Who asks counts from when its key was looked at until the answer has left. Lives on one event loop."""

    def __init__(self, *, per_tenant: int, per_key: int) -> None:
        """Take the limits; 0 is none."""
        self._per_tenant = per_tenant
        self._per_key = per_key
        self._of_tenant: Counter[str] = Counter()
        self._of_key: Counter[str] = Counter()

    def num_of(self, tenant: str) -> int:
        """How many of a tenant's are in progress."""
        return self._of_tenant[tenant]

    def watch(self, scope: Scope) -> Begun:
        """Begin a request, nobody's yet; :meth:`end` forgets it."""
        begun: Begun = []
        scope[_SCOPE_KEY] = begun
        return begun

    def begin(self, request: Request, tenant: str, key_id: str) -> None:
        """Count a request as this tenant's and this key's, once.

        Raises:
            Overloaded: They have as many as they may have.
        """
        begun: Begun | None = request.scope.get(_SCOPE_KEY)
        if begun is None or begun:
            return
        for count, most, whose in (
            (self._of_tenant[tenant], self._per_tenant, "yours"),
            (self._of_key[key_id], self._per_key, "of this key"),
        ):
            if most and count >= most:
                raise Overloaded(
                    f"{count} requests are in progress ({whose}), polls that are held among them, and {most} may be;"
                    " come again when some have ended"
                )
        self._of_tenant[tenant] += 1
        self._of_key[key_id] += 1
        begun.append((tenant, key_id))

    def end(self, begun: Begun) -> None:
        """The answer has left, or never will."""
        for tenant, key_id in begun:
            for counts, whose in ((self._of_tenant, tenant), (self._of_key, key_id)):
                counts[whose] -= 1
                if not counts[whose]:
                    del counts[whose]
