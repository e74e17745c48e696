"""Launches of a pass on CUDA, counted without it: torch's operations on ``meta``, and calls of kernels of our own.

What launches nothing is not counted: views, and memory that nobody fills. An operation of torch's counts as one, though
on CUDA it may launch more, and of attention the way back is not counted. So a count tells what a change of the code
saves, and what of it is whose; how many launches a device sees only a profile tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.valueless import packed as _packed
from harness.valueless import valueless_model
from twinkle.model.fused.model import FusedLoraModel

TWICE = {"slice_backward", "select_backward"}
"""Memory that is filled with zeros, and then in part with a gradient."""
LAUNCH_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
OURS = "ours."


class Launches(TorchDispatchMode):
    """Counts launches within its context, by what is launched; kernels of our own by their names behind ``ours.``."""

    def __init__(self, ours: Counter[str]) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()
        self._ours = ours

    def __enter__(self) -> Any:
        self._ours.clear()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.of += self._ours

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        is_there = any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves((found, args)))
        if name not in LAUNCH_NOTHING and not is_view and is_there:
            self.of[name] += 2 if name in TWICE else 1
        return found


class UncomputedKernels:
    """In place of modules of kernels: each counts its launches and writes nothing."""

    def __init__(self, launched: Counter[str], names: Sequence[str]) -> None:
        for name in names:
            setattr(self, name, _Uncomputed(name, launched))


class _Uncomputed:
    def __init__(self, name: str, launched: Counter[str]) -> None:
        self._name = name
        self._launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            assert all(grid), "nothing to do is not launched"
            self._launched[OURS + self._name] += 1

        return launch


def per_layer(count: Callable[[int], Counter[str]]) -> tuple[Counter[str], Counter[str]]:
    """What one layer launches, and what a pass launches beside its layers; ``count`` takes a number of layers."""
    two, three = count(2), count(3)
    layer = Counter({name: three[name] - two[name] for name in three if three[name] != two[name]})
    rest = Counter({name: number - 2 * layer[name] for name, number in two.items() if number != 2 * layer[name]})
    return layer, rest


class _Norm(torch.autograd.Function):
    """As torch's kernel on CUDA, one each way; on ``meta`` torch takes it apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, launched: Counter[str]) -> torch.Tensor:
        launched["rms_norm"] += 1
        ctx.launched = launched
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.launched["rms_norm_backward"] += 1
        return torch.empty_like(dy), None


def counted_model(
    config: transformers.PretrainedConfig, patch: pytest.MonkeyPatch
) -> tuple[FusedLoraModel, Callable[[], Launches]]:
    """A model as CUDA runs it in half precision, with our kernels, and what counts its launches."""
    launched: Counter[str] = Counter()

    def attended(*given: Any, **options: Any) -> torch.Tensor:
        launched["attention"] += 1
        return _packed(*given, **options)

    patch.setattr("harness.valueless.packed", attended)
    kernels = UncomputedKernels(launched, ("shrink", "expand", "add_outer"))
    patch.setattr("twinkle.module.lora.kernels_for", lambda device_type, dtype: kernels)
    turning = UncomputedKernels(launched, ("turn",))
    patch.setattr("twinkle.module.rotary.kernels_for", lambda device_type, dtype, plain: turning)
    gating = UncomputedKernels(launched, ("gate", "gate_back"))
    patch.setattr("twinkle.module.gated.kernels_for", lambda device_type, dtype: gating)
    patch.setattr("twinkle.module.norms.functional.rms_norm", lambda x, *rest: _Norm.apply(x, launched))
    model, _ = valueless_model(config, patch)
    return model, lambda: Launches(launched)
