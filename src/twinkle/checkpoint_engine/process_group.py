"""Weights from the first rank that trains to all that sample, over a process group that lives as long as one sync."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store, TCPStore, Work  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions

from twinkle.checkpoint_engine.base import CheckpointEngine, Topology, Weights
from twinkle.checkpoint_engine.buckets import (
    BUCKET_BYTES,
    TensorPlace,
    buckets_of,
    empty_bucket,
    packed,
    places_of,
)
from twinkle.core.errors import SyncFailed
from twinkle.infra.network import find_node_ip

LOOPBACK = "127.0.0.1"
SYNC_TIMEOUT_S = 600.0
NOT_A_MEMBER = -1
SENDER = "the rank that sends weights"


class ProcessGroupCheckpointEngine(CheckpointEngine):
    """The first rank that trains sends buckets of tensors to the ranks that sample; other ranks that train keep step.

    NCCL carries them where every member has a GPU of its own, gloo through the host's memory elsewhere. The group is
    beside whatever group the ranks have among themselves. On one machine it stays on the loopback.

    Args:
        bucket_bytes: About how much goes at a time. Two buckets are in memory on each side.
        timeout_s: How long a member waits for another.
    """

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = SYNC_TIMEOUT_S) -> None:
        self._bucket_bytes = bucket_bytes
        self._timeout = timedelta(seconds=timeout_s)
        self._doors: dict[str, socket.socket] = {}
        self._store: Store | None = None
        self._group: Any = None
        self._rank = NOT_A_MEMBER
        self._device = torch.device("cpu")

    def prepare(self) -> Mapping[str, Any]:
        """See :class:`CheckpointEngine`. The sender reserves a port on the loopback and one that other machines see."""
        address = find_node_ip()
        if self.is_sender:
            # Bound and not listened at: which of them is used shows when all have said where they are.
            self._doors = {host: _bound(host) for host in dict.fromkeys((LOOPBACK, address))}
        ports = {host: door.getsockname()[1] for host, door in self._doors.items()}
        return {"machine": (socket.gethostname(), address), "address": address, "ports": ports, "gpu": _own_gpu()}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any] | None]
    ) -> Topology:
        """See :class:`CheckpointEngine`."""
        told = [each for each in metadata if each is not None]
        sender, samplers = told[0], told[trainer_world_size:]
        members = [sender, *samplers]
        is_one_machine = len({each["machine"] for each in members}) == 1
        gpus = {each["gpu"] for each in members}
        host = LOOPBACK if is_one_machine else sender["address"]
        shared: dict[str, Any] = {
            "host": host,
            "port": sender["ports"][host],
            "size": len(members),
            # NCCL refuses two members on one GPU.
            "backend": "nccl" if None not in gpus and len(gpus) == len(members) else "gloo",
        }

        def arguments(ranks: Sequence[int], ends: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
            own: dict[str, list[Any]] = {
                "rank": list(ranks),
                "address": [LOOPBACK if is_one_machine else end["address"] for end in ends],
            }
            return {**{name: [value] * len(ranks) for name, value in shared.items()}, **own}

        others = [NOT_A_MEMBER] * (trainer_world_size - 1)
        return (
            arguments([0, *others], told[:trainer_world_size]),
            arguments(range(1, len(members)), samplers),
        )

    def init_process_group(
        self,
        *,
        rank: int = NOT_A_MEMBER,
        size: int = 0,
        host: str = LOOPBACK,
        port: int = 0,
        address: str = LOOPBACK,
        backend: str = "gloo",
        **kwargs: Any,
    ) -> None:
        """See :class:`CheckpointEngine`. Blocks until all members have come."""
        self._rank = rank
        if rank == NOT_A_MEMBER:
            return
        door = self._doors.pop(host, None)
        self._close_doors()
        if door is None:
            self._store = TCPStore(host, port, size, is_master=False, timeout=self._timeout)
        else:
            door.listen()
            self._store = TCPStore(
                host,
                port,
                size,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=door.detach(),
            )
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._group = _group(backend, self._store, rank=rank, size=size, address=address, timeout=self._timeout)

    def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See :class:`CheckpointEngine`. An error while a weight is put together is told to those that wait for it."""
        if self._rank == NOT_A_MEMBER:
            # Whoever has a part of sharded weights must be there while they are put together.
            for _ in weights:
                pass
            return
        store = self._require_store()
        number = 0
        sent: list[Work] = []
        kept: list[torch.Tensor] = []
        try:
            for bucket in buckets_of(weights, self._bucket_bytes):
                places = places_of(bucket)
                flat = packed(bucket, places, self._device)
                # The one before travels while this one is packed.
                _wait(sent, self._timeout, "a rank that samples")
                _tell(store, number, places)
                kept = [flat]
                sent.append(self._broadcast(kept))
                number += 1
            _wait(sent, self._timeout, "a rank that samples")
        except BaseException as error:
            _tell(store, number, f"{type(error).__name__}: {error}")
            raise
        _tell(store, number, [])

    def receive_weights(self) -> Weights:
        """See :class:`CheckpointEngine`. A tensor is good until the next one is asked for.

        Raises:
            SyncFailed: The sender has failed, or is gone.
        """
        store = self._require_store()
        number = 0
        arrived: tuple[list[TensorPlace], torch.Tensor] | None = None
        while True:
            with _lost(SENDER):
                told: list[TensorPlace] | str = pickle.loads(store.get(_key(number)))
            if isinstance(told, str):
                raise SyncFailed(f"{SENDER} could not: {told}")
            flat = empty_bucket(told, self._device) if told else None
            coming = [] if flat is None else [self._broadcast([flat])]
            # What came before is taken over while the next bucket travels.
            if arrived is not None:
                for place in arrived[0]:
                    yield place.name, place.of(arrived[1])
            if flat is None:
                return
            _wait(coming, self._timeout, SENDER)
            arrived = (list(told), flat)
            number += 1

    def finalize(self) -> None:
        """See :class:`CheckpointEngine`: the group ends."""
        self._close_doors()
        if self._group is not None:
            self._group.shutdown()
        self._group = None
        self._store = None
        self._rank = NOT_A_MEMBER

    def _broadcast(self, tensors: list[torch.Tensor]) -> Work:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        work: Work = self._group.broadcast(tensors, options)
        return work

    def _require_store(self) -> Store:
        if self._store is None:
            raise RuntimeError("the ranks have not met; call init_process_group first")
        return self._store

    def _close_doors(self) -> None:
        for door in self._doors.values():
            door.close()
        self._doors = {}


def _group(backend: str, store: Store, *, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 - torch has it only where it was built with CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, size, options)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _wait(sent: list[Work], timeout: timedelta, whom: str) -> None:
    while sent:
        with _lost(whom):
            sent.pop().wait(timeout)


@contextmanager
def _lost(who: str) -> Iterator[None]:
    """Say of a connection that broke, or of nobody's coming, what that means."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise SyncFailed(f"{who} is gone or did not answer in time; sync again once it runs ({error})") from error


def _bound(host: str) -> socket.socket:
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    door.bind((host, 0))
    return door


def _own_gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _tell(store: Store, number: int, what: list[TensorPlace] | str) -> None:
    """What the next bucket holds; nothing at the end; or why there will be no more."""
    told: Any = pickle.dumps(what)  # the stub knows text alone
    store.set(_key(number), told)


def _key(number: int) -> str:
    return f"bucket/{number}"
