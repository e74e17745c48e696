"""Components that the engine takes by name and rooms above it bring: declared as entry points, loaded when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any


class Registry(Mapping[str, Callable[..., Any]]):
    """The components that installed distributions declare in one entry-point group, by name.

    Nothing is imported before a name is looked up, so the engine needs none of what it may be given. A package of one's
    own declares its classes in the same group of its ``pyproject.toml``.
    """

    def __init__(self, group: str) -> None:
        self.group = group

    @cached_property
    def _declared(self) -> Mapping[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        component: Callable[..., Any] = self._declared[name].load()
        return component

    def __contains__(self, name: object) -> bool:
        return name in self._declared

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)
