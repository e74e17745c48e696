"""Which layers of a causal language model an adapter can train, found from its module tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from twinkle.core.errors import ConfigError
from twinkle.module.expert_forms import ExpertForm

TargetKind = Literal["attn", "mlp", "unembed"]

ATTENTION_PARENTS = frozenset({"self_attn", "attn", "attention", "self_attention", "linear_attn"})
MLP_PARENTS = frozenset({"mlp", "feed_forward", "ffn", "shared_expert", "shared_experts", "block_sparse_moe"})
MIXER = "mixer"
"""What Nemotron-H calls the one thing that a layer is made of, be it attention, Mamba-2, an MLP or experts."""
MIXER_KINDS: Mapping[str, TargetKind] = {
    **dict.fromkeys(("in_proj", "q_proj", "k_proj", "v_proj", "o_proj"), "attn"),
    **dict.fromkeys(("up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj"), "mlp"),
}
"""By the names of what is in it. PEFT takes no adapter of ``out_proj``, which kernels of Mamba read past it."""
INDEX = "indexer"
"""What chooses keys in DeepSeek-V4; no gradient goes through a choice."""
GROUPED = "o_a_proj"
"""A Linear of DeepSeek-V4 whose weight is many, each for a group of heads; PEFT's update does not fit it."""
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True)
class Target:
    """One weight that an adapter may train: a Linear's, or one of the two that a module of fused experts holds."""

    path: str
    kind: TargetKind
    module: torch.nn.Module
    weight: torch.Tensor
    form: ExpertForm | None = None
    """How a module of experts holds its weights."""

    @property
    def module_path(self) -> str:
        """The path of ``module``."""
        return self.path if self.num_experts is None else self.path.rpartition(".")[0]

    @property
    def num_experts(self) -> int | None:
        """How many experts the weight [experts, out, in] has; None for a Linear's [out, in]."""
        return self.weight.shape[0] if self.weight.dim() == 3 else None

    @property
    def in_features(self) -> int:
        """Inputs, of each expert if there are any."""
        return self.weight.shape[-1]

    @property
    def out_features(self) -> int:
        """Outputs, of each expert if there are any."""
        return self.weight.shape[-2]


def find_targets(
    model: torch.nn.Module, unembedding: torch.nn.Module, decoder: torch.nn.Module | None = None
) -> tuple[Target, ...]:
    """The attention, MLP (experts included) and output projections of ``model``, in module order.

    Where there is a ``decoder`` within it, of the other parts (a vision tower) the output projection alone.
    """
    targets: list[Target] = []
    within = set(model.modules() if decoder is None else decoder.modules())
    for path, module in model.named_modules():
        if module is not unembedding and module not in within:
            continue
        if module is unembedding:
            if not isinstance(module, torch.nn.Linear) or "bias" in dict(module.named_parameters()):
                raise ConfigError(f"the output head {path} is not a Linear without bias; this model cannot be served")
            targets.append(Target(path, "unembed", module, module.weight))
        elif isinstance(module, torch.nn.Linear):
            kind = kind_of(path)
            if kind is not None:
                targets.append(Target(path, kind, module, module.weight))
        else:
            targets += _expert_targets(path, module)
    if not {target.kind for target in targets} >= {"attn", "mlp", "unembed"}:
        raise ConfigError("found no attention, MLP or output projections to adapt; this architecture is not supported")
    return tuple(targets)


def kind_of(path: str) -> TargetKind | None:
    """What a weight of this path belongs to, by the names of the modules around it."""
    *parents, leaf = path.split(".")
    if leaf in ROUTER_NAMES or leaf == GROUPED or INDEX in parents:
        return None
    if ATTENTION_PARENTS.intersection(parents):
        return "attn"
    if MLP_PARENTS.intersection(parents):
        return "mlp"
    return MIXER_KINDS.get(leaf) if MIXER in parents else None


def beside_experts(targets: Sequence[Target]) -> frozenset[str]:
    """The paths of the MLPs' Linears if there are fused experts too."""
    if all(target.num_experts is None for target in targets):
        return frozenset()
    return frozenset(target.path for target in targets if target.kind == "mlp" and target.num_experts is None)


def is_router(path: str) -> bool:
    """Whether the module of this path weighs experts against each other."""
    *parents, leaf = path.split(".")
    return leaf == "router" or (leaf in ROUTER_NAMES and bool((MLP_PARENTS | {MIXER}).intersection(parents)))


def _expert_targets(path: str, module: torch.nn.Module) -> list[Target]:
    form = ExpertForm.of(path, module)
    if form is None:
        return []
    return [Target(f"{path}.{name}", "mlp", module, form.weight(module, name), form) for name in form.names]
