"""The sides of the fusion benchmark: our engine and plain PEFT, each in a process of its own, run pass by pass.

Every tenant brings one sequence a pass. No optimizer runs: what is measured is forward and backward, and gradients are
dropped between passes, off the clock.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import psutil

# Tenant 0 has the mean rank of one, two, and every four tenants: the limit does the same arithmetic with it alone.
RANKS = (16, 16, 4, 28)
LORA_ALPHA = 32
TOKENS_PER_PASS = 1024
"""Where the engine cuts its passes on a CPU; the batches of one PEFT adapter are cut at as many."""
ANSWER_TIMEOUT_S = 600.0
PROJECTIONS = """
    q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head
    in_proj in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj
""".split()  # noqa: SIM905 - a line for each would take half a screen
"""What both sides train, the second row in layers that carry a state."""

Way = Literal["fused", "one_by_one", "limit", "step", "peft_switching", "peft_one_adapter", "peft_step"]
ENGINE_WAYS: tuple[Way, ...] = ("fused", "one_by_one", "limit")
PEFT_WAYS: tuple[Way, ...] = ("peft_switching", "peft_one_adapter")
MklMode = Literal["strict", "tiled", "none"]


@dataclass(frozen=True, kw_only=True)
class Load:
    """How many tenants bring how many tokens each."""

    tenants: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One order to a side: this load, this way, so many times on end."""

    load: Load
    way: Way
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one order took, the sum of the losses of its last pass, and what the process then held."""

    wall_s: float
    cpu_s: float
    loss: float
    rss_bytes: int = 0
    device_bytes: int = 0
    """The most that an accelerator held at once; 0 on a CPU."""


@dataclass(frozen=True, kw_only=True)
class AdapterMemory:
    """Memory of one more tenant that trains, and of the base that all share."""

    rank: int
    size_bytes: int
    rss_growth_bytes: int
    base_bytes: int


@dataclass(frozen=True, kw_only=True)
class SideFacts:
    """What a side says when it is ready."""

    determinism: str
    memory: AdapterMemory | None = None


class Side(Protocol):
    """What a process does for its parent."""

    facts: SideFacts

    def prepare(self, load: Load) -> None:
        """Make tenants and tokens; off the clock."""

    def run(self, load: Load, way: Way) -> float:
        """One forward and backward of everybody; the sum of losses."""

    def forget(self) -> None:
        """Drop all gradients; off the clock."""


class SideProcess:
    """A fresh interpreter that holds one side. A context manager: ready inside the block, gone after it.

    The allocator's thresholds are read when a process starts, so they are put into the environment by then.
    """

    def __init__(self, build: Callable[..., Side], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, arguments), daemon=True)
        self.facts = SideFacts(determinism="")

    def __enter__(self) -> SideProcess:
        self._process.start()
        self.facts = self.answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def ask(self, order: Ask) -> Pass:
        """Have one order done; blocks."""
        self.send(order)
        done: Pass = self.answer()
        return done

    def send(self, order: Ask) -> None:
        """Give an order and do not wait, for sides that run beside each other."""
        self._pipe.send(order)

    def answer(self) -> Any:
        """What the side says next."""
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise RuntimeError("a side of the benchmark did not answer in time")
        return self._pipe.recv()


def make_tokens(number: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """Returns the sequence of one tenant and, in its last place, the last target: the same on every side."""
    return np.random.default_rng(number).integers(0, vocab_size, num_tokens + 1, dtype=np.int64)


class EngineSide:
    """Our engine, its adapters, and its ways. ``step`` is one tenant's pass over the whole batch and its optimizer."""

    def __init__(self, folder: Path, threads: int, mode: MklMode, device: str = "cpu") -> None:
        import torch  # noqa: PLC0415 - the parent only orders and needs none of it

        from twinkle.model.fused.determinism import prepare_environment  # noqa: PLC0415
        from twinkle.model.fused.model import FusedLoraModel  # noqa: PLC0415

        os.environ.pop("MKL_CBWR", None)
        if mode == "strict":
            prepare_environment()
        torch.set_num_threads(threads)
        tokens_per_pass = TOKENS_PER_PASS if device == "cpu" else None
        self.model = FusedLoraModel.from_pretrained(str(folder), device=device, tokens_per_pass=tokens_per_pass)
        if mode == "none":
            # Every module shares this one product, which now takes MKL's path as it comes.
            self.model.pool.product.tile_rows = None
        determinism = "none" if mode == "none" else self.model.determinism
        self.facts = SideFacts(determinism=determinism)
        self.adapters: list[Any] = []
        self._jobs: list[Any] = []
        self._whole: list[Any] = []

    def prepare(self, load: Load) -> None:
        """See ``Side``."""
        while len(self.adapters) < load.tenants:
            self.add_adapter(RANKS[len(self.adapters) % len(RANKS)])
        data = [self.datum(number, load.tokens) for number in range(load.tenants)]
        self._jobs = [self.job(number, [datum]) for number, datum in enumerate(data)]
        self._whole = [self.job(0, data)]

    def run(self, load: Load, way: Way) -> float:
        """See ``Side``."""
        from twinkle.model.fused.training import AdamParams  # noqa: PLC0415

        calls = (
            [[job] for job in self._jobs] if way == "one_by_one" else [self._jobs if way == "fused" else self._whole]
        )
        total = 0.0
        for jobs in calls:
            for outcome in self.model.forward_backward(jobs):
                if isinstance(outcome, Exception):
                    raise outcome
                total += outcome.loss
        if way == "step":
            self.model.optim_step(self.adapters[0], AdamParams(eps=1e-8))
        return total

    def forget(self) -> None:
        """See ``Side``."""
        for adapter in self.adapters:
            adapter.clear_gradients()

    def add_adapter(self, rank: int) -> Any:
        """One more tenant."""
        from twinkle.module.lora import LoraConfig  # noqa: PLC0415

        self.adapters.append(self.model.create_adapter(LoraConfig(rank=rank, alpha=float(LORA_ALPHA))))
        return self.adapters[-1]

    def datum(self, number: int, num_tokens: int) -> Any:
        """A sequence with every target weighted 1."""
        from twinkle.model.fused.training import Datum  # noqa: PLC0415

        tokens = make_tokens(number, num_tokens, self.model.info.vocab_size)
        weights = np.ones(num_tokens, dtype=np.float32)
        return Datum(tokens=tokens[:-1], inputs={"target_tokens": tokens[1:], "weights": weights})

    def job(self, number: int, data: list[Any]) -> Any:
        """Cross entropy of one adapter."""
        from twinkle.model.fused.training import TrainJob  # noqa: PLC0415

        return TrainJob(adapter=self.adapters[number], data=tuple(data), loss="cross_entropy")


class PeftSide:
    """Plain PEFT: one base, an adapter per tenant, one of them active at a time."""

    def __init__(self, folder: Path, threads: int, device: str = "cpu") -> None:
        import torch  # noqa: PLC0415
        from peft import get_peft_model  # noqa: PLC0415
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        os.environ.pop("MKL_CBWR", None)
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self._vocab_size = base.config.vocab_size
        # PEFT takes no adapters of the last projection of Mamba, and neither do we.
        self._projections = [
            name for name in PROJECTIONS if name != "out_proj" or base.config.model_type != "nemotron_h"
        ]
        # As ours, adapters are float32 also beside a base in bfloat16: PEFT's own default.
        self._model = get_peft_model(base.to(self._device), self._config(RANKS[0]), adapter_name="tenant0").train()
        self._optimizer: Any = None
        self._num_adapters = 1
        self._active = "tenant0"
        self._inputs_BT = torch.zeros(0, 0, dtype=torch.int64)
        self._targets_BT = self._inputs_BT
        self.facts = SideFacts(determinism="none")

    def prepare(self, load: Load) -> None:
        """See ``Side``."""
        import torch  # noqa: PLC0415

        while self._num_adapters < load.tenants:
            rank = RANKS[self._num_adapters % len(RANKS)]
            self._model.add_adapter(f"tenant{self._num_adapters}", self._config(rank))
            self._num_adapters += 1
        rows = np.stack([make_tokens(number, load.tokens, self._vocab_size) for number in range(load.tenants)])
        tokens_BT = torch.from_numpy(rows).to(self._device)
        self._inputs_BT, self._targets_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def run(self, load: Load, way: Way) -> float:
        """See ``Side``."""
        step = 1 if way == "peft_switching" else max(1, TOKENS_PER_PASS // load.tokens)
        total = 0.0
        for start in range(0, load.tenants, step):
            self._switch(f"tenant{start}" if way == "peft_switching" else "tenant0")
            total += self._forward_backward(slice(start, start + step))
        if way == "peft_step":
            self._step()
        return total

    def forget(self) -> None:
        """See ``Side``."""
        self._model.zero_grad(set_to_none=True)

    def _step(self) -> None:
        import torch  # noqa: PLC0415

        if self._optimizer is None:
            parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            self._optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _switch(self, name: str) -> None:
        if name != self._active:
            self._model.set_adapter(name)
            self._active = name

    def _forward_backward(self, rows: slice) -> float:
        from torch.nn.functional import cross_entropy  # noqa: PLC0415

        logits_BTV: Any = self._model(input_ids=self._inputs_BT[rows], use_cache=False).logits
        loss: Any = cross_entropy(logits_BTV.flatten(0, 1), self._targets_BT[rows].flatten(), reduction="sum")
        loss.backward()
        return float(loss.item())

    def _config(self, rank: int) -> Any:
        from peft import LoraConfig  # noqa: PLC0415

        return LoraConfig(r=rank, lora_alpha=LORA_ALPHA, target_modules=self._projections, lora_dropout=0.0)


class MemorySide(EngineSide):
    """Says on being ready what one more training tenant takes, and then has no more to do."""

    RANK = 16
    NUM_TENANTS = 32
    NUM_TOKENS = 32

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1, "strict")
        self.add_adapter(self.RANK)
        data = [self.datum(number, self.NUM_TOKENS) for number in range(self.NUM_TENANTS)]
        self._train([self.job(0, data)])
        # The first half settles in what the pass before gave back to the allocator, the second half is what counts.
        for _ in range(2):
            before, first = rss_bytes(), len(self.adapters)
            for _ in range(self.NUM_TENANTS):
                self.add_adapter(self.RANK)
            self._train([self.job(first + number, [datum]) for number, datum in enumerate(data)])
        growth = (rss_bytes() - before) // self.NUM_TENANTS
        memory = AdapterMemory(
            rank=self.RANK,
            size_bytes=self.adapters[0].size_bytes,
            rss_growth_bytes=growth,
            base_bytes=4 * self.model.info.num_parameters,
        )
        self.facts = SideFacts(determinism=self.facts.determinism, memory=memory)

    def _train(self, jobs: list[Any]) -> None:
        from twinkle.model.fused.training import AdamParams  # noqa: PLC0415

        for outcome in self.model.forward_backward(jobs):
            if isinstance(outcome, Exception):
                raise outcome
        for job in jobs:
            self.model.optim_step(job.adapter, AdamParams())


def rss_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def device_bytes() -> int:
    """Returns the most that this process has held of an accelerator's memory."""
    import torch  # noqa: PLC0415

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


def _serve(pipe: Connection, build: Callable[..., Side], arguments: tuple[object, ...]) -> None:
    side = build(*arguments)
    pipe.send(side.facts)
    prepared: Load | None = None
    while True:
        try:
            order: Ask = pipe.recv()
        except EOFError:
            return
        if order.load != prepared:
            side.prepare(order.load)
            prepared = order.load
        wall_s = cpu_s = loss = 0.0
        for _ in range(order.times):
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            loss = side.run(order.load, order.way)
            wall_s += time.perf_counter() - wall_before
            cpu_s += time.process_time() - cpu_before
            side.forget()
        pipe.send(Pass(wall_s=wall_s, cpu_s=cpu_s, loss=loss, rss_bytes=rss_bytes(), device_bytes=device_bytes()))
