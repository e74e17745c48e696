"""An adapter on a real engine that is trained by calls, as the worker makes them."""

from __future__ import annotations

import json
from typing import Any

import torch

from twinkle.core.adapter import AdapterConfig, Dialect
from twinkle.model.script_state import Script
from twinkle.wire.calls import CALL_KINDS, Call
from twinkle.workers.engine import CallAnswer, Engine, Pass

PASSES = {"forward", "forward_only", "forward_backward", "backward"}


def twinkle_config(*, rank: int = 4, seed: int = 1, steps: int = 1, **peft: Any) -> AdapterConfig:
    """What ``add_adapter_to_model`` is accepted as."""
    return AdapterConfig(
        base_model="tiny",
        rank=rank,
        seed=seed,
        alpha=8.0,
        dialect=Dialect.TWINKLE,
        peft={"r": rank, "lora_alpha": 8, "target_modules": "all-linear", **peft},
        gradient_accumulation_steps=steps,
    )


class Called:
    """Calls on one adapter; ``parks`` puts it away and takes it back between any two of them."""

    def __init__(
        self, engine: Engine[Any], config: AdapterConfig | None = None, *, state: Any = None, parks: bool = False
    ) -> None:
        self.engine = engine
        self.state = engine.create(config or twinkle_config()) if state is None else state
        self.parks = parks

    def __call__(self, method: str, **arguments: Any) -> Any:
        """Make a call; what its JSON says, or raise why it failed."""
        assert method in CALL_KINDS
        if self.parks:
            self.state = self.engine.restore(self.engine.snapshot(self.state))
        call = Call(method=method, arguments=json.loads(json.dumps(arguments)))
        if method not in PASSES:
            body = self.engine.call(self.state, call)
        else:
            [answer] = self.engine.run_passes([self.as_pass(method, **arguments)])
            if isinstance(answer, Exception):
                raise answer
            assert isinstance(answer, CallAnswer)
            body = answer.body
        found = json.loads(body)
        return found["result"] if isinstance(found, dict) else found

    def as_pass(self, method: str, **arguments: Any) -> Pass[Any]:
        """The call as a pass to be run with others."""
        call = Call(method=method, arguments=json.loads(json.dumps(arguments)))
        return Pass(state=self.state, body=call, cache_group="tenant:t")

    @property
    def script(self) -> Script:
        assert isinstance(self.state, Script)
        return self.state

    @property
    def params(self) -> torch.Tensor:
        return self.script.adapter.params

    @property
    def grad(self) -> torch.Tensor:
        return self.script.adapter.grad
