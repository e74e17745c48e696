"""A worker's engine by Megatron and the fused one at the same work: ``-m harness.megatron_engine MODEL 2x1x1 [RAY]``.

Over two ranks tensors, over one layers and experts; on this machine, or on the nodes of a Ray cluster.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from twinkle.core.adapter import AdapterConfig
from twinkle.core.errors import InvalidInput
from twinkle.core.settings import Settings
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.workers.engine import Pass
from twinkle.workers.process import build_engine

RANK_TIMEOUT_S = 500.0
"""Four ranks on a machine that does much else need their time to begin."""
LOSSES = ("cross_entropy", "ppo")
LENGTHS = ((30, 5, 17), (9, 21))
"""Of the datums of each of two tenants."""


def settings_of(model: str, **more: Any) -> Settings:
    return Settings(
        model=model, model_name="tiny", threads=1, tokens_per_pass=32, rank_timeout_s=RANK_TIMEOUT_S, **more
    )


def config_of(number: int) -> AdapterConfig:
    return AdapterConfig(base_model="tiny", rank=4 + number, seed=number)


def body(number: int, step: int, *, loss: str = "") -> ForwardBackwardBody:
    rng = np.random.default_rng(10 * step + number)
    data = []
    for length in LENGTHS[number]:
        inputs: dict[str, Any] = {"target_tokens": rng.integers(0, 250, length)}
        if number == 0:
            inputs["weights"] = rng.normal(size=length).astype(np.float32)
        else:
            inputs["logprobs"] = rng.normal(-5, 0.5, size=length).astype(np.float32)
            inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        data.append(WireDatum(rng.integers(0, 250, length), inputs))
    return ForwardBackwardBody("adapter", 0, False, loss or LOSSES[number], {}, tuple(data))


def passes(engine: Any, adapters: list[Any], step: int) -> list[dict[str, float]]:
    """One pass of each tenant, both submitted together; loss and logprobs."""
    answers = engine.run_passes([Pass(state=state, body=body(number, step)) for number, state in enumerate(adapters)])
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return [
        {"loss": answer.metrics["loss:sum"], "logprobs": np.concatenate(answer.logprobs).tolist()} for answer in answers
    ]


def step(engine: Any, adapters: list[Any], number: int) -> list[dict[str, float]]:
    told = passes(engine, adapters, number)
    return [
        {**one, "norm": engine.optim_step(state, AdamParams(learning_rate=1e-2))["grad_norm"]}
        for one, state in zip(told, adapters, strict=True)
    ]


def work(engine: Any) -> dict[str, Any]:
    """Two tenants' steps; then each restored in the middle of a window, alone, and loaded from its PEFT files."""
    adapters = [engine.create(config_of(number)) for number in range(2)]
    told: dict[str, Any] = {"steps": [step(engine, adapters, number) for number in range(2)]}
    passes(engine, adapters, 2)
    restored = [engine.restore(engine.snapshot(state)) for state in adapters]
    told["steps"].append(step(engine, adapters, 3))
    for number, state in enumerate(restored):
        engine.run_passes([Pass(state=state, body=body(number, 3), is_again=True)])
        engine.optim_step(state, AdamParams(learning_rate=1e-2))
        told.setdefault("replayed", []).append(engine.snapshot(state) == engine.snapshot(adapters[number]))
    files = [engine.export(state, with_optimizer=True) for state in adapters]
    told["files"] = sorted(files[0])
    loaded = [engine.load(config_of(number), files[number], with_optimizer=True, trainable=True) for number in range(2)]
    told["steps"].append(step(engine, loaded, 4))
    asked = replace(body(0, 0), forward_only=True, without_adapter=True)
    (alone,) = engine.run_passes([Pass(state=adapters[0], body=asked)])
    if isinstance(alone, Exception):
        raise alone
    told["base"] = np.concatenate(alone.logprobs).tolist()
    told["exported"] = [{name: content.hex() for name, content in each.items()} for each in files]
    return told


def refused(engine: Any) -> list[str]:
    """What is refused of passes and samples, by the field that is named; and the other tenant goes on."""
    adapters = [engine.create(config_of(number)) for number in range(2)]
    wrong, right = engine.run_passes(
        [Pass(state=adapters[0], body=body(0, 0, loss="no such loss")), Pass(state=adapters[1], body=body(1, 0))]
    )
    assert isinstance(wrong, InvalidInput), wrong
    assert not isinstance(right, Exception), right
    return [wrong.field, str(engine.has_gradients(adapters[0])), str(engine.has_gradients(adapters[1]))]


def main(model: str, layout: str, ray_address: str = "") -> None:
    tp, pp, ep = (int(size) for size in layout.split("x"))
    places: dict[str, Any] = {"tensor_parallel": tp, "pipeline_parallel": pp, "expert_parallel": ep}
    places["ranks"] = tp * pp * ep
    if ray_address:
        places |= {"ranks": f"ray:{tp * pp * ep}", "ray_address": ray_address}
    engine = build_engine(settings_of(model, engine="megatron", **places))
    told = {
        **work(engine),
        "refused": refused(engine),
        "capabilities": engine.capabilities.model_dump(mode="json"),
    }
    engine.close()
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
