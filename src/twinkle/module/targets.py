"""Which Linear layers of a causal language model an adapter can train, found from its module tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from twinkle.core.errors import ConfigError

TargetKind = Literal["attn", "mlp", "unembed"]

ATTENTION_PARENTS = frozenset({"self_attn", "attn", "attention", "self_attention"})
MLP_PARENTS = frozenset({"mlp", "feed_forward", "ffn", "shared_expert"})
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True)
class Target:
    """One Linear that an adapter may train."""

    path: str
    kind: TargetKind
    module: torch.nn.Linear


def find_targets(model: torch.nn.Module, unembedding: torch.nn.Module) -> tuple[Target, ...]:
    """The attention, MLP and output projections of ``model``, in module order."""
    targets: list[Target] = []
    for path, module in model.named_modules():
        if module is unembedding:
            if not isinstance(module, torch.nn.Linear) or "bias" in dict(module.named_parameters()):
                raise ConfigError(f"the output head {path} is not a Linear without bias; this model cannot be served")
            targets.append(Target(path, "unembed", module))
        elif isinstance(module, torch.nn.Linear):
            kind = kind_of(path)
            if kind is not None:
                targets.append(Target(path, kind, module))
    _refuse_fused_experts(model)
    if not {target.kind for target in targets} >= {"attn", "mlp", "unembed"}:
        raise ConfigError("found no attention, MLP or output projections to adapt; this architecture is not supported")
    return tuple(targets)


def kind_of(path: str) -> TargetKind | None:
    """What a Linear of this path belongs to, by the names of the modules around it."""
    *parents, leaf = path.split(".")
    if leaf in ROUTER_NAMES:
        return None
    if ATTENTION_PARENTS.intersection(parents):
        return "attn"
    if MLP_PARENTS.intersection(parents):
        return "mlp"
    return None


def _refuse_fused_experts(model: torch.nn.Module) -> None:
    for path, parameter in model.named_parameters():
        if parameter.dim() == 3 and "experts" in path.split("."):
            raise ConfigError(
                f"{path} holds all experts in one tensor; mixture-of-experts models are not supported yet"
            )
