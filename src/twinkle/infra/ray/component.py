"""The script's end of an object that the workers of a group hold: same class, its marked methods run there."""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from twinkle.infra.device_mesh import current_rank, current_world_size
from twinkle.infra.ray.calls import Backlog, LazyResult, PendingCall, Workers
from twinkle.infra.ray.worker import END_OF_ITERATION, Kept, held_here
from twinkle.infra.remote import END, RemoteCall, marks_of
from twinkle.infra.spread import Layout, peers, spread, wanted


@dataclass(eq=False)
class RemoteEnd:
    """An object on some workers, and the way to it."""

    kind: type
    key: str
    workers: Workers
    layout: Layout
    is_lazy: bool
    backlog: Backlog = field(default_factory=Backlog)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker that gets it has calls of its own.
        return RemoteEnd, (self.kind, self.key, self.workers, self.layout, self.is_lazy)

    def construct(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_alone: bool) -> None:
        """Make it on every rank, and wait until it is.

        Raises:
            Exception: What its constructor raised.
        """
        name = self.kind.__name__
        self.workers.require(name)
        pending = self._submit(
            name, range(self.layout.size), "construct", [(self.kind, args, dict(kwargs), is_alone)] * self.layout.size
        )
        pending.wait()

    def call(self, name: str, mark: RemoteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a marked method on the ranks that its mark says; the result, or a function that waits for it."""
        # Not under the lock: they may be another group's, whose calls wait for this one's.
        args, kwargs = tuple(_value_of(each, is_outer=True) for each in args), _settled(kwargs)
        with self.workers.lock:
            self.workers.require(name)
            self.backlog.look()
            targets = self._targets(mark)
            calls = spread(mark, self.layout, targets, args, kwargs)
            keeps = wanted(mark, self.layout, targets)
            arguments = [(name, *each, rank in keeps) for rank, each in zip(targets, calls, strict=True)]
            pending = self._submit(name, targets, "call", arguments)
            pending.timeout_s = mark.timeout
            self.backlog.add(pending)
            result = LazyResult(pending, mark, self.layout, keeps, self._unwrapped)
            is_lazy = self.is_lazy if mark.lazy_collect is None else mark.lazy_collect
            if mark.sync or not is_lazy:
                self.backlog.wait(until=pending)
        return result if is_lazy else result()

    def _targets(self, mark: RemoteCall) -> list[int]:
        if mark.execute == "first":
            return [0]
        if mark.execute == "peer":
            return peers(self.layout.size, caller_rank=current_rank(), caller_size=current_world_size())
        return list(range(self.layout.size))

    def _submit(self, name: str, ranks: Any, method: str, arguments: list[tuple[Any, ...]]) -> PendingCall:
        statuses, values = [], []
        for rank, each in zip(ranks, arguments, strict=True):
            status, value = getattr(self.workers.handles[rank], method).options(num_returns=2).remote(self.key, *each)
            statuses.append(status)
            values.append(value)
        return PendingCall(self.workers, f"{self.kind.__name__}.{name}", list(ranks), statuses, values)

    def _unwrapped(self, value: Any, rank: int) -> Any:
        return RemoteIterator(self, rank, value.number) if isinstance(value, Kept) else value

    def ask(self, rank: int, what: str, method: str, *args: Any) -> tuple[Any, Any]:
        """Call a method of a worker itself, and wait: what it said, and its value."""
        with self.workers.lock:
            self.workers.require(what)
        status, value = getattr(self.workers.handles[rank], method).options(num_returns=2).remote(*args)
        pending = PendingCall(self.workers, f"{self.kind.__name__}.{what}", [rank], [status], [value])
        pending.wait()
        return pending.status(), pending.fetch(rank)

    def release(self) -> None:
        """Forget it on the workers; nothing happens where they are gone. What its calls raise is still raised."""
        if not self.backlog.is_over:
            self.workers.left_behind.append(self.backlog)
        if self.workers.lost is None:
            for handle in self.workers.handles[: self.layout.size]:
                handle.release.remote(self.key)


class RemoteIterator(Iterator[Any]):
    """An iterator that a worker keeps; each item is computed when it is asked for."""

    def __init__(self, end: RemoteEnd, rank: int, number: int) -> None:
        self._end = end
        self._rank = rank
        self._number = number
        self._is_over = False

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        self._is_over = True
        status, value = self._end.ask(self._rank, "__next__", "advance", self._number)
        if status == END_OF_ITERATION:
            raise StopIteration
        self._is_over = False
        return value

    def close(self) -> None:
        """Go no further; the worker forgets it."""
        if not self._is_over and self._end.workers.lost is None:
            self._end.workers.handles[self._rank].give_up.remote(self._number)
        self._is_over = True

    def __del__(self) -> None:
        if ray.is_initialized():
            self.close()


def make_end(
    kind: type,
    workers: Workers,
    layout: Layout,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_alone: bool,
    is_lazy: bool,
) -> Any:
    """Make an object on workers; the script's end of it, whose loss frees it there."""
    end = RemoteEnd(kind, uuid.uuid4().hex, workers, layout, is_lazy)
    end.construct(args, kwargs, is_alone=is_alone)
    component: Any = end_of_class(kind, end)
    weakref.finalize(component, _released, end).atexit = False
    return component


def end_of_class(kind: type, end: RemoteEnd) -> Any:
    """The object that a script calls."""
    component: Any = object.__new__(_end_class(kind))
    vars(component)[END] = end
    return component


def _arrived(kind: type, end: RemoteEnd) -> Any:
    """What a worker gets that is passed a component: the object itself, if it holds it."""
    held = held_here(end.key)
    return end_of_class(kind, end) if held is None else held


def _released(end: RemoteEnd) -> None:
    end.release()


@functools.cache
def _end_class(kind: type) -> type:
    """A class of the same name whose marked methods call the workers; what is not marked runs here, without a state."""

    def __init__(self: object, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - of the class that is made
        """Made already."""

    def __getattr__(self: object, name: str) -> Any:  # noqa: N807 - as above
        if name.startswith("__"):
            raise AttributeError(name)
        end: RemoteEnd = vars(self)[END]
        raise AttributeError(
            f"{kind.__name__} is on the workers of group {end.workers.group!r}, and with it {name!r}; ask for it in a"
            " method that is marked with remote_function"
        )

    def __reduce__(self: object) -> tuple[Any, ...]:  # noqa: N807 - as above
        return _arrived, (kind, vars(self)[END])

    namespace: dict[str, Any] = {
        "__init__": __init__,
        "__getattr__": __getattr__,
        "__reduce__": __reduce__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "is_remote_end": True,
    }
    namespace |= {name: _calling(getattr(kind, name), name, mark) for name, mark in marks_of(kind).items()}
    return type(kind.__name__, (kind,), namespace)


def _calling(function: Callable[..., Any], name: str, mark: RemoteCall) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        end: RemoteEnd = vars(self)[END]
        return end.call(name, mark, args, kwargs)

    return call


def _settled(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the values of results that were not waited for, also of those that stand in a list or a dict."""
    return {name: _value_of(value, is_outer=True) for name, value in arguments.items()}


def _value_of(value: Any, *, is_outer: bool = False) -> Any:
    if isinstance(value, LazyResult):
        return value()
    # No deeper: a batch holds more numbers than one wants to look at.
    if is_outer and type(value) in (list, tuple):
        return type(value)(_value_of(each) for each in value)
    if is_outer and type(value) is dict:
        return {name: _value_of(each) for name, each in value.items()}
    return value
