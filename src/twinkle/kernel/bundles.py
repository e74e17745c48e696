"""What libraries have for whole models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from twinkle.core.process.events import event_log
from twinkle.kernel.choice import LIGER, liger_is_there
from twinkle.kernel.replacing import Bundle

NO_KERNELS: Mapping[Any, Any] = {}

_log = event_log()


def liger_builtin(model: torch.nn.Module) -> Bundle | Mapping[Any, Any]:
    """What Liger has for a model of transformers: norms, rotary embeddings, gated products. Needs a GPU and Triton.

    The loss and the logits stay the model's own: losses here want each token's log-probability.
    """
    is_there, reason = liger_is_there()
    return Bundle(LIGER, _apply_liger) if is_there else _none(str(reason))


def npu_builtin(model: torch.nn.Module) -> Bundle | Mapping[Any, Any]:
    """What there is for Ascend's devices beyond torch_npu itself: nothing, which the log says."""
    return _none("there are no kernels for NPUs here beyond those of torch_npu")


def _apply_liger(model: torch.nn.Module) -> None:
    # It imports Triton, and every family of models that it knows.
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # noqa: PLC0415

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


@cache
def _none(reason: str) -> Mapping[Any, Any]:
    """Nothing, said once a process."""
    _log.info("kernel.none", reason=reason, next="the model computes with its own")
    return NO_KERNELS
