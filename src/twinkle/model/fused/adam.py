"""AdamW on the flat buffers of one adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.optim.adamw import adamw

from twinkle.model.fused.training import AdamParams
from twinkle.model.fused.validation import validate_adam
from twinkle.module.lora import LoraAdapter

NORM_BLOCK = 4096
NORM_PART = 1 << 24
"""Elements of a buffer of which an accelerator holds a copy at a time."""
PARALLEL_GRAIN = 32768
"""From this many elements a thread on, torch splits an elementwise operation over threads."""
SMALLEST_EPS = 1e-37
"""Below this, float32 rounds eps to (nearly) nothing."""


def l2_norm(buffer: torch.Tensor) -> float:
    """The L2 norm; on a CPU summed in blocks of one size so that its bits do not depend on the number of threads."""
    if buffer.device.type != "cpu":
        return float(norm_in_parts(buffer))
    whole = buffer.numel() // NORM_BLOCK * NORM_BLOCK
    blocks = [buffer[:whole].view(-1, NORM_BLOCK)] if whole else []
    rest = buffer[whole:]
    norms = [norm for block in blocks for norm in torch.linalg.vector_norm(block, dim=1, dtype=torch.float64).tolist()]
    norms.append(float(torch.linalg.vector_norm(rest, dtype=torch.float64)))
    return math.sqrt(math.fsum(norm * norm for norm in norms))


def norm_in_parts(buffer: torch.Tensor) -> torch.Tensor:
    """The L2 norm where the buffer is, part by part: in double precision a part is copied first."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in buffer.split(NORM_PART)]
    return torch.linalg.vector_norm(torch.stack(norms))


@torch.no_grad()
def adam_step(adapter: LoraAdapter, params: AdamParams) -> dict[str, float]:
    """Apply the gradients of ``adapter`` and clear them; without any, the moments decay and the step counts.

    What was measured of the batches that they are of is told as means over the window.

    Only this adapter's buffers take part, so the step is the same bits whoever else is being served.
    """
    validate_adam(params)
    norm = l2_norm(adapter.grad) if adapter.has_gradients else 0.0
    factor = params.grad_clip_norm / norm if 0 < params.grad_clip_norm < norm else 1.0
    if adapter.params.device.type != "cpu" and params.eps >= SMALLEST_EPS:
        fused_update(adapter, params, factor)
    else:
        blockwise_update(adapter, params, factor)
    adapter.step += 1
    measured = {name: measure.mean for name, measure in adapter.measures.items()}
    adapter.clear_gradients()
    adapter.publish()
    return {"grad_norm": norm, "learning_rate": params.learning_rate, "step": float(adapter.step), **measured}


def blockwise_update(adapter: LoraAdapter, params: AdamParams, factor: float) -> None:
    """The step with gradients times ``factor``, in blocks: by the same operations whatever the number of threads."""
    step = adapter.step + 1
    rate = params.learning_rate / (1 - params.beta1**step)
    correction = math.sqrt(1 - params.beta2**step)
    for block in _blocks(adapter.params.numel(), torch.get_num_threads()):
        grad, weights = adapter.grad[block], adapter.params[block]
        exp_avg, exp_avg_sq = adapter.exp_avg[block], adapter.exp_avg_sq[block]
        if factor != 1.0:
            grad.mul_(factor)
        if params.weight_decay:
            weights.mul_(1 - params.learning_rate * params.weight_decay)
        exp_avg.lerp_(grad, 1 - params.beta1)
        exp_avg_sq.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
        denominator = exp_avg_sq.sqrt().div_(correction).add_(params.eps)
        if params.eps < SMALLEST_EPS:
            # An entry that never had a gradient would divide 0 by 0.
            denominator.masked_fill_(denominator == 0, math.inf)
        weights.addcdiv_(exp_avg, denominator, value=-rate)


def fused_update(adapter: LoraAdapter, params: AdamParams, factor: float) -> None:
    """The same in one kernel, which reads and writes each number once; its last bits are its own."""
    if factor != 1.0:
        adapter.grad.mul_(factor)
    adamw(
        [adapter.params],
        [adapter.grad],
        [adapter.exp_avg],
        [adapter.exp_avg_sq],
        [],
        [torch.full((), float(adapter.step), dtype=torch.float32, device=adapter.params.device)],
        fused=True,
        amsgrad=False,
        beta1=params.beta1,
        beta2=params.beta2,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        eps=params.eps,
        maximize=False,
    )


def _blocks(numel: int, num_threads: int) -> Iterator[slice]:
    """Cut a buffer so that each thread gets whole grains: the same bits for any number of threads.

    The blocks also stay in the cache and bound the temporaries.
    """
    start = 0
    while start < numel:
        grains = min(num_threads, (numel - start) // PARALLEL_GRAIN)
        end = min(numel, start + max(1, grains) * PARALLEL_GRAIN)
        yield slice(start, end)
        start = end
