"""An adapter of the fused engine as torch's optimizers see it: parameters and moments that share its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from twinkle.checkpoint_engine.peft_tensors import KEY_PREFIX, SUFFIX_A, SUFFIX_B
from twinkle.module.lora import LoraAdapter
from twinkle.module.whole import WholeLayout


def parameters_of(adapter: LoraAdapter) -> dict[str, torch.nn.Parameter]:
    """What it trains as parameters that share its buffers, gradients included; none if it is not trained."""
    if not adapter.trainable:
        return {}
    gradients = _tensors(adapter, adapter.grad)
    parameters = {name: torch.nn.Parameter(values) for name, values in _tensors(adapter, adapter.params).items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    return parameters


def _tensors(adapter: LoraAdapter, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """What lies in one of its buffers, by name: matrices, or the parameters of a whole model."""
    if isinstance(adapter.layout, WholeLayout):
        return adapter.layout.tensors(buffer)
    return {
        f"{KEY_PREFIX}{path}{suffix}": values
        for path, pair in adapter.layout.views(buffer).items()
        for suffix, values in ((SUFFIX_A, pair.a), (SUFFIX_B, pair.b))
    }


def lend_moments(
    optimizer: torch.optim.Adam, adapter: LoraAdapter, parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    """Let Adam keep its moments in the adapter's own buffers, where the service's checkpoints have them."""
    if optimizer.defaults["amsgrad"] or optimizer.defaults["capturable"] or optimizer.defaults["fused"]:
        return
    adapter.exp_avg.zero_()
    adapter.exp_avg_sq.zero_()
    averages, squares = _tensors(adapter, adapter.exp_avg), _tensors(adapter, adapter.exp_avg_sq)
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": averages[name],
            "exp_avg_sq": squares[name],
        }


def is_lent(adapter: LoraAdapter, value: object) -> bool:
    """Whether an optimizer's state lies in the adapter's buffers, which are stored with it."""
    if not isinstance(value, torch.Tensor):
        return False
    lent = {buffer.untyped_storage().data_ptr() for buffer in (adapter.exp_avg, adapter.exp_avg_sq)}
    return value.untyped_storage().data_ptr() in lent


def note_steps(optimizer: torch.optim.Optimizer | None, adapter: LoraAdapter) -> bool:
    """Let the adapter count the steps of an optimizer that keeps its moments there; whether there is such a one."""
    state: Mapping[str, Any] = next(iter(optimizer.state.values()), {}) if optimizer is not None else {}
    if not is_lent(adapter, state.get("exp_avg")):
        return False
    adapter.step = int(state["step"])
    return True


def set_steps(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Let every parameter have made so many steps."""
    for state in optimizer.state.values():
        state["step"].fill_(float(step))
