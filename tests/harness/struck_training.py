"""A training by the SDK on a mesh of several ranks, in the middle of which something of the mesh dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tinker

from harness.served import Served

NUM_STEPS = 12


@dataclass(frozen=True)
class Run:
    """What a run of the SDK came to."""

    losses: list[float]
    path: str
    adapter: str


def batch(step: int) -> list[tinker.Datum]:
    rows = [[(7 * step + 3 * place + 11 * row) % 50 + 10 for place in range(12 + 5 * row)] for row in range(4)]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def train(served: Served, tenant: str, *, after: int | None = None, strike: Callable[[], object] = lambda: None) -> Run:
    """Pipelined steps; after one of them, with the others on their way, something dies."""
    client = served.client(tenant).create_lora_training_client(base_model="tiny", rank=8, seed=7).result()
    pending = []
    for step in range(NUM_STEPS):
        passed = client.forward_backward(batch(step), "cross_entropy")
        pending.append((passed, client.optim_step(tinker.AdamParams(learning_rate=1e-2))))
        if step == after:
            passed.result()
            strike()
    losses = [passed.result().metrics["loss:sum"] for passed, _ in pending]
    assert [stepped.result().metrics["step"] for _, stepped in pending] == [float(n + 1) for n in range(NUM_STEPS)]
    return Run(losses, client.save_state("end").result().path, client.model_id)
