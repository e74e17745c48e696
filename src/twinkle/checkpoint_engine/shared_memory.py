"""Buckets between processes of one machine: in memory that all of them see, announced through a socket."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from twinkle.checkpoint_engine.base import Weights
from twinkle.checkpoint_engine.buckets import Bucket, TensorPlace, num_bytes_of, places_of
from twinkle.checkpoint_engine.carriers import SAMPLER, SENDER, Carrier, lost, sender_failed, tensors_of
from twinkle.core.errors import SyncFailed

SHARED_FOLDER = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NUM_SEGMENTS = 2
"""One is filled while the other is read."""
HAS_READ = b"read"

Told = tuple[list[TensorPlace], str] | str | None
"""What a bucket holds, and the file in which it lies; why none will come; that there are no more."""


class Door:
    """Where the sender waits for the others: a socket in the folder of shared memory, for processes of its user."""

    def __init__(self) -> None:
        self._path = _new_path()
        self.name = str(self._path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.name)
        self._path.chmod(0o600)
        self._socket.listen()

    def let_in(self, count: int, *, timeout: timedelta) -> list[Connection]:
        """The connections to so many others. Blocks until all have come.

        Raises:
            SyncFailed: They have not in time.
        """
        self._socket.settimeout(timeout.total_seconds())
        with lost(SAMPLER):
            return [_connection(self._socket.accept()[0], timeout) for _ in range(count)]

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def knock(door: str, *, timeout: timedelta) -> Connection:
    """The connection to the sender that waits behind a door.

    Raises:
        SyncFailed: It is gone.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with lost(SENDER):
        end.connect(door)
    return _connection(end, timeout)


class SharedMemoryCarrier(Carrier):
    """The sender writes into files of the machine's shared memory what the others copy from there.

    Buckets are small, so that one is copied while the next is written, and little new memory is asked for. A member
    that is gone breaks its connection, and the others learn so at once.

    Args:
        connections: Of the sender, one to each of the others; of these, the one to it.
    """

    largest_bucket = 1 << 20

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def send(self, buckets: Iterable[Bucket]) -> None:
        """See :class:`Carrier`."""
        segments: list[Segment] = []
        num_unread = 0
        try:
            for number, bucket in enumerate(buckets):
                places = places_of(bucket)
                if number < NUM_SEGMENTS:
                    segments.append(Segment())
                else:
                    self._wait_until_read()
                    num_unread -= 1
                segment = segments[number % NUM_SEGMENTS]
                for place, (_, tensor) in zip(places, bucket, strict=True):
                    segment.write(tensor, place.start)
                self._tell((places, segment.file))
                num_unread += 1
            # They need not wait until all of them have read the last one.
            self._tell(None)
            for _ in range(num_unread):
                self._wait_until_read()
        finally:
            for segment in segments:
                segment.remove()

    def tell_failure(self, reason: str) -> None:
        """See :class:`Carrier`."""
        for connection in self._connections:
            # It may be the one that failed.
            with suppress(OSError):
                connection.send_bytes(pickle.dumps(reason))

    def receive(self) -> Weights:
        """See :class:`Carrier`."""
        [sender] = self._connections
        mapped: dict[str, torch.Tensor] = {}
        while True:
            with lost(SENDER):
                told: Told = pickle.loads(sender.recv_bytes())
            if told is None:
                return
            if isinstance(told, str):
                raise sender_failed(told)
            places, file = told
            if file not in mapped or mapped[file].numel() < num_bytes_of(places):
                mapped[file] = _mapped(file)
            yield from tensors_of(places, mapped[file])
            with lost(SENDER):
                sender.send_bytes(HAS_READ)

    def close(self) -> None:
        """See :class:`Carrier`."""
        for connection in self._connections:
            connection.close()

    def _tell(self, what: Told) -> None:
        message = pickle.dumps(what)
        with lost(SAMPLER):
            for connection in self._connections:
                connection.send_bytes(message)

    def _wait_until_read(self) -> None:
        """Until all have read the oldest bucket that not all are known to have read."""
        with lost(SAMPLER):
            for connection in self._connections:
                connection.recv_bytes()


class Segment:
    """A file of shared memory that grows as it is written."""

    def __init__(self) -> None:
        path = _new_path()
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


def _mapped(file: str) -> torch.Tensor:
    """The bytes of another process's file; all its pages are mapped at once, which takes less than one by one."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return torch.frombuffer(mmap.mmap(descriptor, 0, flags), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _new_path() -> Path:
    return SHARED_FOLDER / f"twinkle-sync-{uuid.uuid4().hex}"


def _connection(end: socket.socket, timeout: timedelta) -> Connection:
    """A connection that waits so long for the other end, in both directions."""
    end.setblocking(True)
    seconds, microseconds = divmod(timeout // timedelta(microseconds=1), 1_000_000)
    limit = struct.pack("ll", seconds, microseconds)
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, direction, limit)
    return Connection(end.detach())
