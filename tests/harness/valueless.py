"""torch's ``meta`` device as a stand-in for an accelerator: it has shapes and no values.

Whoever reads one of its values fails, and so does nearly everything that lets tensors of the host meet it; what is left
is counted. So a pass that runs here neither waits for an accelerator nor mixes it with the host.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twinkle.infra import sending
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.probe import TOLERANCE_HALF, Probe
from twinkle.model.fused.recomputation import SavedBytes
from twinkle.module.scaled_attention import AttentionForm

_HOW_TO_SEND = {each.__code__ for each in (sending.send, sending.Parcel.put, sending.Parcel.send)}
_OF_OTHERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


class Crossings(TorchDispatchMode):
    """Counts by their place where tensors of the host meet the device, apart those that ``infra.sending`` sends."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        """Of each of torch's operations, by name."""
        self.num_sent = 0
        self._made = _MadeOnHost(self)

    def __enter__(self) -> Any:
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._made.__exit__(*raised)

    def note(self, name: str) -> None:
        """Count one, unless it is the one way that nobody waits for."""
        frame = sys._getframe(1)
        place = ""
        while frame is not None:
            if frame.f_code in _HOW_TO_SEND:
                self.num_sent += 1
                return
            if not place and not frame.f_code.co_filename.startswith(_OF_OTHERS):
                place = f"{name} at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back
        self.counts[place or name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls[func.overloadpacket.__name__] += 1
        found = func(*args, **kwargs)
        given = {each.device.type for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        is_sent = "cpu" in given and getattr(getattr(found, "device", None), "type", "cpu") == "meta"
        if len(given) > 1 or is_sent:
            self.note(str(func))
        return found


class _MadeOnHost(TorchFunctionMode):
    """Numbers that Python makes for the device go there by a copy that is waited for."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self._crossings = crossings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == "meta":
            self._crossings.note(func.__name__)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].device.type == "meta":
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(each, (list, np.ndarray)) for each in places):
                self._crossings.note("an index of numbers")
        return func(*args, **kwargs)


class Reads(Counter[str]):
    """How often what must be read of the device was read, by what it is; the values given instead are made up."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        """In place of ``infra.sending.fetch``."""
        self["fetch"] += bool(tensors)
        return [np.zeros(tensor.shape, np.float32) for tensor in tensors]

    def all_finite(self, buffers: Sequence[torch.Tensor]) -> list[bool]:
        """Whether jobs' gradients are finite."""
        self["all_finite"] += bool(buffers)
        return [True] * len(buffers)

    def l2_norm(self, buffer: torch.Tensor) -> float:
        """The norm of an adapter's gradient."""
        self["l2_norm"] += 1
        return 0.5


def valueless_model(
    config: transformers.PretrainedConfig, patch: pytest.MonkeyPatch, *, activation_bytes: int | None = None
) -> tuple[FusedLoraModel, Reads]:
    """A model of that config as an accelerator runs it in bfloat16, never checked, and what is read of it."""
    reads = Reads()
    patch.setattr("twinkle.model.fused.recomputation.SavedBytes", MeasuredBytes)
    patch.setattr("twinkle.model.fused.step.fetch", reads.fetch)
    patch.setattr("twinkle.model.fused.loss_head.fetch", reads.fetch)
    patch.setattr("twinkle.model.fused.job_run.all_finite", reads.all_finite)
    patch.setattr("twinkle.model.fused.adam.l2_norm", reads.l2_norm)
    patch.setattr("twinkle.module.lora.supports_grouped_products", lambda device, dtype: True)
    patch.setattr("twinkle.module.packed_attention.kernel_for", packed_kernel_for)
    patch.setattr("twinkle.module.norms._is_same", lambda norm, form, eps: True)
    patch.setattr(FusedLoraModel, "_check", lambda model, probe: None)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return FusedLoraModel(made, name="tiny", probe=_Unasked(), activation_bytes=activation_bytes), reads


class _Unasked(Probe):
    def __init__(self) -> None:
        self.tolerance = TOLERANCE_HALF


def packed_kernel_for(
    query: torch.Tensor, key: torch.Tensor, form: AttentionForm
) -> Callable[..., torch.Tensor] | None:
    """In place of ``varlen.kernel_for``: a kernel for the forms that torch's knows."""
    return packed if form.cap is None and form.sinks is None else None


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """The shape of what torch's kernel for packed sequences gives; for the way back it keeps as much."""
    attended: torch.Tensor = _Packed.apply(query, key, value)
    return attended


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor) -> torch.Tensor:
        attended_THD = torch.empty_like(query_THD)
        sums_TH = query_THD.new_empty(query_THD.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query_THD, key_TGD, value_TGD, attended_THD, sums_TH)
        return attended_THD

    @staticmethod
    def backward(ctx: Any, d_attended_THD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


class MeasuredBytes(SavedBytes):
    """Knows tensors' memories apart that have no address."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__([])
        self._weights = {weight.untyped_storage()._cdata for weight in weights}

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in self._weights:
            self._kept[place] = tensor.detach()
        return tensor
