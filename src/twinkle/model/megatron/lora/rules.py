"""How the two matrices of a part's update lie over tensor ranks, as rules beside those of the weights.

Of a layer whose outputs are split, every rank has ``A`` and the rows of ``B`` for its outputs; of one whose inputs are
split, the columns of ``A`` for its inputs, and ``B``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from twinkle.checkpoint_engine.peft_tensors import KEY_PREFIX, SUFFIX_A, SUFFIX_B
from twinkle.model.megatron.gradients import Spread
from twinkle.model.megatron.lora.sites import Part, Site, picked_rows
from twinkle.model.megatron.weights.rules import Columns, Named, Same, Tensors, WeightRule, WeightTable


@dataclass(frozen=True)
class PickedRows:
    """Each rank holds the rows of ``B`` for those of a part's outputs that it has."""

    megatron: str
    published: tuple[str, ...]
    named: Named
    parts: tuple[Part, ...]
    index: int
    is_split: bool = True

    def local(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """The rank's rows."""
        return tensors[0][self._rows(rank, size).to(tensors[0].device)]

    def whole(self, shards: Tensors) -> tuple[torch.Tensor, ...]:
        """All rows."""
        rows = torch.cat([self._rows(rank, len(shards)) for rank in range(len(shards))])
        return (torch.cat(list(shards))[rows.argsort().to(shards[0].device)],)

    def _rows(self, rank: int, size: int) -> torch.Tensor:
        return picked_rows(self.named, self.parts, rank, size)[0][self.index]


def parameter_names(site: Site, index: int) -> tuple[str, str]:
    """What ``A`` and ``B`` of a part are called beside Megatron's names."""
    return f"{site.name}.lora_A.{index}", f"{site.name}.lora_B.{index}"


def lora_table(sites: Iterable[Site]) -> WeightTable:
    """The rules of every matrix that an adapter may have on these layers."""
    return WeightTable([rule for site in sites for rule in _rules(site)])


def _rules(site: Site) -> list[WeightRule]:
    found: list[WeightRule] = []
    for index, part in enumerate(site.parts):
        a, b = parameter_names(site, index)
        stored_a, stored_b = f"{KEY_PREFIX}{part.path}{SUFFIX_A}", f"{KEY_PREFIX}{part.path}{SUFFIX_B}"
        if site.splits_inputs:
            found += [Columns(a, (stored_a,)), Same(b, (stored_b,))]
        else:
            found += [Same(a, (stored_a,)), PickedRows(b, (stored_b,), site.named, site.parts, index)]
    return found


def spreads_of(site: Site, index: int, *, is_sequence_parallel: bool) -> dict[str, Spread]:
    """How the two matrices of a part lie over ranks.

    What all tensor ranks hold of an update they compute with the sum over ranks already, but that each sees its own
    tokens only where the sequence is split.
    """
    a, b = parameter_names(site, index)
    same = Spread(is_split=False, is_partial=is_sequence_parallel)
    split = Spread(is_split=True)
    return {a: split, b: same} if site.splits_inputs else {a: same, b: split}
