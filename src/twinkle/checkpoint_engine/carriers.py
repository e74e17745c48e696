"""How the bytes of buckets get from one process to others."""

from __future__ import annotations

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, Work  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions

from twinkle.checkpoint_engine.base import Weights
from twinkle.checkpoint_engine.buckets import Bucket, TensorPlace, empty_bucket, packed, places_of
from twinkle.core.errors import SyncFailed

SENDER = "the rank that sends weights"
SAMPLER = "a rank that samples"


class Carrier(ABC):
    """Carries buckets from one member to all others, which have met."""

    largest_bucket: int = sys.maxsize
    """In bytes; larger ones are slower."""

    @abstractmethod
    def send(self, buckets: Iterable[Bucket]) -> None:
        """Send them all, and that there are no more."""

    @abstractmethod
    def tell_failure(self, reason: str) -> None:
        """Tell those that wait for the next bucket that none will come."""

    @abstractmethod
    def receive(self) -> Weights:
        """What was sent. A tensor is good until the next one is asked for.

        Raises:
            SyncFailed: The sender has failed, or is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connections to the others."""


class BroadcastCarrier(Carrier):
    """By a broadcast of a group: gloo on the host, NCCL on GPUs. Two buckets are in memory on each side.

    Args:
        group: A process group, whose first member sends.
        store: In which it tells what the next bucket holds.
        device: Of what is sent.
        timeout: Of each broadcast.
    """

    def __init__(self, group: Any, store: Store, *, device: torch.device, timeout: timedelta) -> None:
        self._group = group
        self._store = store
        self._device = device
        self._timeout = timeout
        self._number = 0

    def send(self, buckets: Iterable[Bucket]) -> None:
        """See :class:`Carrier`."""
        under_way: tuple[Work, torch.Tensor] | None = None
        for bucket in buckets:
            places = places_of(bucket)
            # The one before travels while this one is packed.
            flat = packed(bucket, places, self._device)
            if under_way is not None:
                self._wait(under_way[0], SAMPLER)
            self._tell(places)
            under_way = self._broadcast(flat), flat
        self._tell(None)
        if under_way is not None:
            self._wait(under_way[0], SAMPLER)

    def tell_failure(self, reason: str) -> None:
        """See :class:`Carrier`."""
        self._tell(reason)

    def receive(self) -> Weights:
        """See :class:`Carrier`."""
        arrived: tuple[list[TensorPlace], torch.Tensor] | None = None
        while True:
            places = self._next_told()
            flat = None if places is None else empty_bucket(places, self._device)
            work = None if flat is None else self._broadcast(flat)
            # What came before is taken over while the next bucket travels.
            if arrived is not None:
                yield from tensors_of(*arrived)
            if places is None or flat is None or work is None:
                return
            self._wait(work, SENDER)
            arrived = places, flat

    def close(self) -> None:
        """See :class:`Carrier`."""
        self._group.shutdown()

    def _broadcast(self, flat: torch.Tensor) -> Work:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        work: Work = self._group.broadcast([flat], options)
        return work

    def _wait(self, work: Work, whom: str) -> None:
        with lost(whom):
            work.wait(self._timeout)

    def _tell(self, what: list[TensorPlace] | str | None) -> None:
        told: Any = pickle.dumps(what)  # the stub knows text alone
        self._store.set(self._key(), told)
        self._number += 1

    def _next_told(self) -> list[TensorPlace] | None:
        with lost(SENDER):
            told: list[TensorPlace] | str | None = pickle.loads(self._store.get(self._key()))
        self._number += 1
        if isinstance(told, str):
            raise sender_failed(told)
        return told

    def _key(self) -> str:
        return f"bucket/{self._number}"


def sender_failed(reason: str) -> SyncFailed:
    """What a member raises that was told so."""
    return SyncFailed(f"{SENDER} could not: {reason}")


@contextmanager
def lost(who: str) -> Iterator[None]:
    """Say of a connection that broke, or of nobody's coming, what that means."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        raise SyncFailed(f"{who} is gone or did not answer in time; sync again once it runs ({error})") from error


def tensors_of(places: list[TensorPlace], flat: torch.Tensor) -> Weights:
    """The tensors of a bucket, in its bytes."""
    for place in places:
        yield place.name, place.of(flat)
