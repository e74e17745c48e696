"""One bound in bytes for everything on a device: who gives way before whom, and what is refused with numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from twinkle.core.adapter import AdapterConfig
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.settings import Settings
from twinkle.infra.device_memory import DeviceMemory, host_bytes
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraConfig
from twinkle.sampler.request import SampleRequest
from twinkle.sampler.torch_sampler import SteppedTorchSampler
from twinkle.workers.engines.transformers_engine import TransformersEngine

CPU = torch.device("cpu")
DatumMaker = Callable[..., Datum]


class Cache:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def give_back(self, num_bytes: int) -> None:
        self.size_bytes = max(0, self.size_bytes - num_bytes)


def test_guests_give_way_in_order_and_what_must_be_there_does_not() -> None:
    memory = DeviceMemory(100, CPU)
    memory.fix("base model", 40)
    adapters, prompts, stacks = Cache(20), Cache(15), Cache(15)
    memory.add("adapters", adapters)
    memory.add_guest("kept prompts", prompts)
    memory.add_guest("stacked adapters", stacks)
    assert (memory.free_bytes, memory.obtainable_bytes) == (10, 40)
    memory.make_room(20)
    assert (adapters.size_bytes, prompts.size_bytes, stacks.size_bytes) == (20, 5, 15)
    memory.make_room(1000)
    assert memory.held == {"base model": 40, "adapters": 20, "kept prompts": 0, "stacked adapters": 0}
    memory.reserve("adapters", 30)
    assert memory.unpromised_bytes == 30
    assert memory.room_for_guests == 30, "though 40 are free"
    stacks.size_bytes = 10
    assert memory.room_for_guests == 20
    del prompts, stacks
    assert memory.held == {"base model": 40, "adapters": 20}


@pytest.fixture
def bounded(base_dirs: Callable[[str], Path]) -> FusedLoraModel:
    """With room for its base and a megabyte."""
    memory = DeviceMemory(None, CPU)
    model = FusedLoraModel.from_pretrained(str(base_dirs("qwen3")), memory=memory)
    memory.fix("base model", model.base_bytes)
    memory.limit_bytes = model.base_bytes + (1 << 20)
    return model


def test_kept_prompts_shrink_before_an_adapter_and_adapters_of_any_rank_are_counted_as_they_are(
    bounded: FusedLoraModel,
) -> None:
    memory = bounded.memory
    sampler = SteppedTorchSampler(bounded, slots=4, max_length=64, kept_bytes=1 << 20, chunk_tokens=16)
    for number in range(8):
        prompt = tuple((number + np.arange(48)) % bounded.info.vocab_size)
        sampler.add(SampleRequest(key=str(number), adapter=None, prompt=prompt, seed=0, max_tokens=2))
    while sampler.has_work:
        assert memory.held["sampled sequences"] <= 1 << 20
        sampler.step()
        assert memory.free_bytes >= 0
    kept = memory.held["kept prompts"]
    assert kept > 0
    assert memory.held["sampled sequences"] == 0

    sizes = bounded.pool.sizes
    rank = (memory.free_bytes + kept // 2) // sizes.rank_bytes
    adapter = bounded.create_adapter(LoraConfig(rank=rank))
    small = bounded.create_adapter(LoraConfig(rank=1), trainable=False)
    assert memory.held["adapters"] == adapter.size_bytes + small.size_bytes
    assert adapter.size_bytes == rank * sizes.rank_bytes
    assert memory.held["kept prompts"] < kept
    assert memory.free_bytes >= 0
    del adapter
    assert memory.held["adapters"] == small.size_bytes


def test_a_datum_that_can_never_fit_is_refused_with_numbers_and_its_neighbour_trains(
    bounded: FusedLoraModel, make_datum: DatumMaker
) -> None:
    sizes = bounded.activation_sizes
    assert sizes is not None
    rng = np.random.default_rng(0)
    adapters = [bounded.create_adapter(LoraConfig(rank=2, seed=seed)) for seed in range(2)]
    bounded.memory.reserve("adapters", (1 << 20) - sizes.pass_bytes(20, recomputed=True))
    jobs = [
        TrainJob(adapter, (make_datum(rng, 9), make_datum(rng, length)), "cross_entropy")
        for adapter, length in zip(adapters, (21, 20), strict=True)
    ]
    refused, trained = bounded.forward_backward(jobs)
    assert isinstance(trained, TrainOutcome)
    assert isinstance(refused, InvalidInput)
    assert "data[1].model_input: has 21 tokens" in str(refused)
    assert "send at most 20 tokens" in str(refused)
    assert "base model" in str(refused)
    assert not adapters[0].has_gradients
    # What was accepted before the limit was lowered is done again all the same.
    (again,) = bounded.forward_backward([TrainJob(adapters[0], jobs[0].data, "cross_entropy", is_again=True)])
    assert isinstance(again, TrainOutcome)


def test_a_pass_keeps_its_activations_only_where_there_is_room_and_guests_leave_for_it(
    bounded: FusedLoraModel, make_datum: DatumMaker
) -> None:
    pictures = Cache(1 << 19)
    bounded.memory.add_guest("pictures", pictures)
    sizes = bounded.activation_sizes
    assert sizes is not None
    length = int(0.7 * (1 << 20) / sizes.kept)
    layer = bounded.base.model.layers[0]
    twice: list[bool] = []
    layer.register_forward_pre_hook(lambda *args: twice.append(layer.gradient_checkpointing))
    adapter = bounded.create_adapter(LoraConfig(rank=1))
    datum = make_datum(np.random.default_rng(0), length)
    for hidden in (0, 1 << 19):
        bounded.memory.fix("something else", hidden)
        (outcome,) = bounded.forward_backward([TrainJob(adapter, (datum,), "cross_entropy")])
        assert isinstance(outcome, TrainOutcome)
    assert twice == [False, True]
    assert pictures.size_bytes < 1 << 19


def test_what_a_worker_may_take_is_divided_once_and_told(base_dirs: Callable[[str], Path]) -> None:
    folder = str(base_dirs("qwen3"))
    engine = TransformersEngine.from_settings(Settings(model=folder, threads=1, device_bytes=8 << 20))
    said = engine.capabilities
    base = engine.model.base_bytes
    assert said.memory_bytes == 8 << 20
    assert said.memory_held["base model"] == base
    before = engine.memory_held()["adapters"]
    state = engine.create(AdapterConfig(base_model="m", rank=4, seed=0))
    assert engine.memory_held()["adapters"] - before == 4 * engine.model.pool.sizes.rank_bytes
    del state
    assert engine.memory_held()["adapters"] == before
    promised = engine.memory.unpromised_bytes
    assert promised is not None
    assert 0 < promised < said.memory_bytes - base - said.adapter_bytes

    with pytest.raises(ConfigError, match=r"TWINKLE_DEVICE_BYTES: the base model takes .* of 1e-05 GB"):
        TransformersEngine.from_settings(Settings(model=folder, threads=1, device_bytes=10_000))
    with pytest.raises(ConfigError, match=r"TWINKLE_ADAPTER_BYTES: .* do not fit into"):
        TransformersEngine.from_settings(Settings(model=folder, threads=1, device_bytes=8 << 20, adapter_bytes=8 << 20))


def test_a_host_has_no_more_than_its_control_group_allows(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    assert host_bytes(tmp_path, own) == host_bytes(tmp_path, tmp_path / "none")
    (inner.parent / "memory.max").write_text("1000\n")
    assert host_bytes(tmp_path, own) == 1000
    own.write_text("7:memory:/a\n")
    folder = tmp_path / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("500\n")
    assert host_bytes(tmp_path, own) == 500
