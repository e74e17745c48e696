"""Places in lists that are read page by page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlaceInList:
    """A place among what a tenant has: behind this one, which need not be there."""

    created_at: float
    id: str
