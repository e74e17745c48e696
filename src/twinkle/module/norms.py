"""Root mean square norms in one kernel, for devices that launches keep waiting: as models write them they take eight.

Shapes: N features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Protocol, cast

import torch
from torch.nn import functional

NAME = "RMSNorm"
EPS_NAMES = ("variance_epsilon", "eps")
TOLERANCE = 0.02
"""Relative. The kernel rounds once, most models twice."""
ROWS = 4


class Norm(Protocol):
    """What all of them have, whoever wrote them."""

    weight: torch.Tensor
    forward: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The rows divided by their root mean square, times the weight."""
        ...


Form = Callable[[Norm, torch.Tensor, float], torch.Tensor]


def fuse_norms(model: torch.nn.Module) -> int:
    """Have each norm of a known form computed by torch's kernel; how many were found. Weights stay where they are."""
    known: dict[tuple[type, int, float], Form | None] = {}
    num_fused = 0
    for module, eps in _norms(model):
        kind = (type(module), module.weight.shape[0], eps)
        if kind not in known:
            known[kind] = next((form for form in FORMS if _is_same(module, form, eps)), None)
        form = known[kind]
        if form is not None:
            module.forward = _bound(form, module, eps)
            num_fused += 1
    return num_fused


def _norms(model: torch.nn.Module) -> Iterator[tuple[Norm, float]]:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        eps = next((getattr(module, name) for name in EPS_NAMES if hasattr(module, name)), None)
        is_norm = type(module).__name__.endswith(NAME) and len(signature(module.forward).parameters) == 1
        if is_norm and isinstance(weight, torch.Tensor) and weight.dim() == 1 and eps:
            yield cast(Norm, module), eps


def _times_weight(norm: Norm, x: torch.Tensor, eps: float) -> torch.Tensor:
    """As Llama and Qwen3 do."""
    return functional.rms_norm(x, norm.weight.shape, norm.weight, eps)


def _times_one_more(norm: Norm, x: torch.Tensor, eps: float) -> torch.Tensor:
    """As Gemma and Qwen3.5 do, in float32: the sum has more digits than half precision."""
    return functional.rms_norm(x.float(), norm.weight.shape, norm.weight.float() + 1.0, eps).to(x.dtype)


FORMS: tuple[Form, ...] = (_times_weight, _times_one_more)


@torch.no_grad()
def _is_same(norm: Norm, form: Form, eps: float) -> bool:
    """Whether a form gives what the norm gives, for small and for large rows."""
    weight = norm.weight
    generator = torch.Generator().manual_seed(0)
    x_RN = torch.randn(ROWS, weight.shape[0], generator=generator) * torch.logspace(-3, 1, ROWS)[:, None]
    x_RN = x_RN.to(weight.device, weight.dtype)
    expected, found = norm(x_RN).float(), form(norm, x_RN, eps).float()
    return expected.shape == found.shape and bool((found - expected).norm() <= TOLERANCE * expected.norm())


def _bound(form: Form, norm: Norm, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return form(norm, hidden_states, eps)

    return forward
