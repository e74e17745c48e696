"""The baseline of the step benchmark: the training loop anyone would write with plain PEFT, in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LORA_ALPHA = 32
ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class PlainBatch:
    """Token ids and targets, one list per sequence, all of one length."""

    inputs: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step: how long its parts took, and its loss."""

    seconds: float
    forward_backward_s: float
    optim_step_s: float
    loss: float
    cpu_s: float = 0.0
    """Of the process, where the step ran in one."""


class PeftLoop:
    """The process that trains. A context manager: ready inside the block, gone after it."""

    def __init__(self, model: Path, batch: PlainBatch, *, rank: int, threads: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_train, args=(theirs, model, batch, rank, threads, device), daemon=True)

    def __enter__(self) -> PeftLoop:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def run(self, num_steps: int) -> list[Step]:
        """Train for some steps; blocks."""
        self._pipe.send(num_steps)
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise RuntimeError("the PEFT loop did not answer in time")
        steps: list[Step] = self._pipe.recv()
        return steps


def _train(pipe: Connection, folder: Path, batch: PlainBatch, rank: int, threads: int, device: str) -> None:
    # The parent measures the service's client and needs no torch.
    import torch  # noqa: PLC0415
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.set_num_threads(threads)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    config = LoraConfig(r=rank, lora_alpha=LORA_ALPHA, target_modules=projections, lora_dropout=0.0)
    model = get_peft_model(base.to(device), config).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    inputs_BT = torch.tensor(batch.inputs, device=device)
    targets_BT = torch.tensor(batch.targets, device=device)

    def step() -> Step:
        started, cpu_before = time.perf_counter(), time.process_time()
        logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        loss.backward()
        value = loss.item()
        passed = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        if device != "cpu":
            torch.accelerator.synchronize()
        ended = time.perf_counter()
        return Step(
            seconds=ended - started,
            forward_backward_s=passed - started,
            optim_step_s=ended - passed,
            loss=value,
            cpu_s=time.process_time() - cpu_before,
        )

    while True:
        try:
            num_steps = pipe.recv()
        except EOFError:
            return
        pipe.send([step() for _ in range(num_steps)])
