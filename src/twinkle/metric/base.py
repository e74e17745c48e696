"""What a metric is: it accumulates batches, is calculated once over all ranks, and starts again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

Results = dict[str, Any]
"""Numbers and texts by name; a name that begins with ``_`` is for the caller alone and is not recorded."""
Part = TypeVar("Part")


Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def padded(inputs: Batch, outputs: Mapping[str, Any], *, ignore_index: int) -> tuple[Any, Mapping[str, Any]]:
    """Labels and outputs as tensors of one batch, where a script's own loop brings rows, or outputs part by part."""
    if not isinstance(inputs, Mapping):
        labels = [torch.as_tensor(row["labels"]).flatten() for row in inputs]
        inputs = {"labels": pad_sequence(labels, batch_first=True, padding_value=ignore_index)}
    width = inputs["labels"].shape[-1]
    joined = {
        name: torch.cat([pad(torch.as_tensor(part), (0, width - part.shape[-1])) for part in value])
        if isinstance(value, (list, tuple))
        else value
        for name, value in outputs.items()
    }
    return inputs, joined


class Metric(ABC):
    """Base of metrics; ``calculate`` is called on every rank of ``process_group`` or on none.

    ``settings`` are those of a subclass that hands on whatever it was given.
    """

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: distributed.ProcessGroup | None = None,
        **settings: object,
    ) -> None:
        self.device_mesh = device_mesh
        self.process_group = process_group
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget what was accumulated."""

    @abstractmethod
    def accumulate(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, Any], **kwargs: Any) -> None:
        """Take one batch in; keywords are those of the loss, and a metric ignores those it does not know."""

    @abstractmethod
    def calculate(self) -> Results:
        """The values over all ranks since the last reset, and reset."""

    def state(self) -> dict[str, Any]:
        """What was accumulated, as data: a metric that takes it goes on from there."""
        return {name: value for name, value in vars(self).items() if name not in ("device_mesh", "process_group")}

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Take what ``state`` gave."""
        vars(self).update(state)

    def gather_results(self, local_results: list[Part]) -> list[Part]:
        """The parts of all ranks; without a process group, these."""
        if self.process_group is None:
            return local_results
        gathered: list[list[Part]] = [[] for _ in range(distributed.get_world_size(self.process_group))]
        distributed.all_gather_object(gathered, local_results, group=self.process_group)
        return [part for rank_parts in gathered for part in rank_parts]
