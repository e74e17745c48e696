"""Muon for the matrices of a model, AdamW for the rest: torch's Muon takes nothing but matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from twinkle.core.errors import InvalidInput

ADAM_SETTINGS = ("betas", "amsgrad")


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer of two: its groups are those of torch's Muon, then those of torch's AdamW.

    Muon (https://kellerjordan.github.io/posts/muon) orthogonalises the momentum of a matrix, which makes no sense for a
    table of embeddings or an unembedding, whose rows are looked up one by one, nor for vectors.

    Args:
        matrices: What Muon steps; may be empty.
        others: What AdamW steps, in groups of torch's form.
        lr: Of both. With ``adjust_lr_fn="match_rms_adamw"``, the default, a step of Muon is as long as one of AdamW.
        weight_decay: Of the matrices; the groups of ``others`` bring theirs.
        settings: Muon's (``momentum``, ``nesterov``, ``ns_steps``, ...) and AdamW's (``betas``).
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        others: Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        **settings: Any,
    ) -> None:
        adam_settings = {name: settings.pop(name) for name in ADAM_SETTINGS if name in settings}
        settings.setdefault("adjust_lr_fn", "match_rms_adamw")
        own, rest = list(matrices), list(others)
        self._parts: list[torch.optim.Optimizer] = []
        if own:
            self._parts.append(torch.optim.Muon(own, lr=lr, weight_decay=weight_decay, **settings))
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=lr, **adam_settings))
        super().__init__([dict(group) for part in self._parts for group in part.param_groups], self._parts[0].defaults)
        # The parts' own groups and state: who sets a rate or reads a moment here does it there.
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all parameters."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: torch would put copies in place of what the parts hold."""
        raise InvalidInput("state_dict", "cannot be loaded into this optimizer; load a checkpoint of the model")


def split_for_muon(
    parameters: Mapping[str, torch.nn.Parameter], tables: frozenset[str]
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """What Muon steps (matrices), and what AdamW does: tables of embeddings and stacks of matrices, then vectors."""
    matrices: list[torch.nn.Parameter] = []
    other: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for name, parameter in parameters.items():
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif parameter.dim() == 2 and name not in tables:
            matrices.append(parameter)
        else:
            other.append(parameter)
    return matrices, other, vectors


def create_muon(
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    tables: frozenset[str],
    lr: float,
    weight_decay: float,
    **settings: Any,
) -> MuonWithAdamW:
    """Muon over a model's parameters.

    Args:
        parameters: By name.
        tables: The names of those that hold embeddings.
        lr: As for ``MuonWithAdamW``.
        weight_decay: Of everything but vectors.
        settings: As for ``MuonWithAdamW``.

    Raises:
        InvalidInput: The settings do not fit.
    """
    matrices, other, vectors = split_for_muon(parameters, tables)
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((other, weight_decay), (vectors, 0.0))
        if members
    ]
    try:
        return MuonWithAdamW(matrices, groups, lr=lr, weight_decay=weight_decay, **settings)
    except (TypeError, ValueError) as error:
        raise InvalidInput("optimizer_cls", f"Muon cannot be built with these settings: {error}") from error
