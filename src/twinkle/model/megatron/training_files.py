"""An optimizer's state and open gradients by published names: a checkpoint has no layout, and every layout opens it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import distributed
from torch.distributed.optim import ZeroRedundancyOptimizer

from twinkle.checkpoint_engine.training_state import (
    STEP,
    load_optimizer_settings,
    read_state,
    read_window,
    state_files,
    window_files,
)
from twinkle.core.errors import InvalidInput
from twinkle.core.file_names import OPTIMIZER_FILE, OPTIMIZER_SETTINGS_FILE
from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.weights.convert import fill, published
from twinkle.model.megatron.weights.rules import WeightTable

Parameters = Mapping[str, torch.nn.Parameter]


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps what this rank steps."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        own: torch.optim.Optimizer = optimizer.optim
        return own
    return optimizer


def optimizer_state_files(
    optimizer: torch.optim.Optimizer, parameters: Parameters, table: WeightTable, layout: Layout
) -> dict[str, bytes]:
    """The state of all ranks' parameters, on rank 0; all ranks must call."""
    own = stepped(optimizer)
    state = {name: own.state[each] for name, each in parameters.items() if own.state.get(each)}
    steps = {float(values[STEP]) for values in state.values() if STEP in values}
    keys = sorted({key for values in state.values() for key, value in values.items() if _is_matrix(value)})
    told: list[tuple[set[float], list[str]]] = [(steps, keys)] * distributed.get_world_size()
    distributed.all_gather_object(told, (steps, keys))
    every_step = set().union(*(each for each, _ in told))
    if len(every_step) > 1:
        raise InvalidInput("save_optimizer", "the parameters have stepped differently often; save without it")
    tensors: dict[str, torch.Tensor] = {}
    for key in sorted(set().union(*(set(each) for _, each in told))):
        values = {name: each[key] for name, each in state.items() if key in each}
        tensors |= {f"{key}.{name}": tensor for name, tensor in published(values, table, layout)}
    if distributed.get_rank() != 0:
        return {}
    # A spread optimizer hands its settings on when it steps: a schedule may have changed them since.
    _copy_settings(optimizer, own)
    return state_files(own, tensors, step=int(every_step.pop()) if every_step else None)


@torch.no_grad()
def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    table: WeightTable,
    layout: Layout,
    files: Mapping[str, bytes],
) -> None:
    """Put this rank's part of the state back.

    Raises:
        InvalidInput: It is of another optimizer, or lacks a parameter.
    """
    tensors, step = read_state(files)
    own = stepped(optimizer)
    mine = {id(parameter) for group in own.param_groups for parameter in group["params"]}
    keys = {key.partition(".")[0] for key in tensors}
    for name, parameter in parameters.items():
        if id(parameter) not in mine:
            continue
        state = {} if step is None else {STEP: torch.tensor(float(step))}
        for key in keys:
            state[key] = torch.zeros_like(parameter)
            fill({name: state[key]}, table, _Lookup(key, tensors), layout)
        own.state[parameter] = state
    if OPTIMIZER_SETTINGS_FILE in files:
        load_optimizer_settings(own, files)
        _copy_settings(own, optimizer)


def open_window_files(
    parameters: Parameters, table: WeightTable, layout: Layout, *, num_open: int, num_tokens: int
) -> dict[str, bytes]:
    """The gradients of an open window, on rank 0; no file when none is open. All ranks must call."""
    if num_open == 0:
        return {}
    gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    tensors = dict(published(gradients, table, layout))
    return window_files(tensors, num_open=num_open, num_tokens=num_tokens) if distributed.get_rank() == 0 else {}


def load_open_window(
    parameters: Parameters, table: WeightTable, layout: Layout, files: Mapping[str, bytes]
) -> tuple[int, int]:
    """Fill this rank's gradients; how many backward passes they are of, and their count. (0, 0) without a file."""
    tensors, num_open, num_tokens = read_window(files)
    for name, parameter in parameters.items() if num_open else ():
        parameter.grad = torch.zeros_like(parameter)
        fill({name: parameter.grad}, table, tensors.__getitem__, layout)
    return num_open, num_tokens


def _copy_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for group, settings in zip(target.param_groups, source.param_groups, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


class _Lookup:
    def __init__(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._key = key
        self._tensors = tensors

    def __call__(self, name: str) -> torch.Tensor:
        found = self._tensors.get(f"{self._key}.{name}")
        if found is None:
            raise InvalidInput(OPTIMIZER_FILE, f"lacks {self._key}.{name}; it was saved from another model")
        return found


def _is_matrix(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
