"""Weights from the first rank that trains to all that sample, over a process group that lives as long as one sync."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from twinkle.checkpoint_engine.base import CheckpointEngine, Topology, Weights
from twinkle.checkpoint_engine.buckets import BUCKET_BYTES, buckets_of
from twinkle.checkpoint_engine.carriers import BroadcastCarrier, Carrier
from twinkle.checkpoint_engine.shared_memory import Door, SharedMemoryCarrier, knock, shared_memory
from twinkle.infra.network import find_node_ip

LOOPBACK = "127.0.0.1"
SYNC_TIMEOUT_S = 600.0
NOT_A_MEMBER = -1
LEAST_SHARED_BYTES = 256 << 20
"""That must be free of a machine's shared memory for weights to go by it."""

Way = Literal["nccl", "shared memory", "gloo"]


class ProcessGroupCheckpointEngine(CheckpointEngine):
    """The first rank that trains sends buckets of tensors to the ranks that sample; other ranks that train keep step.

    NCCL carries them where every member has a GPU of its own, memory that all share where they are on one machine, gloo
    elsewhere. The group is beside whatever group the ranks have among themselves. On one machine it stays on the
    loopback; by shared memory it needs no network.

    Args:
        bucket_bytes: About how much goes at a time, at most; of shared memory 1 MiB. Two are in memory on each side.
        timeout_s: How long a member waits for another.
        shares_memory: False sends by gloo on one machine too.
    """

    def __init__(
        self, *, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = SYNC_TIMEOUT_S, shares_memory: bool = True
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._shares_memory = shares_memory
        self._timeout = timedelta(seconds=timeout_s)
        self._ports: dict[str, socket.socket] = {}
        self._door: Door | None = None
        self._rank = NOT_A_MEMBER
        self._carrier: Carrier | None = None

    def prepare(self) -> Mapping[str, Any]:
        """See :class:`CheckpointEngine`. The sender reserves a port on the loopback and one that other machines see."""
        address = find_node_ip()
        memory = shared_memory(LEAST_SHARED_BYTES) if self._shares_memory else None
        if self.is_sender:
            # Bound and not listened at: which of them is used shows when all have said where they are.
            self._ports = {host: _bound(host) for host in dict.fromkeys((LOOPBACK, address))}
            self._door = None if memory is None else Door()
        ports = {host: door.getsockname()[1] for host, door in self._ports.items()}
        return {
            "machine": (socket.gethostname(), address),
            "memory": memory,
            "door": None if self._door is None else self._door.name,
            "address": address,
            "ports": ports,
            "gpu": _own_gpu(),
        }

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any] | None]
    ) -> Topology:
        """See :class:`CheckpointEngine`."""
        told = [each for each in metadata if each is not None]
        sender, samplers = told[0], told[trainer_world_size:]
        members = [sender, *samplers]
        is_one_machine = len({each["machine"] for each in members}) == 1
        host = LOOPBACK if is_one_machine else sender["address"]
        shared: dict[str, Any] = {
            "host": host,
            "port": sender["ports"][host],
            "door": sender["door"],
            "size": len(members),
            "way": _way(members),
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
        door: str | None = None,
        way: Way = "gloo",
        **kwargs: Any,
    ) -> None:
        """See :class:`CheckpointEngine`. Blocks until all members have come."""
        self._rank = rank
        if rank == NOT_A_MEMBER:
            return
        try:
            if way == "shared memory":
                assert door is not None, "a sender that shares memory has a door"
                self._carrier = self._by_memory(door, size=size)
            else:
                self._carrier = self._by_group(way, rank=rank, size=size, host=host, port=port, address=address)
        finally:
            self._close_doors()

    def _by_memory(self, door: str, *, size: int) -> Carrier:
        if self._door is None:
            return SharedMemoryCarrier([knock(door, timeout=self._timeout)])
        return SharedMemoryCarrier(self._door.let_in(size - 1, timeout=self._timeout))

    def _by_group(self, way: Way, *, rank: int, size: int, host: str, port: int, address: str) -> Carrier:
        listener = self._ports.pop(host, None)
        if listener is None:
            store = TCPStore(host, port, size, is_master=False, timeout=self._timeout)
        else:
            listener.listen()
            store = TCPStore(
                host,
                port,
                size,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        group = _group(way, store, rank=rank, size=size, address=address, timeout=self._timeout)
        device = torch.device("cuda", torch.cuda.current_device()) if way == "nccl" else torch.device("cpu")
        return BroadcastCarrier(group, store, device=device, timeout=self._timeout)

    def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See :class:`CheckpointEngine`. An error while a weight is put together is told to those that wait for it."""
        if self._rank == NOT_A_MEMBER:
            # Whoever has a part of sharded weights must be there while they are put together.
            for _ in weights:
                pass
            return
        carrier = self._require_carrier()
        try:
            carrier.send(buckets_of(weights, min(self._bucket_bytes, carrier.largest_bucket)))
        except BaseException as error:
            carrier.tell_failure(f"{type(error).__name__}: {error}")
            # Ranks beside this one put every weight together still, and need it for that.
            for _ in weights:
                pass
            raise

    def receive_weights(self) -> Weights:
        """See :class:`CheckpointEngine`. A tensor is good until the next one is asked for.

        Raises:
            SyncFailed: The sender has failed, or is gone.
        """
        return self._require_carrier().receive()

    def finalize(self) -> None:
        """See :class:`CheckpointEngine`: the group ends."""
        self._close_doors()
        if self._carrier is not None:
            self._carrier.close()
        self._carrier = None
        self._rank = NOT_A_MEMBER

    def _require_carrier(self) -> Carrier:
        if self._carrier is None:
            raise RuntimeError("the ranks have not met; call init_process_group first")
        return self._carrier

    def _close_doors(self) -> None:
        for listener in self._ports.values():
            listener.close()
        self._ports = {}
        if self._door is not None:
            self._door.close()
        self._door = None


def _way(members: Sequence[Mapping[str, Any]]) -> Way:
    gpus = {each["gpu"] for each in members}
    # NCCL refuses two members on one GPU.
    if None not in gpus and len(gpus) == len(members):
        return "nccl"
    memories = {each["memory"] for each in members}
    return "shared memory" if len(memories) == 1 and None not in memories else "gloo"


def _group(way: Way, store: TCPStore, *, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    if way == "nccl":
        from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 - torch has it only where it was built with CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, size, options)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _bound(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    return listener


def _own_gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
