"""How the bytes of buckets get from one process to others: by a broadcast, or by memory that all of them see."""

from __future__ import annotations

import mmap
import os
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import BarrierOptions, BroadcastOptions

from twinkle.checkpoint_engine.base import Weights
from twinkle.checkpoint_engine.buckets import Bucket, TensorPlace, empty_bucket, num_bytes_of, packed, places_of
from twinkle.core.errors import SyncFailed

SHARED_FOLDER = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NUM_SEGMENTS = 2
"""One is filled while the other is read."""
SENDER = "the rank that sends weights"
SAMPLER = "a rank that samples"


@dataclass(frozen=True)
class Announced:
    """What the next bucket holds, and the file in which it lies where it is in shared memory."""

    places: list[TensorPlace]
    file: str | None = None


class Carrier(ABC):
    """Carries buckets among the members of a group, of which the first one sends."""

    largest_bucket: int = sys.maxsize
    """In bytes; larger ones are slower."""

    def __init__(self, group: Any, *, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout

    @abstractmethod
    def send(self, buckets: Iterable[Bucket], announce: Callable[[Announced | None], None]) -> None:
        """Send them all; each is announced to the others before they get it, and that there are no more at the end."""

    @abstractmethod
    def receive(self, next_announced: Callable[[], Announced | None]) -> Weights:
        """What was sent. A tensor is good until the next one is asked for."""

    def _wait(self, work: Work, whom: str) -> None:
        with lost(whom):
            work.wait(self._timeout)


class BroadcastCarrier(Carrier):
    """By a broadcast of the group: gloo on the host, NCCL on GPUs. Two buckets are in memory on each side.

    Args:
        group: A process group.
        device: Of what is sent.
        timeout: Of each broadcast.
    """

    def __init__(self, group: Any, *, device: torch.device, timeout: timedelta) -> None:
        super().__init__(group, timeout=timeout)
        self._device = device

    def send(self, buckets: Iterable[Bucket], announce: Callable[[Announced | None], None]) -> None:
        """See :class:`Carrier`."""
        under_way: tuple[Work, torch.Tensor] | None = None
        for bucket in buckets:
            places = places_of(bucket)
            # The one before travels while this one is packed.
            flat = packed(bucket, places, self._device)
            if under_way is not None:
                self._wait(under_way[0], SAMPLER)
            announce(Announced(places))
            under_way = self._broadcast(flat), flat
        announce(None)
        if under_way is not None:
            self._wait(under_way[0], SAMPLER)

    def receive(self, next_announced: Callable[[], Announced | None]) -> Weights:
        """See :class:`Carrier`."""
        arrived: tuple[list[TensorPlace], torch.Tensor] | None = None
        while True:
            told = next_announced()
            flat = None if told is None else empty_bucket(told.places, self._device)
            work = None if flat is None else self._broadcast(flat)
            # What came before is taken over while the next bucket travels.
            if arrived is not None:
                yield from _tensors(*arrived)
            if told is None or flat is None or work is None:
                return
            self._wait(work, SENDER)
            arrived = told.places, flat

    def _broadcast(self, flat: torch.Tensor) -> Work:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        work: Work = self._group.broadcast([flat], options)
        return work


class SharedMemoryCarrier(Carrier):
    """By files of the machine's shared memory: the sender writes into one what the others copy from there.

    The group only tells when all have read: a member that is gone breaks it, and the others learn so at once.
    """

    largest_bucket = 8 << 20  # what a processor's cache holds is copied from there

    def send(self, buckets: Iterable[Bucket], announce: Callable[[Announced | None], None]) -> None:
        """See :class:`Carrier`."""
        segments: list[Segment] = []
        read: list[Work] = []
        try:
            for number, bucket in enumerate(buckets):
                places = places_of(bucket)
                if number < NUM_SEGMENTS:
                    segments.append(Segment())
                else:
                    self._wait(read[number - NUM_SEGMENTS], SAMPLER)
                segment = segments[number % NUM_SEGMENTS]
                for place, (_, tensor) in zip(places, bucket, strict=True):
                    segment.write(tensor, place.start)
                announce(Announced(places, segment.file))
                read.append(self._barrier())
            # They need not wait until all of them have read the last one.
            announce(None)
            for work in read[-NUM_SEGMENTS:]:
                self._wait(work, SAMPLER)
        finally:
            for segment in segments:
                segment.remove()

    def receive(self, next_announced: Callable[[], Announced | None]) -> Weights:
        """See :class:`Carrier`."""
        mapped: dict[str, torch.Tensor] = {}
        while (told := next_announced()) is not None:
            assert told.file is not None, "the sender's carrier is of the same class"
            if told.file not in mapped or mapped[told.file].numel() < num_bytes_of(told.places):
                mapped[told.file] = _mapped(told.file)
            yield from _tensors(told.places, mapped[told.file])
            self._wait(self._barrier(), SENDER)

    def _barrier(self) -> Work:
        options = BarrierOptions()
        options.asyncOp = True
        work: Work = self._group.barrier(options)
        return work


class Segment:
    """A file of shared memory that grows as it is written."""

    def __init__(self) -> None:
        path = SHARED_FOLDER / f"twinkle-sync-{uuid.uuid4().hex}"
        self.file = str(path)
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)

    def write(self, tensor: torch.Tensor, start: int) -> None:
        """Put the bytes of a tensor there: pages that are written as a whole are neither cleared nor mapped before.

        Raises:
            SyncFailed: There is not so much shared memory.
        """
        plain = tensor.detach().cpu().contiguous()
        # NumPy's stub says nothing of its being a buffer.
        content: Any = plain.view(-1).view(torch.uint8).numpy() if plain.numel() else b""
        rest = memoryview(content)
        try:
            while rest:
                written = os.pwrite(self._descriptor, rest, start)
                rest, start = rest[written:], start + written
        except OSError as error:
            raise SyncFailed(
                f"{SHARED_FOLDER} has no room for {plain.nbytes} bytes; enlarge it, or give the manager"
                " engine=ProcessGroupCheckpointEngine(shares_memory=False)"
            ) from error

    def remove(self) -> None:
        """Give it back, as soon as nobody reads it any more."""
        os.close(self._descriptor)
        Path(self.file).unlink(missing_ok=True)


def shared_memory(num_bytes: int) -> tuple[str, int] | None:
    """Which memory processes share with this one, if it has as much room; none where there is no such thing."""
    if not SHARED_FOLDER.is_dir() or not BOOT_ID.is_file():
        return None
    room = os.statvfs(SHARED_FOLDER)
    if room.f_bavail * room.f_frsize < num_bytes:
        return None
    # Containers of one machine each mount their own.
    return BOOT_ID.read_text().strip(), SHARED_FOLDER.stat().st_dev


@contextmanager
def lost(who: str) -> Iterator[None]:
    """Say of a connection that broke, or of nobody's coming, what that means."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise SyncFailed(f"{who} is gone or did not answer in time; sync again once it runs ({error})") from error


def _mapped(file: str) -> torch.Tensor:
    """The bytes of another process's file; all its pages are mapped at once, which takes less than one by one."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return torch.frombuffer(mmap.mmap(descriptor, 0, flags), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _tensors(places: list[TensorPlace], flat: torch.Tensor) -> Weights:
    for place in places:
        yield place.name, place.of(flat)
