"""Weights between ranks that have no world in common; every rank here is a thread."""

from __future__ import annotations

import copy
import math
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from twinkle.checkpoint_engine import ProcessGroupCheckpointEngine, shared_memory
from twinkle.checkpoint_engine.shared_memory import SHARED_FOLDER
from twinkle.core.errors import SyncFailed

WEIGHTS = {
    "embed": torch.arange(600, dtype=torch.float32).view(20, 30),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False, True]),
    "nothing": torch.empty(0, 4),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "transposed": torch.arange(12, dtype=torch.float32).view(3, 4).T,
    "large": torch.randn(3000, generator=torch.Generator().manual_seed(1)),
}


class World:
    """A training of some ranks and samplers of some, which have met."""

    def __init__(self, trainers: int, samplers: int, way: str = "gloo", **settings) -> None:
        self.way = way
        # Of a size that several buckets are needed, and one tensor is larger than any.
        self.engine = ProcessGroupCheckpointEngine(**{"bucket_bytes": 4000, **settings})
        self.trainers = [copy.deepcopy(self.engine) for _ in range(trainers)]
        self.samplers = [copy.deepcopy(self.engine) for _ in range(samplers)]
        self.pool = ThreadPoolExecutor(trainers + samplers)
        self.meet()

    def meet(self) -> None:
        self.trainers[0].is_sender = True
        ends = [*self.trainers, *self.samplers]
        ours, theirs = self.engine.build_topology(
            len(self.trainers), len(self.samplers), [end.prepare() for end in ends]
        )
        for told in (ours, theirs):
            told["way"] = [self.way] * len(told["way"])
        arguments = [(ours, place) for place in range(len(self.trainers))]
        arguments += [(theirs, place) for place in range(len(self.samplers))]
        coming = [
            self.pool.submit(end.init_process_group, **{name: values[place] for name, values in told.items()})
            for end, (told, place) in zip(ends, arguments, strict=True)
        ]
        for end in coming:
            end.result(60)

    def send(self, weights) -> list[Future]:
        return [self.pool.submit(trainer.send_weights, iter(weights)) for trainer in self.trainers]

    def receive(self) -> list[Future]:
        return [self.pool.submit(received, sampler) for sampler in self.samplers]

    def close(self) -> None:
        for end in [*self.trainers, *self.samplers]:
            end.finalize()
        self.pool.shutdown()


def received(sampler):
    return {name: tensor.clone() for name, tensor in sampler.receive_weights()}


@pytest.fixture(params=["gloo", "shared memory"])
def make_world(request, monkeypatch):
    worlds = []
    # A place of its own in shared memory: what others send meanwhile is theirs.
    folder = tempfile.TemporaryDirectory(prefix="twinkle-test-", dir=SHARED_FOLDER)
    monkeypatch.setattr(shared_memory, "SHARED_FOLDER", Path(folder.name))

    def make(*args, **settings):
        worlds.append(World(*args, way=request.param, **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
    left = list(Path(folder.name).iterdir())
    folder.cleanup()
    assert left == []


@pytest.mark.parametrize(("trainers", "samplers"), [(1, 1), (2, 3)])
def test_every_sampler_gets_every_weight_as_it_is(make_world, trainers, samplers):
    world = make_world(trainers, samplers)

    sent = world.send(WEIGHTS.items())
    taken = [each.result(60) for each in world.receive()]

    assert [each.result(60) for each in sent] == [None] * trainers
    for weights in taken:
        assert list(weights) == list(WEIGHTS)
        for name, tensor in weights.items():
            assert tensor.dtype == WEIGHTS[name].dtype and torch.equal(tensor, WEIGHTS[name]), name


def test_ranks_that_train_but_do_not_send_help_to_put_every_weight_together(make_world):
    world = make_world(2, 1)
    seen: list[list[str]] = [[], []]

    def weights(rank):
        for name, tensor in WEIGHTS.items():
            seen[rank].append(name)
            yield name, tensor

    sent = [world.pool.submit(end.send_weights, weights(rank)) for rank, end in enumerate(world.trainers)]
    for each in [*world.receive(), *sent]:
        each.result(60)

    assert seen == [list(WEIGHTS)] * 2


def test_a_sender_whose_sampler_is_gone_puts_the_rest_together_with_the_others_all_the_same(make_world):
    world = make_world(2, 1)
    seen: list[list[str]] = [[], []]

    def weights(rank):
        for name, tensor in WEIGHTS.items():
            seen[rank].append(name)
            yield name, tensor

    world.samplers[0].finalize()
    sent = [world.pool.submit(end.send_weights, weights(rank)) for rank, end in enumerate(world.trainers)]

    sent[1].result(60)
    with pytest.raises(SyncFailed, match="gone"):
        sent[0].result(60)
    assert seen == [list(WEIGHTS)] * 2


def test_ranks_meet_again_after_a_sync(make_world):
    world = make_world(1, 1)
    for factor in (1, 2):
        sent = world.send({"weight": torch.full((4,), factor)}.items())
        assert world.receive()[0].result(60)["weight"].tolist() == [factor] * 4
        sent[0].result(60)
        for end in [*world.trainers, *world.samplers]:
            end.finalize()
        world.meet()


def test_a_weight_that_cannot_be_put_together_is_told_to_those_who_wait_for_it(make_world):
    world = make_world(1, 2)

    def weights():
        yield "good", torch.ones(2000)
        raise ValueError("the update is no sum")

    (sent,) = world.send(weights())
    for each in world.receive():
        with pytest.raises(SyncFailed, match="the update is no sum"):
            each.result(60)
    with pytest.raises(ValueError, match="the update is no sum"):
        sent.result(60)


def test_a_sender_that_is_gone_is_an_error_of_those_who_wait_for_it(make_world):
    world = make_world(1, 1)
    taken = world.receive()
    world.trainers[0].finalize()

    with pytest.raises(SyncFailed, match="gone"):
        taken[0].result(60)


def test_a_sender_does_not_wait_for_ever_for_a_sampler_that_is_gone(make_world):
    world = make_world(1, 1, timeout_s=2)
    world.samplers[0].finalize()

    with pytest.raises(SyncFailed, match="gone"):
        world.send(WEIGHTS.items())[0].result(60)


def test_by_shared_memory_an_end_that_does_not_answer_is_given_up_and_one_that_is_gone_at_once():
    door = shared_memory.Door()
    sampler = shared_memory.knock(door.name, timeout=timedelta(minutes=1))
    carrier = shared_memory.SharedMemoryCarrier(door.let_in(1, timeout=timedelta(milliseconds=50)))
    try:
        with pytest.raises(SyncFailed, match="did not answer in time"):
            carrier.send([[("weight", torch.ones(4))]])
    finally:
        carrier.close()
        sampler.close()
        door.close()
    with pytest.raises(SyncFailed, match="gone"):
        shared_memory.knock(door.name, timeout=timedelta(minutes=1))


@pytest.mark.parametrize(
    ("gpus", "machines", "way", "hosts"),
    [
        ((None, None), ("a", "a"), "shared memory", {"127.0.0.1"}),
        (("x", "y"), ("a", "a"), "nccl", {"127.0.0.1"}),
        # Two ends on one GPU: NCCL would refuse them.
        (("x", "x"), ("a", "a"), "shared memory", {"127.0.0.1"}),
        (("x", None), ("a", "b"), "gloo", {"10.0.0.a"}),
    ],
)
def test_what_carries_the_weights_follows_from_where_the_ends_are(gpus, machines, way, hosts):
    metadata = [
        {
            "machine": machine,
            "memory": machine,
            "address": f"10.0.0.{machine}",
            "gpu": gpu,
            "ports": {"127.0.0.1": 1, f"10.0.0.{machine}": 2},
            "door": "of the sender",
        }
        for gpu, machine in zip(gpus, machines, strict=True)
    ]
    ours, theirs = ProcessGroupCheckpointEngine.build_topology(1, 1, metadata)

    assert ours["way"] == theirs["way"] == [way]
    assert {*ours["host"], *theirs["host"]} == hosts
    assert (ours["rank"], theirs["rank"]) == ([0], [1])
    assert math.prod(ours["size"]) == 2
