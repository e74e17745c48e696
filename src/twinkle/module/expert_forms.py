"""How the classes of transformers hold fused experts, read off one module: one description for all of them.

Experts are two projections with a gate or an activation between. Families differ in the names of the weights, in
whether these are [E, out, in] or transposed, in biases, and in whether a token's share of an expert scales what goes in
or what comes out.

Shapes: E experts, I inputs, O outputs, A assignments of tokens to experts, H hidden size, M intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from twinkle.core.errors import ConfigError

DOWN = "down_proj"
GATED, PLAIN = "gate_up_proj", "up_proj"


@dataclass(frozen=True)
class ExpertForm:
    """Which weights experts have and how they are read.

    Args:
        first: The name of the projection in: ``gate_up_proj`` with a gate, ``up_proj`` without.
        is_transposed: Weights are [E, in, out].
        has_bias: Both projections have one, named ``<projection>_bias`` [E, O].
        scales_input: The router's weight of an expert multiplies what goes in.
        peft_swaps: PEFT takes inputs for outputs: it reads [E, out, in] unless the class says otherwise.
    """

    first: str
    is_transposed: bool
    has_bias: bool
    scales_input: bool
    peft_swaps: bool

    @classmethod
    def of(cls, path: str, module: torch.nn.Module) -> Self | None:
        """The form of a module's experts, None if it has none.

        Raises:
            ConfigError: It holds weights like those of experts in a form that is not known.
        """
        weights = {name: weight for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
        if not weights or isinstance(module, torch.nn.Conv1d):
            return None
        first = next((name for name in (GATED, PLAIN) if set(weights) == {name, DOWN}), None)
        is_normed = getattr(module, "has_post_expert_norm", False)
        if first is None or is_normed:
            raise ConfigError(
                f"{path} ({type(module).__name__}) holds experts in a form that is not supported: tensors "
                f"{', '.join(sorted(weights))}" + (", with a norm after each expert" if is_normed else "")
            )
        # The classes that transformers has no common form for do not say it; their shapes do.
        widths = weights[first].shape[1:], weights[DOWN].shape[1:]
        is_transposed = getattr(module, "is_transposed", first == GATED and widths[0][0] == widths[1][1])
        return cls(
            first=first,
            is_transposed=is_transposed,
            has_bias=f"{DOWN}_bias" in dict(module.named_parameters(recurse=False)),
            scales_input=isinstance(module, Llama4TextExperts),
            peft_swaps=is_transposed and not hasattr(module, "is_transposed"),
        )

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two weights, in the order in which they are used."""
        return self.first, DOWN

    def weight(self, module: torch.nn.Module, name: str) -> torch.Tensor:
        """A weight as [E, O, I], whichever way it is kept."""
        kept = module.get_parameter(name)
        return kept.transpose(1, 2) if self.is_transposed else kept

    def bias(self, module: torch.nn.Module, name: str) -> torch.Tensor | None:
        """A projection's biases [E, O]."""
        return module.get_parameter(f"{name}_bias") if self.has_bias else None

    def between(self, module: Any, first_AO: torch.Tensor) -> torch.Tensor:
        """What stands between the projections: the module's own gate, or its activation."""
        activated: torch.Tensor
        if self.first == PLAIN:
            activated = module.act_fn(first_AO)
        elif hasattr(module, "_apply_gate"):
            activated = module._apply_gate(first_AO)
        else:
            gate, up = first_AO.chunk(2, dim=-1)
            activated = up * module.act_fn(gate)
        return activated
