"""Micro-batches through the stages by Megatron's schedules, forward alone or forward and backward.

Shapes: N tokens of this rank of a packed row, B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import distributed

from twinkle.loss import Loss
from twinkle.model.forward_pass import PassOptions
from twinkle.model.megatron.batch import Sequences, row_labels
from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.modules.packed import PackedRow
from twinkle.model.megatron.outputs import OverContext, Scores
from twinkle.processor.input_processor import IGNORED_LABEL

RowOutputs = dict[str, list[torch.Tensor]]
"""Of a micro-batch: for each output the values of each row."""
Objective = Callable[[int, RowOutputs], torch.Tensor]
"""What to differentiate of a micro-batch, by its number, from its outputs."""


@dataclass(frozen=True)
class Wanted:
    """Which outputs a pass has."""

    temperature: float
    logps: bool
    logits: bool
    entropies: bool
    best: bool = False

    @classmethod
    def of(cls, options: PassOptions, loss: Loss, *, has_labels: bool) -> Wanted:
        """What a loss wants, and the caller."""
        return cls(options.temperature, has_labels, options.return_logits or loss.require_logits, loss.require_entropy)


class Pipeline:
    """The stages of this rank in step with those of others."""

    def __init__(self, stages: list[Any], layout: Layout, vocab_size: int) -> None:
        self.stages = stages
        self._layout = layout
        self._vocab_size = vocab_size

    def count_of(self, num_parts: int) -> int:
        """How many micro-batches a schedule takes for so many: virtual stages go round in whole rounds."""
        rounds = self._layout.pp_size if self._layout.vpp_size > 1 else 1
        return -(-num_parts // rounds) * rounds

    def run(self, parts: Sequence[Sequences], wanted: Wanted, objective: Objective | None) -> list[RowOutputs]:
        """The outputs of each micro-batch, on every stage, without a graph; all ranks of the pipeline must call.

        With an ``objective`` its gradient is added to the parameters'.
        """
        rows = self._packed(parts)
        found: list[RowOutputs] = []

        def forward_step(numbers: Iterator[int], stage: Any) -> tuple[torch.Tensor, Any]:
            number = next(numbers)
            output = self._forward(stage, parts[number], rows[number])

            def finish(logits_1NP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
                outputs = self._outputs(logits_1NP[0], parts[number], rows[number], wanted)
                value = logits_1NP.new_zeros(()) if objective is None else objective(number, outputs)
                found.append({name: [row.detach() for row in values] for name, values in outputs.items()})
                return value, torch.tensor(0, dtype=torch.int, device=value.device), None

            return output, finish

        numbers: Any = [iter(range(len(parts))) for _ in self.stages]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=numbers if len(numbers) > 1 else numbers[0],
            model=self.stages if len(self.stages) > 1 else self.stages[0],
            num_microbatches=len(parts),
            seq_length=rows[0].num_tokens,
            micro_batch_size=1,
            forward_only=objective is None,
        )
        return self._told(found)

    def _packed(self, parts: Sequence[Sequences]) -> list[PackedRow]:
        context = self._layout.groups.cp
        rows = [
            PackedRow.of(part.lengths, cp_size=context.size(), cp_rank=context.rank(), tp_size=self._layout.tp_size)
            for part in parts
        ]
        if self._layout.vpp_size == 1:
            return rows
        # Two ranks that go round in virtual stages are each other's next and previous at once, and Megatron would take
        # the length of one message for the other's: so all have one.
        longest = max(row.num_tokens for row in rows)
        return [_filled(row, longest) for row in rows]

    def _forward(self, stage: Any, part: Sequences, row: PackedRow) -> torch.Tensor:
        device = self._layout.device
        ids_1N = row.own(row.place(part.input_ids))[None]
        return stage(ids_1N, None, None, packed_seq_params=row.params(device))

    def _outputs(self, logits_NP: torch.Tensor, part: Sequences, row: PackedRow, wanted: Wanted) -> RowOutputs:
        scores = Scores(logits_NP, self._vocab_size, wanted.temperature, self._layout)
        found: dict[str, torch.Tensor] = {}
        if wanted.logps:
            found["logps"] = scores.logps(row.own(row.place(row_labels(part), fill=IGNORED_LABEL)))
        if wanted.logits:
            found["logits"] = scores.logits()
        if wanted.entropies:
            found["entropies"] = scores.entropies()
        if wanted.best:
            found["best"] = scores.best()
        return {name: self._by_row(values_N, row) for name, values_N in found.items()}

    def _by_row(self, values_N: torch.Tensor, row: PackedRow) -> list[torch.Tensor]:
        context = self._layout.groups.cp
        if context.size() > 1:
            values_N = OverContext.apply(values_N, context).index_select(0, row.gathered_order().to(values_N.device))
        return row.restore(values_N)

    def _told(self, found: list[RowOutputs]) -> list[RowOutputs]:
        """What the last stage has found, on every stage."""
        group = self._layout.groups.pp
        if group.size() == 1:
            return found
        told: list[Any] = [_moved(found, torch.device("cpu"))]
        distributed.broadcast_object_list(told, distributed.get_process_group_ranks(group)[-1], group=group)
        return _moved(told[0], self._layout.device)

    def of_all_data_ranks(self, found: list[RowOutputs]) -> list[list[RowOutputs]]:
        """What each data rank has found of its own micro-batches; all of them must ask."""
        group = self._layout.groups.dp
        if group.size() == 1:
            return [found]
        told: list[Any] = [None] * group.size()
        distributed.all_gather_object(told, _moved(found, torch.device("cpu")), group=group)
        return [_moved(each, self._layout.device) for each in told]


def _filled(row: PackedRow, num_tokens: int) -> PackedRow:
    """The row with a last sequence of padding up to a length, if it is shorter."""
    bounds = row.bounds[: len(row.lengths) + 1]
    return replace(row, bounds=bounds if bounds[-1] == num_tokens else (*bounds, num_tokens))


def _moved(outputs: Sequence[RowOutputs], device: torch.device) -> list[RowOutputs]:
    return [{name: [row.to(device) for row in rows] for name, rows in each.items()} for each in outputs]
