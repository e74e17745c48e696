"""Gradients of a model whose tensors and layers are spread over ranks, as those of one.

A parameter is spread in one of several ways, which decide over whom its gradient is summed, and who counts it in the
norm of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.weights.convert import EXPERTS
from twinkle.model.megatron.weights.rules import WeightTable
from twinkle.model.parallel.experts import SharedExperts
from twinkle.model.parallel.gradient_sync import CLIP_EPSILON, GradientSync, sum_gradients


@dataclass(frozen=True)
class Spread:
    """How one parameter lies over the ranks.

    Args:
        is_split: Tensor ranks hold different parts.
        is_partial: They hold the same, and each has found part of its gradient.
        is_expert: It is of an expert: expert ranks hold others.
        is_tied: The first and the last stage hold it, each with part of its gradient.
        is_copy: It is the last stage's copy of such a one.
    """

    is_split: bool
    is_partial: bool = False
    is_expert: bool = False
    is_tied: bool = False
    is_copy: bool = False


def spread_of(name: str, parameter: torch.nn.Parameter, table: WeightTable) -> Spread:
    """Of one of Megatron's parameters, by its whole name."""
    named = table.find(name)
    marks = vars(parameter)
    return Spread(
        is_split=named.rule.is_split,
        is_partial=bool(marks.get("sequence_parallel") or marks.get("sums_over_heads")),
        is_expert=EXPERTS in name,
        is_tied=bool(marks.get("shared_embedding")),
        is_copy=named.is_copy,
    )


class MegatronRanks:
    """What the ranks of a layout tell each other at the end of a window.

    ``spreads`` says how each parameter lies, by its id; parameters that come later are added to it.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._groups = layout.groups
        self.spreads: dict[int, Spread] = {}
        # Of ranks with other rows; one alone has nobody to tell.
        self.process_group: distributed.ProcessGroup | None = self._groups.dp if self._groups.dp.size() > 1 else None

    def note(self, parameters: Mapping[str, torch.nn.Parameter], spreads: Mapping[str, Spread]) -> None:
        """Remember how parameters lie."""
        self.spreads |= {id(parameter): spreads[name] for name, parameter in parameters.items()}

    def share(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give every rank the values of the first that has the same part."""
        for parameter in parameters:
            spread = self.spreads[id(parameter)]
            for group in self._holders(spread):
                if group.size() > 1:
                    first = distributed.get_process_group_ranks(group)[0]
                    distributed.broadcast(parameter.detach(), first, group=group)

    def reduce(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make every gradient the sum over all ranks that have found part of it."""
        every = list(parameters)
        groups = self._groups
        for chosen, group in (
            ([each for each in every if self._of(each).is_partial], groups.tp),
            ([each for each in every if self._of(each).is_tied], groups.embd),
            ([each for each in every if not self._of(each).is_expert], groups.dp_cp),
            ([each for each in every if self._of(each).is_expert], groups.expt_dp),
        ):
            if chosen and group.size() > 1:
                sum_gradients(chosen, group)

    def keep_once(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Empty the gradients on all but the first of the ranks over which they are summed."""
        for parameter in parameters:
            spread = self._of(parameter)
            data = self._groups.expt_dp if spread.is_expert else self._groups.dp_cp
            is_kept = data.rank() == 0 and not spread.is_copy and not (spread.is_partial and self._groups.tp.rank())
            if not is_kept and parameter.grad is not None:
                parameter.grad.zero_()

    def sum_over_ranks(self, count: int) -> int:
        """A count over the ranks with other rows."""
        total = torch.tensor(count, dtype=torch.int64, device=self._layout.device)
        if self.process_group is not None:
            distributed.all_reduce(total, group=self.process_group)
        return int(total)

    def count_once(self, count: int) -> int:
        """The count on the first of them."""
        return count if self._groups.dp.rank() == 0 else 0

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_grad_norm: float, norm_type: float) -> float:
        """Clip by the norm over all stages and parts; it, before."""
        every = [each for each in parameters if each.grad is not None]
        dense = self._total([each for each in every if not self._of(each).is_expert], norm_type, self._groups.mp)
        experts = self._total([each for each in every if self._of(each).is_expert], norm_type, self._expert_group())
        is_largest = math.isinf(norm_type)
        norm = max(dense, experts) if is_largest else (dense + experts) ** (1.0 / norm_type)
        share = min(1.0, max_grad_norm / (norm + CLIP_EPSILON))
        for parameter in every:
            assert parameter.grad is not None
            parameter.grad.mul_(share)
        return norm

    def with_experts(self, experts: SharedExperts) -> GradientSync:
        """These: Megatron's layers have experts of their own."""
        return self

    def _of(self, parameter: torch.nn.Parameter) -> Spread:
        return self.spreads[id(parameter)]

    def _expert_group(self) -> Any:
        return self._groups.tp_ep_pp

    def _holders(self, spread: Spread) -> list[Any]:
        """The groups within which ranks hold the same."""
        groups = self._groups
        data = groups.expt_dp if spread.is_expert else groups.dp_cp
        tensors = groups.expt_tp if spread.is_expert else groups.tp
        return [data] if spread.is_split else [data, tensors]

    def _total(self, parameters: list[torch.nn.Parameter], norm_type: float, group: Any) -> float:
        """Of the entries' absolute values, each counted once: the largest, or the sum of powers."""
        is_largest = math.isinf(norm_type)
        total = torch.zeros((), dtype=torch.float32, device=self._layout.device)
        for parameter in parameters:
            assert parameter.grad is not None
            if self._is_counted(self._of(parameter)):
                entries = parameter.grad.detach().float().abs()
                total = torch.maximum(total, entries.max()) if is_largest else total + entries.pow(norm_type).sum()
        if group.size() > 1:
            distributed.all_reduce(
                total, distributed.ReduceOp.MAX if is_largest else distributed.ReduceOp.SUM, group=group
            )
        return float(total)

    def _is_counted(self, spread: Spread) -> bool:
        tensors = self._groups.expt_tp if spread.is_expert else self._groups.tp
        return not spread.is_copy and (spread.is_split or tensors.rank() == 0)
