"""What runs in each worker of a group: the objects that the script has made there, and their calls."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle

from twinkle.core.errors import TwinkleError
from twinkle.core.process.events import event_log
from twinkle.infra.platform import Platform
from twinkle.infra.process_group import find_store, join_store, leave_world, open_store
from twinkle.infra.ray.tensors import send_tensors_by_memory
from twinkle.infra.runtime import COLLECTIVE_TIMEOUT_S, Runtime, become_worker, serving_group

END_OF_ITERATION = "end of iteration"

log = event_log()


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """Which worker this is, and what it was told.

    Args:
        group: Of ``initialize``.
        rank: Among the workers of the group.
        size: How many they are.
        told: What the script told ``initialize``, as it holds here.
        folder: Where the script runs: paths that it names are meant from there.
        import_path: Of the script: what it imports, its objects want here too.
        environment: Of the script, what a worker of an existing cluster would lack.
        visible_devices: The value of the variable by which the device's maker is told what a process sees.
    """

    group: str
    rank: int
    size: int
    told: Runtime
    folder: str
    import_path: tuple[str, ...]
    environment: Mapping[str, str]
    visible_devices: tuple[str, str] | None = None


@dataclass(frozen=True)
class Raised:
    """An exception of a call, on its way to the script."""

    error: bytes | None
    """Class, arguments and attributes, pickled; None if they do not let themselves be."""
    text: str
    trace: str
    is_of_collective: bool = False
    """Whether it came out of what the ranks do together: another rank may be its cause."""

    @classmethod
    def of(cls, error: Exception) -> Raised:
        """What can travel of it."""
        text, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        frames = traceback.walk_tb(error.__traceback__)
        modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
        is_of_collective = modules[-1:] != [] and modules[-1].startswith("torch.distributed")
        try:
            # Not the exception itself: unpickled, it would call its constructor with its text alone.
            pickled = cloudpickle.dumps((type(error), error.args, vars(error)))  # type: ignore[no-untyped-call]
            cloudpickle.loads(pickled)
        except Exception:  # noqa: BLE001 - what an exception of a user's own holds may fail in any way
            return cls(None, text, trace, is_of_collective)
        return cls(pickled, text, trace, is_of_collective)

    def error_again(self) -> Exception:
        """The exception, or one that says its text."""
        if self.error is None:
            return TwinkleError(self.text)
        kind, args, attributes = cloudpickle.loads(self.error)
        error: Exception = kind.__new__(kind, *args)
        error.args = args
        vars(error).update(attributes)
        return error


@dataclass(frozen=True)
class Kept:
    """Stands for an iterator, which cannot travel: the worker keeps it under a number."""

    number: int


_held_here: dict[str, Any] = {}
"""The objects of this process, which is one worker."""


def held_here(key: str) -> Any | None:
    """The object under a key, if this process is a worker that has it."""
    return _held_here.get(key)


class Worker:
    """One process of a group. Calls come one after the other, in the script's order."""

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self._objects = _held_here
        self._iterators: dict[int, Iterator[Any]] = {}
        self._num_kept = 0
        self._has_met = False
        for name, value in place.environment.items():
            os.environ.setdefault(name, value)
        if place.visible_devices is not None:
            os.environ[place.visible_devices[0]] = place.visible_devices[1]
        os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
        sys.path += [folder for folder in place.import_path if folder not in sys.path]
        if os.path.isdir(place.folder):
            os.chdir(place.folder)
        else:
            log.warning(
                "ray.worker.no_such_folder", folder=place.folder, next="relative paths are meant from elsewhere"
            )
        send_tensors_by_memory()
        become_worker(place.told)

    def __repr__(self) -> str:
        # Ray begins every line that a worker prints with it.
        return f"{self._place.group} rank {self._place.rank}"

    def describe(self) -> tuple[str, int, str]:
        """Address of the node, process, devices."""
        accelerators = ray.get_runtime_context().get_accelerator_ids()
        found = ", ".join(f"{name} {' '.join(ids)}" for name, ids in accelerators.items() if ids)
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, os.getpid(), found or "cpu"

    def open_meeting(self, host: str) -> tuple[str, int]:
        """Of the first rank: a place where the ranks meet."""
        self._store, port = open_store(size=self._place.size, timeout_s=COLLECTIVE_TIMEOUT_S, host=host)
        return host, port

    def meet(self, host: str, port: int, device_type: str, local_rank: int, local_size: int) -> None:
        """Join the world of the group's ranks, as torchrun's do. Blocks until all have come."""
        place = self._place
        platform = Platform.named(device_type)
        # A worker sees its own devices alone, so that the first of them is its.
        number = 0 if platform.device_type != "cpu" else local_rank
        os.environ |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(local_size)}
        if place.rank > 0:
            self._store = find_store(port, size=place.size, timeout_s=COLLECTIVE_TIMEOUT_S, host=host)
        join_store(
            platform,
            self._store,
            rank=place.rank,
            size=place.size,
            timeout_s=COLLECTIVE_TIMEOUT_S,
            device_number=0,
            interface="lo" if local_size == place.size else None,
        )

    def construct(self, key: str, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any], is_alone: bool) -> Any:
        """Make an object; ``is_alone`` if it serves the whole group."""
        try:
            if is_alone:
                with serving_group():
                    self._objects[key] = kind(*args, **kwargs)
            else:
                self._objects[key] = kind(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the script raises it
            return Raised.of(error), None
        return None, None

    def call(self, key: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_wanted: bool) -> Any:
        """Call a method of an object; its exception, else its result if that is wanted."""
        try:
            result = getattr(self._objects[key], method)(*args, **kwargs)
            return None, self._as_it_travels(result) if is_wanted else None
        except Exception as error:  # noqa: BLE001 - the script raises it
            return Raised.of(error), None

    def advance(self, number: int) -> Any:
        """The next item of a kept iterator."""
        try:
            return None, next(self._iterators[number])
        except StopIteration:
            del self._iterators[number]
            return END_OF_ITERATION, None
        except Exception as error:  # noqa: BLE001 - the script raises it
            del self._iterators[number]
            return Raised.of(error), None

    def give_up(self, number: int) -> None:
        """Close an iterator that nobody goes on with."""
        iterator = self._iterators.pop(number, None)
        if iterator is not None and "close" in dir(iterator):
            iterator.close()  # type: ignore[attr-defined]

    def release(self, key: str) -> None:
        """Forget an object."""
        self._objects.pop(key, None)

    def leave(self) -> None:
        """Before the end: close the connections to the other ranks."""
        leave_world()

    def _as_it_travels(self, result: Any) -> Any:
        if isinstance(result, Future):
            return result.result()
        if isinstance(result, Iterator) and not isinstance(result, io.IOBase):
            self._num_kept += 1
            self._iterators[self._num_kept] = result
            return Kept(self._num_kept)
        return result
