"""The sides of the sampling benchmark: our sampler, transformers and PEFT, vLLM. Each runs in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import LoraConfig
from twinkle.sampler import SampleRequest, SteppedSampler, SteppedTorchSampler, SteppedVLLMSampler

Way = Literal[
    "torch_base",
    "torch_mix",
    "launched_base",
    "launched_mix",
    "vllm_base",
    "vllm_mix",
    "generate",
    "peft_one_by_one",
]

NUM_ADAPTERS = 7
RANK = 16
PROMPT_TOKENS = (16, 48)
SLOTS = 32


class Side(Protocol):
    """What one process can do."""

    def run(self, way: Way, num_requests: int, num_tokens: int) -> None:
        """Samples so many tokens for each of so many requests."""


Build = Callable[[Path, int, str], Side]
"""Makes a side from the benchmark's folder, the number of torch's threads and the device."""


def make_prompts(num_requests: int, vocab_size: int) -> list[list[int]]:
    """Returns prompts of different lengths, the same for every side."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(*PROMPT_TOKENS, num_requests, endpoint=True)
    return [generator.integers(8, vocab_size, length).tolist() for length in lengths]


def adapter_of(request: int) -> int | None:
    """Returns whose adapter a request of a mix uses: seven in turn, and the base model."""
    index = request % (NUM_ADAPTERS + 1)
    return index if index < NUM_ADAPTERS else None


def adapter_folder(home: Path, index: int) -> Path:
    """Returns where an adapter's files are."""
    return home / f"adapter-{index}"


def measured_run(
    build: Build, home: Path, threads: int, way: Way, num_requests: int, num_tokens: int, device: str = "cpu"
) -> tuple[float, float]:
    """Runs once, in the process of a side; returns CPU and wall seconds."""
    side = _built(build, home, threads, device)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    side.run(way, num_requests, num_tokens)
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


@cache
def _built(build: Build, home: Path, threads: int, device: str) -> Side:
    return build(home, threads, device)


def write_adapters(home: Path, device: str = "cpu") -> None:
    """Writes adapters that change something, in a process of its own."""
    model = FusedLoraModel.from_pretrained(str(home / "model"), device=device)
    for index in range(NUM_ADAPTERS):
        adapter = model.create_adapter(LoraConfig(rank=RANK, seed=index), trainable=False)
        generator = torch.Generator().manual_seed(index)
        for pair in adapter.views.values():
            pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.02)
        folder = adapter_folder(home, index)
        folder.mkdir()
        for name, content in export_adapter(adapter, "model").items():
            (folder / name).write_bytes(content)


class SamplerSide:
    """A sampler of ours, with either backend."""

    def __init__(
        self, home: Path, threads: int, device: str, *, backend: Literal["torch", "vllm"], graphs: bool = True
    ) -> None:
        model_folder = str(home / "model")
        self._sampler: SteppedSampler
        if backend == "torch":
            prepare_environment()
            torch.set_num_threads(threads)
            self._sampler = SteppedTorchSampler(
                FusedLoraModel.from_pretrained(model_folder, device=device), slots=SLOTS, graphs=graphs
            )
        else:
            torch.set_num_threads(threads)
            self._sampler = SteppedVLLMSampler(
                model_folder,
                device=device,
                slots=SLOTS,
                max_rank=RANK,
                max_adapters_per_step=NUM_ADAPTERS,
                max_adapters=NUM_ADAPTERS,
            )
        self._adapters = [
            self._sampler.load_adapter({file.name: file.read_bytes() for file in adapter_folder(home, index).iterdir()})
            for index in range(NUM_ADAPTERS)
        ]
        self._vocab_size = _vocab_size(home)

    def run(self, way: Way, num_requests: int, num_tokens: int) -> None:
        """See :class:`Side`."""
        for index, prompt in enumerate(make_prompts(num_requests, self._vocab_size)):
            owner = adapter_of(index) if way.endswith("mix") else None
            self._sampler.add(
                SampleRequest(
                    key=str(index),
                    adapter=None if owner is None else self._adapters[owner],
                    prompt=tuple(prompt),
                    seed=index,
                    max_tokens=num_tokens,
                    stop_token_ids=frozenset(),
                )
            )
        drawn = 0
        while self._sampler.has_work:
            for outcome in self._sampler.step():
                if isinstance(outcome, tuple):
                    raise outcome[1]
                drawn += sum(len(sequence.tokens) for sequence in outcome.sequences)
        assert drawn == num_requests * num_tokens


class GenerateSide:
    """``model.generate`` of transformers, on the base model or through PEFT, prompts padded on the left."""

    def __init__(self, home: Path, threads: int, device: str) -> None:
        torch.set_num_threads(threads)
        folder = home / "model"
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._base, adapted = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(torch.device(device)) for _ in range(2)
        )
        peft = PeftModel.from_pretrained(adapted, adapter_folder(home, 0), adapter_name="0")
        for index in range(1, NUM_ADAPTERS):
            peft.load_adapter(adapter_folder(home, index), adapter_name=str(index))
        self._peft = peft
        self._vocab_size = _vocab_size(home)

    def run(self, way: Way, num_requests: int, num_tokens: int) -> None:
        """See :class:`Side`."""
        prompts = make_prompts(num_requests, self._vocab_size)
        if way == "generate":
            self._generate(self._base, prompts, num_tokens)
            return
        by_owner: dict[int | None, list[list[int]]] = {}
        for index, prompt in enumerate(prompts):
            by_owner.setdefault(adapter_of(index), []).append(prompt)
        for owner, group in by_owner.items():
            if owner is None:
                self._generate(self._base, group, num_tokens)
            else:
                self._peft.set_adapter(str(owner))
                self._generate(self._peft, group, num_tokens)

    @staticmethod
    def _generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        longest = max(map(len, prompts))
        gaps = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * gap + list(prompt) for gap, prompt in zip(gaps, prompts, strict=True)])
        mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
        answer = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        assert answer.shape == (len(prompts), longest + num_tokens)


def torch_side(home: Path, threads: int, device: str) -> Side:
    """Returns our own sampler."""
    return SamplerSide(home, threads, device, backend="torch")


def launched_side(home: Path, threads: int, device: str) -> Side:
    """Returns our own sampler without graphs, which a GPU has."""
    return SamplerSide(home, threads, device, backend="torch", graphs=False)


def vllm_side(home: Path, threads: int, device: str) -> Side:
    """Returns our sampler on vLLM."""
    return SamplerSide(home, threads, device, backend="vllm")


SIDES: Mapping[Build, tuple[Way, ...]] = {
    torch_side: ("torch_base", "torch_mix"),
    launched_side: ("launched_base", "launched_mix"),
    GenerateSide: ("generate", "peft_one_by_one"),
    vllm_side: ("vllm_base", "vllm_mix"),
}


def _vocab_size(home: Path) -> int:
    size: int = json.loads((home / "model" / "config.json").read_text())["vocab_size"]
    return size
