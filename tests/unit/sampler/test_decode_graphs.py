"""Passes over one token of each sequence, recorded and run again: the bits of passes launched kernel by kernel.

On a CPU a stand-in records (``harness.recorded``): whatever was not told anew between two runs shows as it does there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from structlog.testing import capture_logs

from harness.families import FAMILIES, stir
from harness.lora_kernels import LoraKernels
from harness.paged_decode_kernels import decode_kernel
from harness.pictures import save_picture_model
from harness.recorded import CountedRecorder
from twinkle.core.errors import UserError
from twinkle.infra import sending
from twinkle.infra.device_memory import DeviceMemory
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module import lora_tables, paged_varlen, varlen
from twinkle.module.lora import LoraAdapter, LoraConfig
from twinkle.module.paged_decode import DecodeKernel
from twinkle.sampler import SampleRequest, SteppedTorchSampler, decode_graphs, paged_attention
from twinkle.sampler.cache_kinds import PagedCaches
from twinkle.sampler.pages import PagePool

from .conftest import PAGE_TOKENS, run_to_end
from .test_sampler_invariance import bits_of
from .test_sampler_pictures import chunk_tokens, request_of

PROMPT = tuple(np.random.default_rng(1).integers(6, 200, 70).tolist())


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def recorder(patch: pytest.MonkeyPatch) -> CountedRecorder:
    """Of all samplers of this module, as on a device with graphs and with kernels of our own."""
    recorder = CountedRecorder()
    kernel = decode_kernel()

    def decode_kernel_for(query: torch.Tensor, key: torch.Tensor, form: Any) -> DecodeKernel | None:
        return kernel if form.chunk is None else None

    patch.setattr("twinkle.module.lora.kernels_for", lambda device_type, dtype: LoraKernels())
    patch.setattr(decode_graphs, "recorder_for", lambda device: recorder)
    for module in (decode_graphs, paged_attention):
        patch.setattr(module, "decode_kernel_for", decode_kernel_for)
    return recorder


def model_of(family: str) -> FusedLoraModel:
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    stir(base)
    return FusedLoraModel(base, name="tiny")


@pytest.fixture(scope="module")
def model(recorder: CountedRecorder) -> FusedLoraModel:
    """A dense one whose adapters are read in place."""
    return model_of("qwen3")


@pytest.fixture(scope="module")
def adapters(model: FusedLoraModel) -> list[LoraAdapter]:
    """Of unlike ranks, one of which trains a part of the layers only."""
    configs = [LoraConfig(rank=2, seed=1), LoraConfig(rank=5, seed=2, train_mlp=False), LoraConfig(rank=20, seed=3)]
    made = [model.create_adapter(config, trainable=False) for config in configs]
    for number, adapter in enumerate(made):
        fill(adapter, number)
    return made


def fill(adapter: LoraAdapter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for pair in adapter.views.values():
        pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.05)
    adapter.publish()


def request(key: str, *, prompt: Sequence[int] = PROMPT, **fields: Any) -> SampleRequest:
    return SampleRequest(key=key, prompt=tuple(prompt), **{"seed": 3, "stop_token_ids": frozenset(), **fields})


def sampler_of(model: FusedLoraModel, *, graphs: bool = True, **options: Any) -> SteppedTorchSampler:
    caches = PagedCaches(model.device, page_tokens=PAGE_TOKENS)
    options = {"slots": 16, "max_length": 256, "caches": caches, **options}
    return SteppedTorchSampler(model, graphs=graphs, **options)


def drawn(sampler: SteppedTorchSampler, requests: Sequence[SampleRequest]) -> dict[str, Any]:
    for asked in requests:
        sampler.add(asked)
    return {key: bits_of(result) for key, result in run_to_end(sampler).items()}


def mixed(adapters: Sequence[LoraAdapter]) -> list[SampleRequest]:
    """Owners of every kind, lengths that cross pages, ends at unlike times, a prompt that comes in between."""
    owners = [None, *adapters, adapters[0], adapters[2]]
    return [
        request(
            str(n), adapter=owner, prompt=PROMPT[n : 12 + 9 * n], seed=n, max_tokens=9 + 7 * n, num_samples=1 + n % 3
        )
        for n, owner in enumerate(owners)
    ]


@pytest.mark.parametrize("reads_behind", [False, True])
def test_recorded_passes_give_the_bits_of_those_launched_kernel_by_kernel(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder, reads_behind: bool
) -> None:
    expected = drawn(sampler_of(model, graphs=False, reads_behind=reads_behind), mixed(adapters))
    before = recorder.num_records, recorder.num_runs

    sampler = sampler_of(model, reads_behind=reads_behind)
    assert drawn(sampler, mixed(adapters)) == expected
    records, runs = recorder.num_records - before[0], recorder.num_runs - before[1]
    assert records >= 3
    assert runs > records + 10, "each is run once to be compared"

    # Another batch meets the records of this one.
    again = [request(f"x{n}", adapter=adapters[n % 3], prompt=PROMPT[n:40], seed=n, max_tokens=20) for n in range(4)]
    expected = drawn(sampler_of(model, graphs=False, reads_behind=reads_behind), again)
    assert drawn(sampler, again) == expected


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gemma4", "gemma4-by-layer"])
def test_layers_of_other_forms_are_recorded(family: str, recorder: CountedRecorder) -> None:
    """Windows, a cap, heads of two sizes, layers that read tokens once more."""
    model = model_of(family)
    adapter = model.create_adapter(LoraConfig(rank=3), trainable=False)
    fill(adapter, 7)
    asked = [request(str(n), adapter=adapter if n else None, max_tokens=24, seed=n) for n in range(2)]
    expected = drawn(sampler_of(model, graphs=False), asked)
    before = recorder.num_runs
    assert drawn(sampler_of(model), asked) == expected
    assert recorder.num_runs - before > 10


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "nemotron-h"])
def test_experts_of_one_stack_are_recorded(
    family: str, recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With attention or Mamba beside them. Products of a group hang on its rows here, so the numbers are
    close; owners come and go, and learn.
    """
    monkeypatch.setattr("twinkle.module.lora.supports_grouped_products", lambda device, dtype: True)
    model = model_of(family)
    made = [model.create_adapter(LoraConfig(rank=3 + n), trainable=False) for n in range(3)]
    for number, adapter in enumerate(made):
        fill(adapter, number)

    def outcomes_of(sampler: SteppedTorchSampler, owners: Sequence[LoraAdapter | None]) -> dict[str, Any]:
        for n, owner in enumerate(owners):
            prompt = PROMPT[n : 20 + n]
            sampler.add(request(str(n), adapter=owner, prompt=prompt, max_tokens=14 + 6 * n, seed=n))
        return run_to_end(sampler)

    sampler = sampler_of(model, kept_bytes=0)
    for numbers in ([None], [0, None, 1], [2, 1], [2, 1]):
        owners = [None if number is None else made[number] for number in numbers]
        before = recorder.num_runs
        found = outcomes_of(sampler, owners)
        assert recorder.num_runs - before > 5
        for key, result in outcomes_of(sampler_of(model, graphs=False), owners).items():
            for left, right in zip(result.sequences, found[key].sequences, strict=True):
                assert left.tokens.tolist() == right.tokens.tolist()
                np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-4)
        fill(made[1], 20)  # the next one samples what it has learnt

    gone = [weakref.ref(each) for each in made]
    made.clear()
    owners.clear()
    del adapter
    gc.collect()
    assert [each() for each in gone] == [None] * 3, "records hold no adapter"


def test_what_an_adapter_has_learnt_meanwhile_is_sampled(model: FusedLoraModel, recorder: CountedRecorder) -> None:
    """A record reads weights where they lie, and whose they are is told anew when an adapter is another."""
    sampler = sampler_of(model)
    made = [model.create_adapter(LoraConfig(rank=4, seed=n), trainable=False) for n in range(2)]

    def both(sampler: SteppedTorchSampler) -> dict[str, Any]:
        return drawn(sampler, [request(str(n), adapter=each, max_tokens=20) for n, each in enumerate(made)])

    seen = []
    for round_number in range(3):
        before = recorder.num_runs
        seen.append(both(sampler))
        assert recorder.num_runs - before > 8
        assert seen[-1] == both(sampler_of(model, graphs=False))
        if round_number == 0:
            fill(made[0], 11)
        else:
            made[1] = model.create_adapter(LoraConfig(rank=3, seed=9), trainable=False)
            fill(made[1], 12)
    assert seen[0]["0"] != seen[1]["0"] and seen[1]["1"] != seen[2]["1"]
    assert seen[1]["0"] == seen[2]["0"]


def test_memory_that_moves_ends_all_records(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder
) -> None:
    """It grows with the sequences, and the device takes back what nobody has, in the midst of it."""
    expected = drawn(sampler_of(model, graphs=False), mixed(adapters))
    sampler = sampler_of(model)
    caches = sampler._caches
    assert isinstance(caches, PagedCaches)
    for asked in mixed(adapters):
        sampler.add(asked)
    ended: dict[str, Any] = {}
    before = recorder.num_cleared, recorder.num_records
    steps = 0
    while sampler.has_work:
        ended |= {result.key: bits_of(result) for result in sampler.step()}
        steps += 1
        if steps % 9 == 0:
            caches.pool.trim()
    assert ended == expected
    assert recorder.num_cleared - before[0] > 3
    assert recorder.num_records - before[1] >= 3


def test_records_give_way_and_everybodys_memory_is_counted(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DeviceMemory(2**30, torch.device("cpu"))
    monkeypatch.setattr(model, "memory", memory)
    sampler = sampler_of(model, kept_bytes=0)
    caches = sampler._caches
    assert isinstance(caches, PagedCaches)
    for asked in mixed(adapters):
        sampler.add(asked)
    most = 0
    while sampler.has_work:
        sampler.step()
        assert sum(memory.held.values()) == sum(layer.nbytes for layer in caches.pool._layers_2NPGD.values())
        most = max(most, memory.held["recorded passes"])
    assert most == caches.pool.page_bytes > 0, "the page that rows of nobody write to"
    assert memory.held["sampled sequences"] == 0

    memory.make_room(memory.limit_bytes or 0)
    assert not any(memory.held.values())
    assert caches.pool._layers_2NPGD == {}


def test_an_adapter_of_nan_fails_alone_and_the_others_records_are_trusted(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder
) -> None:
    broken = model.create_adapter(LoraConfig(rank=2), trainable=False)
    healthy = request("healthy", adapter=adapters[0], max_tokens=30)
    expected = drawn(sampler_of(model, graphs=False), [healthy])
    sampler = sampler_of(model)
    sampler.add(healthy)
    sampler.add(request("broken", adapter=broken, max_tokens=30))
    for _ in range(4):
        sampler.step()
    broken.params.fill_(float("nan"))
    broken.publish()
    before = recorder.num_runs
    outcomes = run_to_end(sampler)
    assert isinstance(outcomes["broken"], UserError)
    assert bits_of(outcomes["healthy"]) == expected["healthy"]
    assert recorder.num_runs - before > 10


class Stale(CountedRecorder):
    """It gives what the first run gave."""

    def record(self, run: Any) -> Any:
        again = super().record(run)
        first = again().clone()
        return lambda: first


def test_a_record_that_is_wrong_is_never_used(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, and all goes on without."""
    expected = drawn(sampler_of(model, graphs=False), mixed(adapters))
    stale = Stale()
    monkeypatch.setattr(decode_graphs, "recorder_for", lambda device: stale)
    with capture_logs() as logs:
        assert drawn(sampler_of(model), mixed(adapters)) == expected
    assert stale.num_records == 1
    told = [line for line in logs if line["event"] == "sampler.cannot_record"]
    assert len(told) == 1 and "off by" in told[0]["reason"]


class Scribbling(CountedRecorder):
    """What it has recorded writes other keys and values."""

    def record(self, run: Any) -> Any:
        write = PagePool.write

        def scribbled() -> torch.Tensor:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PagePool, "write", lambda pool, layer, kv, slots: write(pool, layer, 3 * kv, slots))
                found: torch.Tensor = run()
            return found

        return super().record(scribbled)


def test_what_a_wrong_record_has_written_is_written_over(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    scribbling = Scribbling()
    monkeypatch.setattr(decode_graphs, "recorder_for", lambda device: scribbling)
    expected = drawn(sampler_of(model, graphs=False), mixed(adapters))
    assert drawn(sampler_of(model), mixed(adapters)) == expected
    assert scribbling.num_runs == 1


def test_a_record_that_was_wrong_is_tried_again_but_not_for_ever(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of another shape round otherwise, and once in a while a router chooses another expert for it."""
    stale = Stale()
    monkeypatch.setattr(decode_graphs, "recorder_for", lambda device: stale)
    monkeypatch.setattr(decode_graphs, "PASSES_WITHOUT", 3)
    asked = [request("it", adapter=adapters[0], max_tokens=90)]
    expected = drawn(sampler_of(model, graphs=False), asked)
    assert drawn(sampler_of(model), asked) == expected
    assert stale.num_records == decode_graphs.MOST_WRONG


class Full(CountedRecorder):
    """There is no memory for the first record."""

    def record(self, run: Any) -> Any:
        self.num_records += 1
        if self.num_records == 1:
            raise torch.OutOfMemoryError("none left")
        return super().record(run)


def test_without_memory_for_a_record_it_is_tried_again_much_later(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full()
    monkeypatch.setattr(decode_graphs, "recorder_for", lambda device: full)
    monkeypatch.setattr(decode_graphs, "PASSES_WITHOUT", 12)
    asked = [request("it", adapter=adapters[0], max_tokens=60)]
    expected = drawn(sampler_of(model, graphs=False), asked)
    sampler = sampler_of(model)
    with capture_logs() as logs:
        assert drawn(sampler, asked) == expected
    assert [line["event"] for line in logs].count("sampler.no_memory_to_record") == 1
    assert full.num_runs > 10
    assert 60 - full.num_runs > 12


def test_records_that_give_way_to_their_own_page_are_made_with_it(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that is nearly full the pool's growth asks guests for room."""
    expected = drawn(sampler_of(model, graphs=False), mixed(adapters))
    sampler = sampler_of(model)
    pool = sampler._caches.pool  # type: ignore[attr-defined]  # of pages
    take_spare = pool.take_spare

    def asked_for_room() -> Any:
        spare = take_spare()
        sampler._passes._graphs.give_back(1)  # type: ignore[union-attr]  # there are some
        return spare

    monkeypatch.setattr(pool, "take_spare", asked_for_room)
    before = recorder.num_runs
    with capture_logs() as logs:
        assert drawn(sampler, mixed(adapters)) == expected
    assert recorder.num_runs - before > 10
    assert not [line for line in logs if line["event"] == "sampler.cannot_record"]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_the_host_looks_at_are_not_recorded(
    kind: str, model: FusedLoraModel, recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = PagedCaches(model.device, page_tokens=PAGE_TOKENS)
    assert decode_graphs.graphs_for(model, caches) is not None
    for parameters in ({"rope_type": kind}, {"full_attention": {"rope_type": kind}}):
        monkeypatch.setattr(model.config, "rope_parameters", parameters)
        assert decode_graphs.graphs_for(model, caches) is None


def test_a_layer_that_no_kernel_of_ours_knows_is_told_once(
    model: FusedLoraModel, adapters: list[LoraAdapter], recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decode_graphs, paged_attention):
        monkeypatch.setattr(module, "decode_kernel_for", lambda query, key, form: None)
    expected = drawn(sampler_of(model, graphs=False), mixed(adapters))
    with capture_logs() as logs:
        assert drawn(sampler_of(model), mixed(adapters)) == expected
    told = [line["reason"] for line in logs if line["event"] == "sampler.cannot_record"]
    assert told == ["layer 0 attends in a form that no kernel of ours has"]


def test_experts_without_grouped_products_are_launched_kernel_by_kernel(recorder: CountedRecorder) -> None:
    model = model_of("qwen3-moe")
    assert decode_graphs.graphs_for(model, PagedCaches(model.device, page_tokens=PAGE_TOKENS)) is None


def test_layers_with_a_state_are_recorded(recorder: CountedRecorder) -> None:
    """Samples that go on from the states of one prompt, sequences that begin and end in between."""
    model = model_of("qwen3_5")
    adapters = [model.create_adapter(LoraConfig(rank=3 + n), trainable=False) for n in range(3)]
    for number, adapter in enumerate(adapters):
        fill(adapter, number)
    alone = [request("alone", adapter=adapters[1], max_tokens=20)]
    expected, of_one = (drawn(sampler_of(model, graphs=False), asked) for asked in (mixed(adapters), alone))
    before = recorder.num_records, recorder.num_runs
    sampler = sampler_of(model)
    # The pool has its memory before anything is recorded, as it would end all records.
    longest = [request(str(n), adapter=None, prompt=PROMPT * 3, max_tokens=2, seed=n) for n in range(16)]
    drawn(sampler, longest)
    assert recorder.num_records == before[0]
    # More sequences than those that there is room for want more room, which those before them use, too.
    assert drawn(sampler, alone) == of_one
    assert drawn(sampler, mixed(adapters)) == expected
    records, runs = recorder.num_records - before[0], recorder.num_runs - before[1]
    assert records >= 4
    assert runs > records + 20
    assert drawn(sampler, alone) == of_one


def test_tokens_after_pictures_are_recorded_at_their_positions(recorder: CountedRecorder, tmp_path: Path) -> None:
    """Beside text, which then has three axes, too, and after it, when it has one."""
    family = "qwen3-vl"
    model = FusedLoraModel.from_pretrained(str(save_picture_model(tmp_path, family)))
    adapter = model.create_adapter(LoraConfig(rank=4), trainable=False)
    fill(adapter, 5)
    asked = [
        request_of(family, 1, adapter, max_tokens=12),
        request_of(family, 2, max_tokens=20),
        request("text", adapter=adapter, prompt=range(5, 25), max_tokens=34),
    ]
    options = {"chunk_tokens": chunk_tokens(model)}
    expected = drawn(sampler_of(model, graphs=False, **options), asked)
    before = recorder.num_runs
    assert drawn(sampler_of(model, **options), asked) == expected
    assert recorder.num_runs - before > 12


def test_states_have_no_more_than_a_part_of_the_room(
    recorder: CountedRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("qwen3_5")
    memory = DeviceMemory(2**30, torch.device("cpu"))
    monkeypatch.setattr(model, "memory", memory)
    sampler = sampler_of(model)
    asked = [request("it", adapter=None, num_samples=3, max_tokens=30)]
    expected = drawn(sampler, asked)
    assert memory.held["recorded passes"] >= 4 * model.state_bytes

    memory.reserve("all", 2**30 - 7 * model.state_bytes)
    sampler = sampler_of(model)
    with capture_logs() as logs:
        assert drawn(sampler, asked) == expected
    assert [line["event"] for line in logs] == ["sampler.no_memory_to_record"]


def test_nothing_is_sent_while_a_pass_is_recorded(
    model: FusedLoraModel, adapters: list[LoraAdapter], monkeypatch: pytest.MonkeyPatch, recorder: CountedRecorder
) -> None:
    """What the host sends then would be sent again, as it was, by every run."""
    sent: list[str] = []

    class Watching(CountedRecorder):
        def record(self, run: Any) -> Any:
            def watched() -> torch.Tensor:
                with monkeypatch.context() as patch:
                    for module in (sending, lora_tables, paged_attention, paged_varlen, varlen):
                        patch.setattr(module, "send", lambda *given, it=module.__name__: sent.append(it))
                    for kind in (sending.Parcel, sending.FixedParcel):
                        patch.setattr(kind, "send", lambda *given, it=kind.__name__: sent.append(it))
                    return run()

            return super().record(watched)

    watching = Watching()
    monkeypatch.setattr(decode_graphs, "recorder_for", lambda device: watching)
    assert drawn(sampler_of(model), mixed(adapters))
    assert watching.num_records >= 3
    assert sent == []
